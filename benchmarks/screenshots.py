"""Takes the screenshots of the docs: a search and its runs, and services that run, in Chromium.

    python -m benchmarks.screenshots OUT [--ray URL] [--service URL] [--page NAME=URL ...]

OUT is the output folder of a pipeline. TensorBoard is started on it, optuna-dashboard on its newest
search, and MLflow on `--mlflow_uri` or on a database in OUT; all end with the script. What runs
elsewhere is given by URL: Ray's dashboard, whose newest job is shown, the service, which is asked
`--question`, and any other page, such as `--page grafana=http://127.0.0.1:3000/d/as2ray`.
RAY_AUTH_TOKEN is the token of Ray's dashboard, if it wants one.
"""

import argparse
import fnmatch
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1_200, 1_100
MAX_BYTES = 150_000
CLICKS = {
    "mlflow": "[aria-label='Close']",
    "service": "#rank",
    "tensorboard": "[aria-label='Toggle settings side pane']",
}
"""What is clicked before the picture: side panes close, and the service answers."""
QUESTION = "How are default parameter values evaluated?"
"""A question to the documents of the quickstart."""
TOKEN = os.environ.get("RAY_AUTH_TOKEN", "")
READY_S = 90.0
"""Seconds that a server has to respond, and a page to be drawn."""


def main(argv: Sequence[str] | None = None) -> None:
    """Starts what OUT has data for, and takes all screenshots."""
    parser = argparse.ArgumentParser(description="Takes the screenshots of the docs.")
    parser.add_argument("out", type=Path, help="output folder of a pipeline")
    parser.add_argument("--mlflow_uri", help="default: the newest mlflow.db in OUT")
    parser.add_argument("--ray", metavar="URL", help="Ray's dashboard")
    parser.add_argument("--service", metavar="URL", help="a service of `as2ray serve`")
    parser.add_argument("--question", default=QUESTION, help="what the service is asked")
    parser.add_argument("--page", metavar="NAME=URL", action="append", default=[])
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the pictures")
    args = parser.parse_args(argv)
    args.images.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        pages = dict(page.split("=", 1) for page in args.page)
        if args.ray:
            pages["ray_job"] = f"{args.ray}/#/jobs/{newest_job(args.ray)}"
        if args.service:
            pages["service"] = args.service
        if find_newest(args.out, "events.out.tfevents.*"):
            command = ["tensorboard", "--host", "127.0.0.1", "--logdir", str(args.out)]
            pages["tensorboard"] = stack.enter_context(server(*command)) + "/#timeseries"
        if journal := find_newest(args.out, "optuna.journal"):
            url = stack.enter_context(server("optuna-dashboard", str(journal)))
            pages["optuna"] = f"{url}/dashboard/studies/0"
        database = find_newest(args.out, "mlflow.db")
        if uri := args.mlflow_uri or (database and f"sqlite:///{database}"):
            url = stack.enter_context(server("mlflow", "ui", "--backend-store-uri", uri))
            pages["mlflow"] = (
                f"{url}/#/experiments/{newest_experiment(url)}/runs?compareRunsMode=CHART"
            )
        if not pages:
            parser.error(
                f"nothing to show: {args.out} has no run and no search, and no URL is given"
            )
        browser = stack.enter_context(chromium())
        for name, url in pages.items():
            browser.get(url)
            if name == "ray_job" and TOKEN:
                browser.add_cookie({"name": "ray-authentication-token", "value": TOKEN})
                browser.refresh()
            wait_until_drawn(browser)
            if name == "service":
                field = browser.find_element("id", "question")
                field.clear()
                field.send_keys(args.question)
            for element in browser.find_elements("css selector", CLICKS.get(name, "none"))[:1]:
                element.click()
                wait_until_drawn(browser)
            path = args.images / f"{name}.png"
            path.write_bytes(compress(browser.get_screenshot_as_png()))
            print(f"{path.stat().st_size:9,} bytes  {path}  {url}")


def find_newest(folder: Path, pattern: str) -> Path | None:
    """Returns the newest file of this name below a folder; links to stages are followed."""
    found = os.walk(folder.resolve(), followlinks=True)
    files = [
        Path(root, name) for root, _, names in found for name in fnmatch.filter(names, pattern)
    ]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def read_json(url: str, body: dict[str, Any] | None = None) -> Any:
    """Returns what a URL responds, as JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except OSError as error:
        sys.exit(f"{url}: {error}; a dashboard with a token needs RAY_AUTH_TOKEN")


def newest_job(ray_url: str) -> str:
    """Returns the id of the newest job of Ray's dashboard, as its pages name it."""
    jobs = read_json(f"{ray_url}/api/jobs/")
    if not jobs:
        sys.exit(f"{ray_url} has no job; submit one with `ray job submit`")
    job = max(jobs, key=lambda job: job["start_time"] or 0)
    return str(job["job_id"] or job["submission_id"])


def newest_experiment(mlflow_url: str) -> str:
    """Returns the id of the newest experiment of MLflow."""
    body = {"max_results": 1, "order_by": ["last_update_time DESC"]}
    found = read_json(f"{mlflow_url}/api/2.0/mlflow/experiments/search", body)
    return str(found["experiments"][0]["experiment_id"])


@contextmanager
def server(*command: str) -> Iterator[str]:
    """Starts an installed program on a free port; returns its URL."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(command[0], path=folders)
    if program is None:
        sys.exit(f"{command[0]} is not installed; run: pip install 'as2ray[tracking]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [program, *command[1:], "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # A session of its own, so that the processes that it starts end with it.
    with subprocess.Popen(arguments, start_new_session=True, **quiet) as process:
        try:
            until = time.monotonic() + READY_S
            while not responds(url):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"{' '.join(arguments)} does not respond")
                time.sleep(0.5)
            yield url
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGTERM)


def responds(url: str) -> bool:
    """Tells whether a server responds."""
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts Chromium without a window."""
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        sys.exit("no chromium; run: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    size = f"--window-size={WIDTH},{HEIGHT}"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        size,
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(executable_path=driver))
    try:
        yield browser
    finally:
        browser.quit()


def wait_until_drawn(browser: Any) -> None:
    """Waits until four pictures in a row, a second apart, are the same."""
    pictures: list[bytes] = []
    until = time.monotonic() + READY_S
    while time.monotonic() < until and (len(pictures) < 4 or len(set(pictures[-4:])) > 1):
        time.sleep(1)
        pictures.append(browser.get_screenshot_as_png())


def compress(png: bytes) -> bytes:
    """Returns a picture with as many colors as fit `MAX_BYTES`."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for num_colors in (256, 128, 64, 32, 16):
        buffer = io.BytesIO()
        image.quantize(num_colors).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MAX_BYTES:
            break
    return buffer.getvalue()


if __name__ == "__main__":
    main()
