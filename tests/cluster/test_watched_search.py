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
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import pytest
import yaml
from running import told

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import StaleStageError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.rankers import RANKER, TrainedRanker
from as2ray.experiments.recipe import read_recipe
from as2ray.experiments.store import Store
from as2ray.training.tracking import TrackingConfig
from pipelines import distill, search
from tune_spaces import distillation

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

RAY = str(Path(sys.executable).with_name("ray"))
REPOSITORY = Path(__file__).parents[2]

HERE = WorkersConfig(num_workers=0)

WEIGHTS = Path(RANKER) / "model.safetensors"

NUM_TRIALS = 2
"""One runs at a time: of the second the search that is stopped knows no result."""


@pytest.fixture(scope="module")
def job_server(tmp_path_factory, forked_workers_elsewhere) -> Iterator[dict[str, str]]:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def recipe(checkpoint, folder) -> Path:
    """A recipe of a search of two trials."""
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    training = {"epochs": 1, "global_batch_size": 16, "learning_rate": 1e-3, "precision": "fp32"}
    run = {"train": ["train"], "training": training}
    table = {"corpus": "python_reference", "num_questions": 40, "max_negatives": 9}
    path = folder / "recipe.yaml"
    loss = {"type": "distillation", "teacher_index": 0}
    values = {
        "title": "Watched",
        "model": {"path": str(still), "max_length": 32},
        "tables": {split: table | {"split": split} for split in ("train", "dev")},
        "dev": "dev",
        "tests": ["dev"],
        "runs": {"teacher": run, "student": run | {"teachers": ["teacher"], "loss": loss}},
        "baseline": "teacher",
        "seeds": [0, 1],
        "student": "student",
        "num_trials": NUM_TRIALS,
        "grace_epochs": 9.0,
        "tracking": {
            "log_every_steps": 5,
            "mlflow_uri": f"sqlite:///{folder / 'mlflow.db'}",
            "upload_rankers": False,
        },
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def submit(job_server, recipe) -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """Submits the recipe as a user does, and follows the job's log: `submit(id, output)`."""
    started = []

    def begin(job: str, output: Path) -> subprocess.Popen[str]:
        variables = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [
            *(RAY, "job", "submit", "--submission-id", job),
            *("--runtime-env-json", json.dumps({"env_vars": variables}), "--"),
            *(sys.executable, "-m", "pipelines.search", "--config", str(recipe)),
            *("--output", str(output), "--store", f"{output}-store"),
            *("--workers.num_workers", "0", "--workers.cpus_per_worker", "2"),
        ]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=job_server, cwd="/", **pipe))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


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


def read(recipe: Path) -> search.Recipe:
    """The recipe, of which nothing is tracked."""
    values, *_ = read_recipe(search.Recipe, ["--config", str(recipe), "--output", "out"])
    return replace(values, tracking=TrackingConfig(tensorboard=False))


def run_here(recipe: search.Recipe, folder: Path) -> list[tuple[TrainedRanker, float, Path]]:
    """What a search that is never stopped trains: its runs, their measures and their folders.

    Without Ray, and one by one; the settings are those of Optuna's sampler with the search's seed.
    """
    stage, store = search.build(recipe, {}).stages["search"], Store(str(folder))
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    runs = []
    for _ in range(NUM_TRIALS):
        distillation.suggest(trial := study.ask())
        run = stage.tuned_run(trial.params)
        graph = run_graph([run], store, SequentialBackend(store, HERE))
        trained = store.fetch(graph.results[run])
        runs.append((run, max(told(trained, "dev/AP").values()), trained))
    return runs


@dataclass(frozen=True)
class ResumedSearch:
    """A search that was stopped after its first trial, and submitted again.

    Attributes:
        values: Its recipe.
        output: Its output folder.
        store: Of its stages.
        logs: What a user sees of each job.
        trials: Parameters and measures of its trials, by number.
        expected: See `run_here`.
    """

    values: search.Recipe
    output: Path
    store: Path
    logs: list[list[str]]
    trials: dict[int, tuple[dict[str, object], float]]
    expected: list[tuple[TrainedRanker, float, Path]]


