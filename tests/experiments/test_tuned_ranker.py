"""Searches among training runs: what is searched, and the best run of a grid."""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError, StaleStageError
from as2ray.experiments.rankers import RANKER, TrainedRanker
from as2ray.experiments.search import NEVER, BestRanker, SearchConfig, TunedRanker
from as2ray.experiments.stage import Stage
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import METRICS, TrackingConfig
from tune_spaces.run_fields import Interval


@dataclass(frozen=True, eq=False)
class TinyTable(Stage):
    num_questions: int
    seed: int

    def run(self, context):
        tiny.write_corpus(context.output, tiny.candidates(self.num_questions, seed=self.seed))
        return {"counts": {}, "fingerprint": f"{self.num_questions}-{self.seed}"}


@pytest.fixture
def run(checkpoint) -> TrainedRanker:
    return TrainedRanker(
        ModelSpec(str(checkpoint("bert", None)), max_length=32),
        (TinyTable(40, 0),),
        TinyTable(10, 7),
        TrainingConfig(epochs=1, global_batch_size=32, learning_rate=1e-3, precision="fp32"),
        tracking=TrackingConfig(tensorboard=False),
    )


def test_best_of_a_grid_is_one_of_its_runs_and_can_be_trained_further(run, complete):
    rates = (1e-3, 1e-9)
    grid = tuple(replace(run, training=replace(run.training, learning_rate=r)) for r in rates)
    outputs, folder = complete(BestRanker(grid))
    assert outputs["best"] == outputs["values"].index(max(outputs["values"]))
    _, best_folder = complete(grid[outputs["best"]])
    weights = "ranker/model.safetensors"
    assert (folder / weights).read_bytes() == (best_folder / weights).read_bytes()
    further, _ = complete(replace(run, init_from=BestRanker(grid)))
    assert further["shape"] == outputs["shape"]


def test_run_of_a_start_model_that_has_changed_is_refused_and_of_one_that_is_gone_kept(
    run, complete, tmp_path, overwrite_weights
):
    folder = shutil.copytree(run.model.path, tmp_path / "start")
    run = replace(run, model=replace(run.model, path=str(folder)))
    stored = complete(run)
    overwrite_weights(folder)
    with pytest.raises(StaleStageError, match=r"start has changed since .*: model\.safetensors"):
        complete(run)
    shutil.rmtree(folder)
    assert complete(run) == stored


class Measured(TrainedRanker):
    """A run whose measures on dev are its learning rates times 0.1, 0.3 and 0.2."""

    def run(self, context):
        values = [self.training.learning_rate * share for share in (0.1, 0.3, 0.2)]
        lines = [json.dumps({self.training.selection_metric: value}) + "\n" for value in values]
        (context.output / METRICS).write_text("".join(lines))
        save(init_ranker(self.model.path, max_length=32), context.output / RANKER)
        return {"shape": {}}


@pytest.mark.parametrize(("select_by", "share"), [("epoch", 0.2), ("dev/AP", 0.3)])
def test_best_of_a_grid_is_chosen_by_the_checkpoints_that_the_runs_keep(
    run, complete, select_by, share
):
    training = [replace(run.training, learning_rate=r, select_by=select_by) for r in (1.0, 3.0)]
    grid = tuple(Measured(run.model, run.train, run.dev, each) for each in training)
    outputs, _ = complete(BestRanker(grid))
    assert outputs["best"] == 1
    assert outputs["values"] == pytest.approx([share, 3 * share])


def test_search_is_another_stage_than_its_run_and_than_one_of_another_budget(run):
    searches = [TunedRanker.create(run, SearchConfig(num_trials=n)) for n in (20, 20, 21)]
    assert len({run, *searches}) == 3
    assert all(search.inputs == run.inputs for search in searches)


def test_run_of_a_trial_is_the_run_with_its_parameters(run):
    student = replace(run, loss=DistillationLoss(teacher_assignment="sum"))
    search = TunedRanker.create(student, SearchConfig())
    params = {"alpha": 0.1, "temperature": 3.0, "global_batch_size": 24, "learning_rate": 1e-5}
    expected = replace(
        student,
        loss=DistillationLoss(teacher_assignment="sum", alpha=0.1, temperature=3.0),
        training=replace(student.training, global_batch_size=24, learning_rate=1e-5),
    )
    assert search.tuned_run(params) == expected


def test_no_trial_is_stopped_before_its_warm_up_ends(run):
    long = replace(run, training=replace(run.training, epochs=20, warmup_ratio=0.25))
    assert TunedRanker.create(long, SearchConfig(grace_epochs=2)).grace_epochs == 5.0
    assert TunedRanker.create(long, SearchConfig(grace_epochs=6)).grace_epochs == 6.0


@pytest.mark.parametrize(
    ("space", "epochs"),
    [
        ({"training.epochs": [1, 20], "training.warmup_ratio": Interval(0.1, 0.5)}, 10.0),
        ({"training.max_steps": [10, 20]}, NEVER),
        ({"training.warmup_steps": [10]}, NEVER),
        ({"training.learning_rate": [1e-3]}, 1.0),
    ],
)
def test_no_trial_is_stopped_before_the_longest_warm_up_of_its_space_ends(run, space, epochs):
    assert TunedRanker.create(run, SearchConfig(space)).grace_epochs == epochs


def test_search_takes_the_hours_of_all_its_trials(run):
    search = TunedRanker.create(run, SearchConfig(num_trials=7))
    assert search.hours() == pytest.approx(7 * run.hours())
    assert search.describe() == {**run.describe(), "hours": search.hours()}


def test_unknown_space_is_refused():
    with pytest.raises(ConfigError, match=r"unknown search space 'alpha'.*distillation"):
        SearchConfig(space="alpha")
