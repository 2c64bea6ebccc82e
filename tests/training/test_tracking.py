import errno
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from training_runs import FunctionLoss, create_trainer

from as2ray.errors import TrainingError
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import (
    JsonLinesTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackingConfig,
    create_trackers,
    read_metrics,
)


def test_json_lines_of_a_resumed_run_lose_what_came_after_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    tracker = JsonLinesTracker(path, resumed_step=1)
    tracker.log(2, {"loss": 2.5})
    tracker.close()
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_lines_told_before_are_kept_where_a_resumed_run_cannot_write(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n')

    def full(target, _):
        target.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        JsonLinesTracker(path, resumed_step=1)
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}]


def test_tensorboard_files_hold_the_scalars(tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoardTracker(tmp_path, resumed_step=0)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0 / step})
    tracker.close()
    events = loading.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]


@pytest.mark.slow
def test_mlflow_run_holds_the_metrics(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    # A pipeline's runs are all called `run`: they have the name of the stage that they make.
    made = create_trackers(
        TrackingConfig(tensorboard=False, mlflow_uri=uri),
        tmp_path / "TrainedRanker" / "x-seed0" / "scratch" / "run",
        0,
    )
    (tracker,) = (one for one in made if isinstance(one, MLflowTracker))
    tracker.log(3, {"dev/AP": 0.5, "P@1": 0.25})
    tracker.close()
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("as2ray")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "x-seed0"
    assert run.data.metrics == {"dev/AP": 0.5, "P_at_1": 0.25}


def test_training_whose_loss_is_not_finite_stops_and_says_so(checkpoint, corpus, tmp_path):
    def broken(logits: torch.Tensor, targets: object) -> torch.Tensor:
        return logits.sum() * float("nan")

    with pytest.raises(TrainingError, match="loss is nan after 1 steps"):
        create_trainer(checkpoint("bert", None), corpus, tmp_path, loss=FunctionLoss(broken)).fit()


def test_training_in_fp16_is_refused_for_want_of_loss_scaling():
    with pytest.raises(ValidationError, match="fp16"):
        TrainingConfig(precision="fp16")
