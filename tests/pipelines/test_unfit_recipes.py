"""What would end a recipe's later step, or its report, is refused before a first one is trained."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    EvaluationError,
    StaleStageError,
)
from as2ray.evaluation.fact_selection import FactSelectionConfig
from as2ray.experiments.cascades import DropSearchConfig
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.experiments.store import Store
from as2ray.experiments.tables import prepared_table
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from pipelines import cascade, distill
from pipelines.transfer_adapt import PIPELINE

CASCADE = {"exit_layers": (1, 3), "loss": "uniform_exit"}
TAUGHT = {"teachers": ["first"], "loss": DistillationLoss()}


@pytest.fixture
def recipe(common, learn):
    return Recipe(**common, runs={"first": RunSpec(**learn)}, baseline="first", seeds=[0])


def _with(recipe: Recipe, learn: dict, **other: object) -> Recipe:
    return replace(recipe, runs={**recipe.runs, "other": RunSpec(**learn, **other)})


def _run_with(recipe: Recipe, step: RunSpec, folder: Path) -> None:
    changed = replace(recipe, runs={**recipe.runs, "again": step})
    PIPELINE.run(changed, folder, WorkersConfig(num_workers=0))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"loss": "uniform"}, "unknown loss"),
        ({"num_layers": 0}, "num_layers"),
        ({"loss": "uniform_exit"}, r"'other' has loss 'uniform_exit', exit_layers \[\]"),
        ({"exit_layers": (1, 3)}, r"loss 'cross_entropy', exit_layers \[1, 3\]"),
        ({"exit_layers": (1, 3), "loss": TwoInOneLoss()}, r"exit_layers \[1, 3\]"),
        ({"num_ranking_heads": 2}, "2 ranking heads"),
        ({"teachers": ["first"]}, r"loss 'cross_entropy' and teachers \['first'\]"),
        ({"loss": DistillationLoss()}, r"teachers \[\]"),
        ({**TAUGHT, "exit_layers": (2,), "num_ranking_heads": 2}, "2 heads and 1 teachers"),
        ({**TAUGHT, "loss": DistillationLoss(teacher_index=1)}, "teacher_index 1 of 1"),
        (
            {**TAUGHT, "loss": DistillationLoss(head_weights=(1.0, 1.0))},
            "2 head_weights for 1 heads",
        ),
        ({"loss": ListwiseLoss(300)}, "max_batch_tokens 8,192"),
        (
            {"init_from": "first", "model": "bert-base-uncased"},
            "from run 'first' and from model 'bert",
        ),
    ],
)
def test_step_whose_objective_and_model_do_not_go_together_is_refused(recipe, learn, other, match):
    with pytest.raises((ConfigError, ValidationError), match=match):
        _with(recipe, learn, **other)


def test_step_that_goes_on_with_a_cascade_or_with_heads_has_its_exits_and_heads(recipe, learn):
    taught = {**TAUGHT, "loss": DistillationLoss(teacher_assignment="sum")}
    start = {"exit_layers": (2,), "num_ranking_heads": 2, "loss": "all_exits"}
    made = _with(recipe, learn, **start)
    again = RunSpec(**learn, init_from="other", loss="all_exits")
    made = replace(made, runs={**made.runs, "again": again})
    replace(made, runs={**made.runs, "taught": RunSpec(**learn, init_from="again", **taught)})
    with pytest.raises(ConfigError, match="2 heads and 1 teachers"):
        replace(made, runs={**made.runs, "taught": RunSpec(**learn, init_from="again", **TAUGHT)})


@pytest.mark.parametrize(
    ("other", "kind", "match"),
    [
        ({"num_layers": 4}, ConfigError, "'rankers/other-seed0': num_layers=4 is not from 1 to 3"),
        ({"init_from": "first", "num_layers": 4}, ConfigError, "num_layers=4 is not from 1 to 3"),
        (
            {"init_from": "first", **CASCADE, "exit_layers": (3,), "num_ranking_heads": 2},
            ConfigError,
            "num_ranking_heads=2",
        ),
        ({"exit_layers": ()}, ConfigError, r"exit_layers=\[\]"),
        ({**CASCADE, "exit_layers": (1, 4)}, ConfigError, "3 layers of the encoder"),
        ({**CASCADE, "exit_layers": (3, 1)}, ConfigError, "ascending"),
        ({"model": "no/such folder"}, CheckpointError, "no/such folder"),
        ({"loss": TwoInOneLoss()}, ConfigError, "two_in_one"),
    ],
)
def test_model_that_a_later_step_cannot_start_from_is_refused_before_anything_is_trained(
    recipe, learn, tmp_path, other, kind, match
):
    with pytest.raises(kind, match=match):
        PIPELINE.run(_with(recipe, learn, **other), tmp_path, WorkersConfig(num_workers=0))
    assert not (tmp_path / "rankers").exists()


def test_test_table_without_a_question_that_counts_is_refused_before_anything_is_trained(
    recipe, tmp_path
):
    rows = [{"question": f"Who {n}?", "text": "He.", "label": n % 2} for n in range(4)]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows))
    tables = {**recipe.tables, "mine": TableSpec(path=str(path))}
    unfit = replace(recipe, tables=tables, tests=["mine"])
    with pytest.raises(CorpusError, match=r"table 'mine': of 4 questions / 4 .* no question"):
        PIPELINE.run(unfit, tmp_path / "out", WorkersConfig(num_workers=0))
    assert not list((tmp_path / "store").glob("*Ranker*"))


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 2},
        {"exit_layers": (1, 2)},
        {"num_ranking_heads": 2},
        {"loss": TwoInOneLoss(), "exit_layers": None},
    ],
)
def test_step_that_starts_from_a_cascade_and_changes_it_is_refused(recipe, learn, tmp_path, other):
    made = _with(recipe, learn, **CASCADE)
    again = RunSpec(**learn, **{"init_from": "other", "loss": "uniform_exit", **other})
    with pytest.raises(ConfigError):
        _run_with(made, again, tmp_path)
    assert not (tmp_path / "rankers").exists()


def test_finished_steps_need_the_model_they_started_from_no_more(recipe, learn, tmp_path):
    gone = tmp_path / "encoder"
    shutil.copytree(recipe.model.path, gone)
    recipe = replace(recipe, model=replace(recipe.model, path=str(gone)))
    PIPELINE.run(recipe, tmp_path / "out", WorkersConfig(num_workers=0))
    shutil.rmtree(gone)
    (tmp_path / "out" / "test.md").unlink()
    PIPELINE.run(recipe, tmp_path / "out", WorkersConfig(num_workers=0))
    assert (tmp_path / "out" / "test.md").is_file()


@pytest.mark.parametrize("train", [["target", "target"], [], ["test"], ["target", "dev"]])
def test_step_that_trains_twice_on_a_table_on_none_or_on_a_held_out_one_is_refused(
    recipe, learn, train
):
    with pytest.raises((ConfigError, ValidationError), match=r"'other' trains on|train\n"):
        _with(recipe, {**learn, "train": train})


def test_table_that_is_trained_on_and_called_dev_beside_another_dev_is_refused(recipe, learn):
    with pytest.raises(ConfigError, match="'first' trains on"):
        replace(recipe, runs={"first": RunSpec(**{**learn, "train": ["dev"]})}, dev="test")


def test_leak_of_a_table_that_no_step_trains_on_does_not_matter(recipe, tmp_path):
    tables = {**recipe.tables, "again": TableSpec("wikiqa", "test")}
    PIPELINE.run(replace(recipe, tables=tables), tmp_path, WorkersConfig(num_workers=0))


@pytest.mark.parametrize(
    "size", [{"num_questions": 0}, {"max_negatives": -1}, {"seed": -1}, {"label_noise": 2}]
)
def test_table_of_an_impossible_size_is_refused(size):
    with pytest.raises(ValidationError, match=next(iter(size))):
        TableSpec("wikiqa", "train", **size)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"tables": {"wikiqa/test": TableSpec("wikiqa", "test")}}, "the table name 'wikiqa/test'"),
        ({"measures": []}, "measures"),
        ({"tests": []}, "no table is reported"),
        ({"seeds": [0, -1]}, r"seeds\.1"),
        ({"seeds": [0, 1, 0]}, r"seeds \[0, 1, 0\] has a seed twice"),
        ({"published_results": {"tset": {}}}, r"published_results of \['tset'\]"),
    ],
)
def test_names_and_lists_that_would_fail_at_the_report_are_refused(recipe, wrong, match):
    if "tables" in wrong:
        wrong = {"tables": recipe.tables | wrong["tables"]}
    with pytest.raises((ConfigError, ValidationError), match=match):
        replace(recipe, **wrong)


def test_sequential_ranker_that_does_not_grow_is_refused_before_anything_is_trained(
    common, learn, tmp_path
):
    steps = {"deep": RunSpec(**learn), "shallow": RunSpec(num_layers=1, **learn)}
    given = {**common, "runs": steps, "baseline": "deep", "seeds": [0]}
    with pytest.raises(ConfigError, match=r"'rankers/s-seed0': .*\[3, 1\] layers"):
        cascade.PIPELINE.run(
            cascade.Recipe(**given, sequential_rankers={"s": ["deep", "shallow"]}),
            tmp_path,
            WorkersConfig(num_workers=0),
        )
    with pytest.raises(ConfigError, match="the sequential ranker name 'a b'"):
        cascade.Recipe(**given, sequential_rankers={"a b": ["shallow", "deep"]})


@pytest.mark.parametrize("wrong", [{"num_ensemble_trials": -1}, {"ensembles": {"a b": ["first"]}}])
def test_searches_and_names_of_distillation_are_in_range(recipe, wrong):
    with pytest.raises((ConfigError, ValidationError)):
        distill.Recipe(**{**vars(recipe), **wrong})
    with pytest.raises(ValidationError):
        DropSearchConfig(num_trials=-1)
    with pytest.raises(ValidationError):
        FactSelectionConfig(top_k_passages=0)


def test_release_that_changed_under_a_prepared_table_is_told(recipe, tmp_path, monkeypatch):
    root = tmp_path / "data"
    shutil.copytree(os.environ["AS2RAY_DATA"], root)
    monkeypatch.setenv("AS2RAY_DATA", str(root))
    store = Store(str(tmp_path / "store"))

    def prepare() -> None:
        stage = prepared_table(recipe.tables["test"], {})
        run_graph([stage], store, SequentialBackend(store, WorkersConfig(num_workers=0)))

    prepare()
    prepare()
    path = root / "wikiqa" / "WikiQA-test.tsv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(StaleStageError, match=r"WikiQA-test\.tsv"):
        prepare()
    shutil.rmtree(root)
    prepare()


def test_measure_that_nothing_computes_is_refused(recipe):
    with pytest.raises(EvaluationError, match="MAPP"):
        replace(recipe, measures=["AP", "MAPP"])


def test_drop_ratio_to_report_out_of_range_is_refused(common, learn):
    steps = {"cascade": RunSpec(**learn, exit_layers=(1, 3), loss="uniform_exit")}
    given = {**common, "runs": steps, "baseline": "cascade, exit 1", "seeds": [0]}
    with pytest.raises(ValidationError, match=r"drop_ratios\.1"):
        cascade.Recipe(**given, drop_ratios=[0.0, 1.0])
