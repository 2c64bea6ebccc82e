"""What a stage of a ranker gives to its training, and what changes its identity."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.executor import git_commit
from as2ray.experiments.few_shot import EpochRuleRanker, FewShotEpochs
from as2ray.experiments.rankers import RANKER, EnsembleLogits, TableScores, TrainedRanker
from as2ray.experiments.stage import Label, Result, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import TABLE
from as2ray.losses import source_digest
from as2ray.tables.schema import LOGIT_COLUMNS
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec


@dataclass(frozen=True, eq=False)
class Table(Stage):
    name: str


@dataclass(frozen=True, eq=False)
class Logits(Stage):
    """Logits of two rows."""

    logits: tuple[tuple[float, float], ...]

    def run(self, context):
        columns = dict(zip(LOGIT_COLUMNS, map(pa.array, zip(*self.logits))))
        ids = [f"c-{number}" for number in range(len(self.logits))]
        pq.write_table(pa.table({"candidate_id": ids, **columns}), context.output / TABLE)


TRAIN, OTHER, DEV, WATCHED = map(Table, ("train", "other", "dev", "watched"))
RUN = TrainedRanker(
    ModelSpec("bert-base-uncased", num_layers=3),
    (TRAIN, OTHER),
    DEV,
    TrainingConfig(seed=5, epochs=2),
    train_weights=(1.0, 2.0),
    watched={"test": WATCHED},
)


@pytest.fixture
def context(tmp_path):
    """What a stage is given that builds on the tables, a run, and logits of two teachers."""
    logits = [Table(f"logits {number}") for number in range(4)]
    inputs = {
        stage: Result(stage.kind, stage.key, {"counts": {"num_questions": 128}})
        for stage in (TRAIN, OTHER, DEV, WATCHED, RUN, *logits)
    }
    output, label = tmp_path / "digest", Label("Study", "rankers/few-shot-seed5")
    return StageContext(output, inputs, Store(str(tmp_path / "store")), WorkersConfig(), label)


def test_training_reads_the_tables_weights_teachers_and_start_of_its_stage(context):
    def paths(*stages):
        return tuple(str(context.path(stage)) for stage in stages)

    job = RUN.job(context)
    assert job.train_tables == paths(TRAIN, OTHER)
    assert job.eval_tables == dict(zip(("dev", "test"), paths(DEV, WATCHED)))
    assert (job.model, job.training, job.loss) == (RUN.model, RUN.training, "cross_entropy")
    assert (job.train_weights, job.teacher_logits) == ((1.0, 2.0), ())
    logits = [stage for stage in context.inputs if stage not in (RUN, *RUN.inputs)]
    teachers = ((logits[0], logits[1]), (logits[2], logits[3]))
    further = replace(RUN, dev=None, watched={}, init_from=RUN, teacher_logits=teachers)
    further = further.job(context)
    assert further.model == replace(RUN.model, path=str(context.path(RUN) / RANKER))
    assert further.eval_tables == {}
    assert further.teacher_logits == (paths(*logits[:2]), paths(*logits[2:]))


def test_trackers_show_the_recipe_the_run_and_its_seed(context):
    run = RUN.job(context).run
    assert (run.name, run.experiment) == ("rankers/few-shot-seed5", "Study")
    assert run.folder == str(context.output)
    assert run.tags == {
        "recipe": "Study",
        "run": "few-shot",
        "seed": "5",
        "digest": "digest",
        "commit": git_commit() or "unknown",
    }
    assert RUN.job(context).run.key == run.key  # of an attempt that goes on
    unnamed = replace(context, label=Label(), output=context.output.with_name("other"))
    other = RUN.job(unnamed).run
    assert (other.name, other.tags["run"]) == ("other", "")
    assert other.key != run.key


def test_epochs_of_a_run_follow_from_the_questions_of_its_first_table(context):
    values = {each.name: getattr(RUN, each.name) for each in fields(RUN)}
    few_shot = EpochRuleRanker(**values, epochs=FewShotEpochs(epochs=24))
    assert few_shot.job(context).training == replace(RUN.training, epochs=12)
    assert few_shot.num_epochs(32) == 24
    assert RUN.num_epochs(32) == 2


def own_loss(output, targets):
    return output.sum()


def test_identity_of_a_run_has_the_source_of_its_own_loss_and_no_model_that_is_not_used():
    identity = RUN.identity({})
    assert "loss_source" not in identity
    assert identity["model"]["path"] == "bert-base-uncased"
    loss = f"{__name__}:own_loss"
    assert replace(RUN, loss=loss).identity({})["loss_source"] == source_digest(loss)
    others = [replace(RUN, model=ModelSpec(path, num_layers=3), init_from=RUN) for path in "ab"]
    assert others[0] == others[1] != replace(others[0], model=ModelSpec("a", num_layers=2))


def test_identity_of_scores_says_how_a_drop_ratio_of_the_recipe_is_rounded():
    scores = TableScores(RUN, DEV)
    assert "rounding" not in scores.identity({})
    assert replace(scores, drop_ratio=0.0).identity({})["rounding"] == "floor"


def test_logits_of_an_ensemble_are_those_of_its_mean_probabilities(complete):
    members = (Logits(((0.0, 2.0), (5.0, 4.0))), Logits(((1.0, 0.0), (7.0, 7.0))))
    _, folder = complete(EnsembleLogits(members))
    table = pq.read_table(folder / TABLE)
    probabilities = [
        np.exp(np.array(member.logits)) / np.exp(np.array(member.logits)).sum(1, keepdims=True)
        for member in members
    ]
    logits = np.stack([table[name].to_numpy() for name in LOGIT_COLUMNS], 1)
    assert np.exp(logits) == pytest.approx(np.mean(probabilities, 0))
    assert table["candidate_id"].to_pylist() == ["c-0", "c-1"]
    assert {str(table.schema.field(name).type) for name in LOGIT_COLUMNS} == {"float"}
