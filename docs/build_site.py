"""Builds the site: the pages of this folder and of the root, and references made from the code.

    python docs/build_site.py        # make docs

A link that leads nowhere ends the build with status 1.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import as2ray
from as2ray.cli.main import COMMANDS
from as2ray.cli.main import main as run_command
from as2ray.evaluation.report import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "output" / "pages"
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": None, "CHANGELOG.md": None}
"""Pages of the root, and their names in the site where they differ."""
PIPELINES = (
    "own_documents", "transfer_adapt", "cascade", "distill", "search", "two_in_one", "pseudo_label",
    "build_asnq", "quickstart",
)  # fmt: skip


def main() -> None:
    """Writes all pages, and builds the site from them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for source, name in ROOT_PAGES.items():
        shutil.copy(ROOT / source, PAGES / (name or source))
    for page in PAGES.glob("*.md"):  # Pages below have no link out of the folder.
        page.write_text(link_inside(page.read_text(encoding="utf-8")), encoding="utf-8")
    references = {
        "commands": commands(),
        "recipes": recipes(),
        "python": python_names(),
        "http": http_paths(),
        "metrics": metrics(),
    }
    (PAGES / "reference").mkdir()
    for name, lines in references.items():
        text = "\n\n".join(lines) + "\n"
        (PAGES / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def link_inside(text: str) -> str:
    """Returns a page whose links lead to pages of the site instead of files of the repository."""
    text = re.sub(r"\]\((?:\.\./|docs/)(?=[\w/]+\.(?:md|png))", "](", text)
    return text.replace("](README.md", "](index.md")


def commands() -> Iterator[str]:
    """Yields the reference of the command line."""
    yield "# Commands"
    for name in COMMANDS:
        yield f"## as2ray {name}"
        yield _fenced(_printed(run_command, [name, "--help"]))


def recipes() -> Iterator[str]:
    """Yields the reference of the keys of recipes: each is a flag of its pipeline, too."""
    yield "# Keys of recipes"
    yield (
        "Each flag is a key of the recipe's YAML file, too. A dot leads into a section: "
        "`--model.path X` is the key `path` of `model`."
    )
    for name in PIPELINES:
        pipeline = import_module(f"pipelines.{name}").PIPELINE
        yield f"## pipelines.{name}"
        sys.argv[0] = f"python -m pipelines.{name}"
        yield _fenced(_printed(pipeline.command, ["--help"]))


def python_names() -> Iterator[str]:
    """Yields the reference of the Python package, which mkdocstrings fills."""
    yield "# Python"
    yield "Everything that `import as2ray` offers."
    for name in as2ray.__all__:
        if not name.startswith("_"):
            yield f"::: {as2ray._MODULES[name]}.{name}"


def http_paths() -> Iterator[str]:
    """Yields the reference of the service's paths."""
    from as2ray.retrieval.index_writer import IndexConfig, write_index
    from as2ray.retrieval.sentence_index import SentenceIndex
    from as2ray.serving.api_page import list_operations
    from as2ray.serving.app import create_app
    from as2ray.serving.settings import Settings

    yield "# HTTP"
    yield "The running service shows this page at `/docs`, and as a schema at `/openapi.json`."
    with TemporaryDirectory() as folder:
        document = Path(folder) / "a.txt"
        document.write_text("A sentence.")
        write_index(document, Path(folder) / "index", IndexConfig())
        index = SentenceIndex.open(Path(folder) / "index")
        schema = create_app(None, Settings(), index=index).openapi()  # type: ignore[arg-type]
    for operation in list_operations(schema):
        yield f"## {operation.method} {operation.path}"
        yield operation.description
        if operation.fields:
            yield markdown_table(("field", "type", ""), operation.fields)


def metrics() -> Iterator[str]:
    """Yields the reference of the service's metrics."""
    from as2ray.serving.metrics import ServiceMetrics

    yield "# Metrics of the service"
    yield "`/metrics` of the service has these. Where Ray exports them, names begin with `ray_`."
    described = [x.info for x in vars(ServiceMetrics()).values() if hasattr(x, "info")]
    columns = ("name", "description", "tag_keys")
    rows = [[*(x[name] for name in columns[:2]), ", ".join(x[columns[2]])] for x in described]
    yield markdown_table(("metric", "meaning", "labels"), rows)


def _printed(command: Callable[[list[str]], object], arguments: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        command(arguments)
    return output.getvalue().strip()


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    main()
