"""Pseudo-labels, transfer and few shots, end to end on made-up corpora."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, EvaluationError, StaleStageError
from as2ray.experiments.stage import manifest, stage
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.tables.schema import question_offsets
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from pipelines.few_shot import FewShotConfig
from pipelines.pseudo_label import PAPER, Study, _bench, _towards, run
from pipelines.recipe import TableSpec, read_recipe
from pipelines.steps import table


@pytest.fixture
def study(checkpoint, data_root):
    return Study(
        title="Tiny",
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        train=TableSpec("wikiqa", "train"),
        dev=TableSpec("wikiqa", "dev"),
        tests={"test": TableSpec("wikiqa", "test")},
        transfer_sources={"general": TableSpec("qnli", "dev", num_questions=10)},
        pseudo_labels=PseudoLabelConfig(num_negatives=3),
        few_shot=FewShotConfig(
            num_questions=(8, None), num_samples=1, epochs=2, reference_questions=8
        ),
        training=replace(PAPER, learning_rate=1e-3, precision="fp32"),
        measures=["RR"],
        tracking=TrackingConfig(tensorboard=False),
    )


def test_study_reports_every_start_size_and_remedy(study, tmp_path):
    run(study, tmp_path, WorkersConfig(num_workers=0))
    told = json.loads((tmp_path / "test.json").read_text())
    starts, sizes = ("general", "pseudo"), ("8", "all")
    expected = {"BM25", *starts}
    for start in (*starts, "scratch"):
        for size in sizes:
            expected |= {f"{start}+{size}", f"{start}+{size}, with BM25"}
            expected |= {f"{start}+{size}, towards its start"} if start != "scratch" else set()
    assert {row["system"] for row in told["rows"]} == expected
    ends = (tmp_path / "table1.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in ends[2:6]] == [
        *("general", "BM25", "pseudo", "scratch")
    ]
    assert (tmp_path / "test-curve.png").stat().st_size > 0
    labelled = table(tmp_path / "tables" / "pseudo")
    assert set(labelled["question_id"].to_pylist()) <= set(
        table(tmp_path / "tables" / "train")["question_id"].to_pylist()
    )
    epochs = {
        name: manifest(tmp_path / "rankers" / name)["inputs"]["training"]["epochs"]
        for name in ("general", "pseudo", "scratch+8-0", "scratch+all-0")
    }
    assert epochs == {"general": 2, "pseudo": 1, "scratch+8-0": 2, "scratch+all-0": 1}
    few = table(tmp_path / "tables" / "train-8-0")
    assert len(few["question_id"].unique()) == 8
    grid = json.loads((tmp_path / "bm25" / "manifest.json").read_text())["outputs"]
    assert len(grid["grid"]) == 56
    assert grid["RR"] == max(point[2] for point in grid["grid"])


@pytest.mark.parametrize("name", ["pseudo", "test", "dev", "train", "a+b", "a, b", "a/b"])
def test_source_named_like_another_start_or_table_is_refused(study, name):
    with pytest.raises(ConfigError, match=re.escape(f"{[name]} of tests")):
        replace(study, transfer_sources={name: TableSpec("qnli", "dev")})


@pytest.mark.parametrize(
    "wrong",
    [
        {"retrieval_depth": 0},
        {
            "retrieval_depth": 5
        },  # under a filter by which questions that BM25 misses would not count
        {"measures": []},
        {"tests": {}},
        {"training": replace(PAPER, epochs=8)},  # which few_shot would override
        {"loss": "marginal"},
        {"loss": "uniform_exit"},
        {"model": ModelSpec("x", exit_layers=(2,))},
        {"loss": DistillationLoss()},
        {"loss": TwoInOneLoss()},
    ],
)
def test_impossible_study_is_refused(study, wrong):
    with pytest.raises((ConfigError, ValidationError)):
        replace(study, **wrong)


def test_cascade_and_its_objective_are_a_study_and_unknown_measures_are_none(study):
    replace(study, loss="uniform_exit", model=ModelSpec("x", exit_layers=(2,)))
    with pytest.raises(EvaluationError, match="MAPP"):
        replace(study, measures=["RR", "MAPP"])


def test_layers_that_the_model_does_not_have_are_refused_before_tables_are_made(study, tmp_path):
    for wrong in ({"num_layers": 99}, {"exit_layers": (2, 99)}):
        model, how = (
            replace(study.model, **wrong),
            "uniform_exit" if "exit_layers" in wrong else "margin_ranking",
        )
        with pytest.raises(ConfigError, match="layers"):
            run(replace(study, model=model, loss=how), tmp_path, WorkersConfig(num_workers=0))
    assert not list(tmp_path.iterdir())


def test_tests_elsewhere_are_reported_and_not_found_by_bm25(study, tmp_path):
    few_shot = FewShotConfig(num_questions=(8,), num_samples=1, epochs=1, reference_questions=8)
    elsewhere = {"asnq": TableSpec("asnq", "train", num_questions=12)}
    study = replace(study, out_of_domain_tests=elsewhere, transfer_sources={}, few_shot=few_shot)
    run(study, tmp_path, WorkersConfig(num_workers=0))
    told = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("test", "asnq")]
    systems = [{row["system"] for row in one["rows"]} for one in told]
    assert systems[0] == systems[1] >= {"BM25", "pseudo", "scratch+8, with BM25"}
    found = set(table(tmp_path / "tables" / "pseudo")["candidate"].to_pylist())
    assert not found & set(table(tmp_path / "tables" / "asnq")["candidate"].to_pylist())
    with pytest.raises(ConfigError, match="out_of_domain_tests"):
        replace(study, retrieval_depth=5, question_filter="raw")


def test_sample_larger_than_the_target_is_refused_once_its_questions_are_there(study, tmp_path):
    with pytest.raises(ConfigError, match=r"\[9999\]"):
        run(
            replace(study, few_shot=FewShotConfig(num_questions=(8, 9_999))),
            tmp_path,
            WorkersConfig(num_workers=0),
        )
    assert not (tmp_path / "tables" / "general").exists()
    assert not (tmp_path / "bm25").exists()


def test_questions_that_nobody_annotated_are_labelled_for_pseudo(study, tmp_path):
    base = shutil.copytree(study.model.path, tmp_path / "base")
    study = replace(
        study,
        model=ModelSpec(str(base), max_length=32),
        train=TableSpec("wikiqa", "train", num_questions=10),
        unlabeled_questions=TableSpec("wikiqa", "train"),
        transfer_sources={},
        few_shot=FewShotConfig(
            num_questions=(8,), num_samples=1, epochs=1, reference_questions=8, remedies=()
        ),
    )
    run(study, tmp_path, WorkersConfig(num_workers=0))
    labelled, annotated = (
        set(table(tmp_path / "tables" / name)["question_id"].to_pylist())
        for name in ("pseudo", "train")
    )
    assert len(annotated) == 10
    assert len(labelled) > 20
    shutil.rmtree(base)  # a finished study needs it no more
    run(study, tmp_path, WorkersConfig(num_workers=0))


def test_bm25_of_retrieved_candidates_is_the_order_they_were_found_in(study, tmp_path):
    bench = _bench(
        replace(study, retrieval_depth=5, question_filter="raw"),
        tmp_path,
        WorkersConfig(num_workers=0),
        {},
    )
    rows = table(bench.tables["test"])
    scores = bench.keywords(rows)
    starts = question_offsets(rows["question_id"])
    for start, end in zip(starts, [*starts[1:], rows.num_rows]):
        assert 1 <= end - start <= 5
        assert (np.diff(scores[start:end]) <= 0).all()


def test_remedy_chosen_under_another_filter_is_not_taken_for_this_one(study, checkpoint, tmp_path):
    bench = _bench(study, tmp_path, WorkersConfig(num_workers=0), {})

    def ranker(name):
        def make(part):
            shutil.copytree(checkpoint("bert", 2), part / "ranker")

        return stage(tmp_path / name, {"name": name}, make)

    ends = ranker("tuned"), ranker("start")
    _towards(bench, *ends)
    other = replace(bench, study=replace(study, question_filter="clean"))
    with pytest.raises(StaleStageError, match="filter"):
        _towards(other, *ends)


@pytest.mark.parametrize(
    "path", sorted(Path("pipelines/recipes").glob("pseudo_label_*.yaml")), ids=lambda p: p.stem
)
def test_recipe_file_parses_into_a_study(path):
    study, *_ = read_recipe(Study, ["--config", str(path), "--output", "out"])
    assert study.tests
    assert study.training.head_learning_rate is not None