@pytest.fixture(scope="module")
def resumed(job_server, submit, recipe, folder) -> ResumedSearch:
    pytest.importorskip("mlflow")
    output = folder / "out"
    job = submit("stopped", output)
    values = read(recipe)
    expected = run_here(values, folder / "here")
    deadline = time.monotonic() + 900
    while not (seen := complete_trials(output)):
        assert time.monotonic() < deadline, "no trial was complete after 15 minutes"
        assert job.poll() is None, job.communicate()
        time.sleep(0.2)
    done = subprocess.run([RAY, "job", "stop", "stopped"], env=job_server, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert complete_trials(output) == seen
    assert len(seen) < NUM_TRIALS
    assert not (output / "search" / "manifest.json").exists()
    assert not (output / "best.yaml").exists()
    logs = [job.communicate(timeout=900)[0].splitlines()]
    job = submit("again", output)
    logs += [job.communicate(timeout=900)[0].splitlines()]
    assert job.returncode == 0, logs[1]
    trials = complete_trials(output)
    assert trials[0] == seen[0]
    return ResumedSearch(values, output, folder / "out-store", logs, trials, expected)


def test_search_that_is_stopped_as_a_job_ends_as_one_that_was_not(resumed):
    runs, trials, searched = resumed.expected, resumed.trials, resumed.output / "search"
    applied = [distillation.apply_params(params, runs[0][0]) for params, _ in trials.values()]
    assert applied == [run for run, *_ in runs]
    assert [value for _, value in trials.values()] == [value for _, value, _ in runs]
    *_, trained = max(runs, key=lambda run: run[1])
    assert (searched / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    with (searched / "trials.csv").open() as file:
        assert len(list(csv.DictReader(file))) == NUM_TRIALS
    assert not (searched / "scratch").exists()


def test_log_of_a_job_shows_trials_and_steps_and_little_else(resumed):
    ours = [[line for line in log if re.search(r"\d\d:\d\d:\d\d  ", line)] for log in resumed.logs]
    assert len(resumed.logs[1]) - len(ours[1]) <= 30, resumed.logs
    for number, lines in enumerate(ours, start=1):
        assert any(f"trial {number}/{NUM_TRIALS} alpha " in line for line in lines), lines
    assert any("step 5/" in line and " left  loss " in line for line in ours[0]), ours  # teacher's


def test_written_recipe_shares_the_teacher_and_trains_the_student_of_the_search(resumed, tmp_path):
    best, *_ = read_recipe(
        distill.Recipe, ["--config", str(resumed.output / "best.yaml"), "--output", "out"]
    )
    run, *_ = max(resumed.expected, key=lambda run: run[1])
    assert (best.runs["student"].loss, best.runs["student"].training) == (run.loss, run.training)
    assert best.runs["teacher"] == resumed.values.runs["teacher"]
    rankers = Pipeline(distill.Recipe, distill.build, lambda recipe, finished: None)
    alone = replace(best, tracking=resumed.values.tracking, seeds=[0], measure_speed=False)
    rankers.run(alone, tmp_path, HERE, store=resumed.store)
    weights = tmp_path / "rankers" / "student-seed0" / WEIGHTS
    assert weights.read_bytes() == (resumed.output / "search" / WEIGHTS).read_bytes()
    assert len(list((resumed.store / "TrainedRanker").iterdir())) == 2


def test_complete_search_is_not_run_again_and_another_goes_elsewhere(resumed):
    files = list((resumed.output / "search").iterdir())
    before = {file: file.stat().st_mtime_ns for file in files}
    search.PIPELINE.run(resumed.values, resumed.output, HERE, store=resumed.store)
    assert {file: file.stat().st_mtime_ns for file in files} == before
    longer = replace(resumed.values, num_trials=NUM_TRIALS + 1)
    with pytest.raises(StaleStageError, match="num_trials"):
        search.PIPELINE.run(longer, resumed.output, HERE, store=resumed.store)


def test_tensorboard_and_mlflow_show_each_trial_once(resumed, folder):
    mlflow = pytest.importorskip("mlflow")
    reading = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    events = reading.EventMultiplexer().AddRunsFromDirectory(str(resumed.output)).Reload()
    shown = {name for name in events.Runs() if "/trials/" in name}
    assert len({name.split("/trials/")[1].split("/")[0] for name in shown}) == NUM_TRIALS
    assert all(events.Tensors(name, "dev/AP") for name in shown if name.endswith("tensorboard"))
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    logged = client.search_runs([client.get_experiment_by_name("Watched").experiment_id])
    assert {run.info.status for run in logged} == {"FINISHED"}
    [parent] = [run.info.run_id for run in logged if run.info.run_name == "search"]
    files = {file.path for file in client.list_artifacts(parent)}
    assert files >= {"trials.csv", "search.md", "optuna.journal"}
    children = [run for run in logged if run.data.tags.get("mlflow.parentRunId") == parent]
    assert len(children) == NUM_TRIALS
    for child in children:
        assert child.data.metrics.keys() >= {"train/loss/hard", "train/loss/soft", "dev/AP"}
        assert child.data.params.keys() >= {"alpha", "training.epochs"}
    assert {float(child.data.params["alpha"]) for child in children} == {
        float(params["alpha"]) for params, _ in resumed.trials.values()
    }
