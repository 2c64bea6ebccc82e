"""A search that is submitted as a job, watched while it runs, stopped and submitted again."""

import csv
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

RAY = str(Path(sys.executable).with_name("ray"))
REPOSITORY = Path(__file__).parents[2]

NUM_TRIALS = 2
"""One runs at a time: of the second the search that is stopped knows no result."""


@pytest.fixture(scope="module")
def job_server(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A Ray of one node that wants a token; yields the environment of its users."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    port, dashboard, agent, agent_grpc = (each.getsockname()[1] for each in with_ports)
    for each in with_ports:
        each.close()
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    folder = tmp_path_factory.mktemp("ray")
    flags = {
        "port": port,
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "dashboard-agent-grpc-port": agent_grpc,
        "num-cpus": 2,
        "object-store-memory": 10**8,
        "temp-dir": Path("/tmp") / f"ray-{secrets.token_hex(4)}",  # a socket's path must be short
    }
    command = [RAY, "start", "--head", "--block", *(f"--{k}={v}" for k, v in flags.items())]
    with (folder / "head.log").open("wb") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 900
            while not _has_job_server(environment):
                assert head.poll() is None, (folder / "head.log").read_text()
                assert time.monotonic() < deadline, (folder / "head.log").read_text()
                time.sleep(0.5)
            yield environment
        finally:
            head.terminate()  # it ends the processes that it started
            head.wait(timeout=900)


def _has_job_server(environment: dict[str, str]) -> bool:
    url = f"{environment['RAY_API_SERVER_ADDRESS']}/api/jobs/"
    headers = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
    with suppress(OSError):
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers)).status == 200
    return False


@pytest.fixture
def recipe(checkpoint, tmp_path) -> Path:
    """A recipe of a search of two trials, whose trial takes some seconds."""
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    training = {"epochs": 4, "global_batch_size": 16, "learning_rate": 1e-3, "precision": "fp32"}
    run = {"train": ["train"], "training": training}
    table = {"corpus": "python_reference", "num_questions": 40, "max_negatives": 9}
    path = tmp_path / "recipe.yaml"
    loss = {"type": "distillation", "teacher_index": 0}
    values = {
        "title": "Watched",
        "model": {"path": str(still), "max_length": 32},
        "tables": {split: table | {"split": split} for split in ("train", "dev")},
        "dev": "dev",
        "tests": ["dev"],
        "runs": {"teacher": run, "student": run | {"teachers": ["teacher"], "loss": loss}},
        "baseline": "teacher",
        "seeds": [0],
        "student": "student",
        "num_trials": NUM_TRIALS,
        "grace_epochs": 9.0,
        "tracking": {
            "log_every_steps": 5,
            "mlflow_uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
            "upload_rankers": False,
        },
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def submit(job_server, recipe) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Submits the recipe as a user does: `submit(id, output, *flags)`."""

    def begin(
        job: str, output: Path, *flags: str, wait: bool = True
    ) -> subprocess.CompletedProcess[str]:
        variables = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [
            *(RAY, "job", "submit", *([] if wait else ["--no-wait"]), "--submission-id", job),
            *("--runtime-env-json", json.dumps({"env_vars": variables}), "--"),
            *(sys.executable, "-m", "pipelines.search", "--config", str(recipe)),
            *("--output", str(output), "--workers.num_workers", "0"),
            *("--workers.cpus_per_worker", "2", *flags),
        ]
        return subprocess.run(
            command, env=job_server, capture_output=True, text=True, timeout=900, cwd="/"
        )

    return begin


def complete_trials(output: Path) -> dict[int, tuple[dict[str, object], float]]:
    """Reads from Optuna's journal what the trials that are complete have tried and reached."""
    path = output / "search" / "optuna.journal"
    if not path.exists():
        return {}
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    studies = optuna.get_all_study_names(storage)
    trials = [
        t for name in studies for t in optuna.load_study(study_name=name, storage=storage).trials
    ]
    return {t.number: (t.params, t.values[0]) for t in trials if t.state.is_finished() and t.values}


def test_search_that_is_stopped_as_a_job_ends_as_one_that_was_not(job_server, submit, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    reading = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = submit("whole", whole, "--store", str(tmp_path / "store-whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    trials = complete_trials(whole)
    assert len(trials) == NUM_TRIALS
    done = subprocess.run([RAY, "job", "logs", "whole"], env=job_server, capture_output=True)
    lines = done.stdout.decode().splitlines()
    ours = [line for line in lines if re.search(r"\d\d:\d\d:\d\d  ", line)]
    assert len(lines) - len(ours) <= 30, done.stdout.decode()
    for number in range(1, NUM_TRIALS + 1):
        assert any(f"trial {number}/{NUM_TRIALS} alpha " in line for line in ours)
    assert any("step 5/" in line and " left  loss " in line for line in ours)

    flags = ("--store", str(tmp_path / "store"))
    done = submit("stopped", stopped, *flags, wait=False)
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 900
    while not (seen := complete_trials(stopped)):
        assert time.monotonic() < deadline, "no trial was complete after 15 minutes"
        time.sleep(0.5)
    done = subprocess.run([RAY, "job", "stop", "stopped"], env=job_server, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(complete_trials(stopped)) < NUM_TRIALS
    assert not (stopped / "search" / "manifest.json").exists()
    assert not (stopped / "best.yaml").exists()

    done = submit("again", stopped, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    found = complete_trials(stopped)
    assert found == trials
    assert {number: found[number] for number in seen} == seen
    assert (stopped / "best.yaml").read_bytes() == (whole / "best.yaml").read_bytes()
    with (stopped / "search" / "trials.csv").open() as file:
        assert len(list(csv.DictReader(file))) == NUM_TRIALS

    runs = reading.EventMultiplexer().AddRunsFromDirectory(str(stopped)).Reload()
    shown = {name for name in runs.Runs() if "/trials/" in name}
    assert len({name.split("/trials/")[1].split("/")[0] for name in shown}) == NUM_TRIALS
    assert all(runs.Tensors(name, "dev/AP") for name in shown if name.endswith("tensorboard"))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    logged = client.search_runs([client.get_experiment_by_name("Watched").experiment_id])
    searches = [run for run in logged if run.info.run_name == "search"]
    assert {run.info.status for run in logged} == {"FINISHED"}
    for search in searches:
        parent = search.info.run_id
        children = [r for r in logged if r.data.tags.get("mlflow.parentRunId") == parent]
        assert len(children) == NUM_TRIALS
        assert {float(run.data.params["alpha"]) for run in children} == {
            float(params["alpha"]) for params, _ in trials.values()
        }
