"""What trackers show of the stages of an experiment while they run, and afterwards."""

import json
from dataclasses import dataclass, replace

import pytest
import tiny

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.command import log_reports
from as2ray.experiments.executor import SequentialBackend
from as2ray.experiments.experiment import Experiment, run_experiment
from as2ray.experiments.rankers import TrainedRanker
from as2ray.experiments.stage import Stage
from as2ray.experiments.store import Store
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from as2ray.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class DevTable(Stage):
    def run(self, context):
        tiny.write_corpus(context.output, tiny.candidates(20))
        return {"counts": {}, "fingerprint": "dev"}


@pytest.fixture
def run_stage(checkpoint, tmp_path):
    """Runs a training stage `rankers/first-seed0` of the recipe `Tiny` with these trackers."""
    training = TrainingConfig(epochs=2, global_batch_size=32, precision="fp32")
    model, store = ModelSpec(str(checkpoint("bert", None)), max_length=32), tmp_path / "store"
    stage = TrainedRanker(model, (DevTable(),), DevTable(), training)

    def run(tracking: TrackingConfig, store=store):
        experiment, place = Experiment(), Store(str(store))
        experiment.add("rankers/first-seed0", replace(stage, tracking=tracking))
        backend = SequentialBackend(place, WorkersConfig(num_workers=0))
        output = tmp_path / "output"
        return run_experiment(experiment, output, place, backend, lambda _: None, title="Tiny")

    return run


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupts a run before its second evaluation, in the block."""
    validate = Trainer._validate
    states = []

    def interrupted(trainer):
        states.append(trainer.state)
        if len(states) == 2:
            raise KeyboardInterrupt
        validate(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", interrupted)
        yield patch


def test_output_shows_the_same_run_in_tensorboard_while_it_runs_and_afterwards(
    run_stage, interrupt, tmp_path
):
    reading = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    folder = tmp_path / "output" / "rankers" / "first-seed0" / "tensorboard"

    def logged_steps() -> list[int]:
        """Reads what `tensorboard --logdir OUTPUT` shows."""
        runs = reading.EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "output")).Reload()
        [name] = runs.Runs()
        assert name == "rankers/first-seed0/tensorboard"
        return [event.step for event in runs.Tensors(name, "dev/AP")]

    with pytest.raises(KeyboardInterrupt):
        run_stage(TrackingConfig())
    assert logged_steps() == [4]
    assert not (folder.parent / "manifest.json").exists()
    interrupt.undo()
    run_stage(TrackingConfig())
    assert logged_steps()[-2:] == [4, 8]
    manifest = json.loads((folder.parent / "manifest.json").read_text())
    assert any(name.startswith("tensorboard/") for name in manifest["files"])


@pytest.mark.slow
def test_mlflow_shows_a_stage_by_its_recipe_and_continues_its_run(run_stage, interrupt, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracking, client = TrackingConfig(tensorboard=False, mlflow_uri=uri), mlflow.MlflowClient(uri)

    def find_runs() -> dict:
        experiment = client.get_experiment_by_name("Tiny").experiment_id
        return {run.info.run_name: run for run in client.search_runs([experiment])}

    with pytest.raises(KeyboardInterrupt):
        run_stage(tracking)
    [interrupted] = find_runs().values()
    assert interrupted.info.status == "KILLED"
    interrupt.undo()
    moved = (tmp_path / "store").rename(tmp_path / "moved")
    finished = run_stage(tracking, moved)
    [stage] = finished.experiment.stages.values()
    [run] = find_runs().values()
    assert (run.info.run_id, run.info.status) == (interrupted.info.run_id, "FINISHED")
    assert run.info.run_name == "rankers/first-seed0"
    tags = {name: run.data.tags[name] for name in ("recipe", "run", "seed", "digest")}
    digest = finished.path(stage).name
    assert tags == {"recipe": "Tiny", "run": "first", "seed": "0", "digest": digest}
    assert run.data.tags["commit"]
    assert run.data.params["training.epochs"] == "2"
    assert run.data.params["loss"] == "cross_entropy"
    for _ in range(2):
        (finished.output / "test.md").write_text("Report")
        log_reports(tracking, "Tiny", finished.output)
    runs = find_runs()
    assert runs.keys() == {"rankers/first-seed0", "reports"}
    files = client.list_artifacts(runs["reports"].info.run_id)
    names = ["opened_stages.txt", "run.json", "stages.json", "test.md"]
    assert [file.path for file in files] == names
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["ranker"]
