"""Pseudo-labels, transfer and few shots, end to end on made-up corpora."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from pydantic import ValidationError

from as2ray.distributed.score import read_scores
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, EvaluationError, StaleStageError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment
from as2ray.experiments.few_shot import FewShotConfig
from as2ray.experiments.recipe import TableSpec, read_recipe
from as2ray.experiments.tables import read_table
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.tables.schema import question_offsets
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from pipelines.pseudo_label import PAPER, PIPELINE, CollectionSpec, Study, build

HERE = WorkersConfig(num_workers=0)
RECIPES = sorted(
    path
    for pattern in ("pseudo_label_*.yaml", "mokrii_*[!s].yaml")
    for path in Path("pipelines/recipes").glob(pattern)
)


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


@pytest.fixture
def small(study):
    """A study of one start beside `pseudo`, and one sample."""
    few_shot = FewShotConfig(num_questions=(8,), num_samples=1, epochs=1, reference_questions=8)
    return replace(study, transfer_sources={}, few_shot=few_shot)


def outputs(folder):
    return json.loads((folder / "manifest.json").read_text())["outputs"]


def question_ids(folder):
    return set(read_table(folder)["question_id"].to_pylist())


def systems(path):
    return {row["system"] for row in json.loads(path.read_text())["rows"]}


def test_study_reports_every_start_size_and_remedy(study, tmp_path):
    out = tmp_path / "out"
    PIPELINE.run(study, out, HERE)
    starts, sizes = ("general", "pseudo"), ("8", "all")
    expected = {"BM25", *starts}
    for start in (*starts, "scratch"):
        for size in sizes:
            expected |= {f"{start}+{size}", f"{start}+{size}, with BM25"}
            expected |= {f"{start}+{size}, towards its start"} if start != "scratch" else set()
    assert systems(out / "test.json") == expected
    lines = (out / "table1.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:6]] == [
        *("general", "BM25", "pseudo", "scratch")
    ]
    assert (out / "test-curve.png").stat().st_size > 0
    assert "| RQ5 | pseudo+8 against pseudo |" in (out / "test-questions.md").read_text()
    assert question_ids(out / "tables" / "pseudo") <= question_ids(out / "tables" / "train")
    epochs = {
        name: outputs(out / "rankers" / name)["epochs"]
        for name in ("general", "pseudo", "scratch+8-0", "scratch+all-0")
    }
    assert epochs == {"general": 2, "pseudo": 1, "scratch+8-0": 2, "scratch+all-0": 1}
    assert len(question_ids(out / "tables" / "train-8-0")) == 8
    # Small samples train in the task of their stage, all others with workers.
    stages = build(study, {}).stages
    assert stages["rankers/pseudo+8-0"].RESOURCES == "device"
    assert {stages[f"rankers/{name}"].RESOURCES for name in ("pseudo", "pseudo+all-0")} == {"gang"}
    grid = outputs(out / "bm25")
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
    with pytest.raises(EvaluationError, match="labels are 0 and 1"):
        replace(study, measures=["AP(rel=2)"])


def test_layers_that_the_model_does_not_have_are_refused_before_tables_are_made(study, tmp_path):
    for wrong in ({"num_layers": 99}, {"exit_layers": (2, 99)}):
        model = replace(study.model, **wrong)
        loss = "uniform_exit" if "exit_layers" in wrong else "margin_ranking"
        with pytest.raises(ConfigError, match="layers"):
            PIPELINE.run(replace(study, model=model, loss=loss), tmp_path / "out", HERE)
    assert not list(tmp_path.iterdir())


def test_tests_elsewhere_are_reported_and_not_found_by_bm25(small, tmp_path):
    elsewhere = {"asnq": TableSpec("asnq", "train", num_questions=12)}
    study, out = replace(small, out_of_domain_tests=elsewhere), tmp_path / "out"
    PIPELINE.run(study, out, HERE)
    expected = systems(out / "test.json")
    assert expected == systems(out / "asnq.json") >= {"BM25", "pseudo", "scratch+8, with BM25"}
    candidates = set(read_table(out / "tables" / "pseudo")["candidate"].to_pylist())
    assert not candidates & set(read_table(out / "tables" / "asnq")["candidate"].to_pylist())
    with pytest.raises(ConfigError, match="out_of_domain_tests"):
        replace(study, retrieval_depth=5, question_filter="raw")


def test_sample_larger_than_the_published_target_is_refused_before_anything_runs(study, tmp_path):
    few_shot = FewShotConfig(num_questions=(8, 9_999))
    with pytest.raises(ConfigError, match="9,999, but the target has at most 2,118"):
        PIPELINE.run(replace(study, few_shot=few_shot), tmp_path / "out", HERE)
    assert not list(tmp_path.iterdir())


def test_sample_larger_than_the_target_costs_only_the_systems_that_need_it(small, tmp_path):
    few_shot = replace(small.few_shot, num_questions=(8, 1_000), remedies=())
    with pytest.raises(ConfigError, match="1,000, but the target has at most 40"):
        PIPELINE.run(replace(small, few_shot=few_shot), tmp_path / "out", HERE)
    assert systems(tmp_path / "out" / "test.json") == {"BM25", "pseudo", "scratch+8", "pseudo+8"}


def test_questions_that_nobody_annotated_are_labelled_for_pseudo(small, tmp_path):
    base = shutil.copytree(small.model.path, tmp_path / "base")
    study = replace(
        small,
        model=ModelSpec(str(base), max_length=32),
        train=TableSpec("wikiqa", "train", num_questions=10),
        unlabeled_questions=TableSpec("wikiqa", "train"),
        few_shot=replace(small.few_shot, remedies=()),
    )
    PIPELINE.run(study, tmp_path / "out", HERE)
    labelled, annotated = (
        question_ids(tmp_path / "out" / "tables" / name) for name in ("pseudo", "train")
    )
    assert len(annotated) == 10
    assert len(labelled) > 20
    shutil.rmtree(base)  # a finished study needs it no more
    PIPELINE.run(study, tmp_path / "out", HERE)


def test_bm25_of_retrieved_candidates_is_the_order_they_were_found_in(small, tmp_path):
    study, out = replace(small, retrieval_depth=5, question_filter="raw"), tmp_path / "out"
    finished = PIPELINE.run(study, out, HERE)
    evaluation, _ = finished.experiment.evaluations["test", "BM25", 0]
    rows = read_table(out / "retrieved" / "test")
    scores = read_scores(finished.path(evaluation.scores))["score"].to_numpy()
    starts = question_offsets(rows["question_id"])
    for start, end in zip(starts, [*starts[1:], rows.num_rows]):
        assert 1 <= end - start <= 5
        assert (np.diff(scores[start:end]) <= 0).all()
    assert systems(out / "test.json") >= {"BM25", "pseudo+8", "pseudo+8, with BM25"}


@pytest.mark.slow
def test_candidates_are_retrieved_from_a_whole_collection(small, tmp_path, monkeypatch):
    """A passage that is a candidate of no question is retrieved too."""
    root = tmp_path / "data" / "msmarco"
    root.mkdir(parents=True)
    rows = tiny.candidates(30, seed=3).to_pylist()
    texts = [*dict.fromkeys(row["candidate"] for row in rows), rows[0]["question"]]
    ids = {text: number for number, text in enumerate(texts)}
    lines = (f"{number}\t{text}\n" for text, number in ids.items())
    (root / "collection.tsv").write_text("".join(lines))
    questions = {row["question_id"]: row["question"] for row in rows}
    numbers = {question: number for number, question in enumerate(questions)}
    for name, part in (("train", 0), ("dev.small", 1)):
        chosen = {q: text for q, text in questions.items() if numbers[q] % 2 == part}
        lines = (f"{numbers[q]}\t{text} {q}\n" for q, text in chosen.items())
        (root / f"queries.{name}.tsv").write_text("".join(lines))
        judged = (r for r in rows if r["label"] and r["question_id"] in chosen)
        lines = (f"{numbers[r['question_id']]}\t0\t{ids[r['candidate']]}\t1\n" for r in judged)
        (root / f"qrels.{name}.tsv").write_text("".join(lines))
    monkeypatch.setenv("AS2RAY_DATA", str(root.parent))
    relevant = {"corpus_options": {"run_depth": 0}}
    study = replace(
        small,
        train=TableSpec("msmarco", "train", **relevant),
        dev=TableSpec("msmarco", "train", num_questions=5, **relevant),
        tests={"test": TableSpec("msmarco", "dev", **relevant)},
        collection=CollectionSpec("msmarco", "passages", verify=False),
        bm25_grid=[(0.9, 0.4)],
        retrieval_depth=6,
        question_filter="raw",
        few_shot=replace(small.few_shot, num_questions=(None,), remedies=()),
    )
    out = tmp_path / "out"
    PIPELINE.run(study, out, HERE)
    assert {"BM25", "pseudo", "scratch+all"} <= systems(out / "test.json")
    assert texts[-1] in read_table(out / "retrieved" / "train")["candidate"].to_pylist()
    assert outputs(out / "index")["sentences"] == len(texts)


def test_collection_without_a_depth_or_of_another_name_is_refused(small):
    with pytest.raises(ConfigError, match="collection needs retrieval_depth"):
        replace(small, collection=CollectionSpec("msmarco", "passages"))
    with pytest.raises(ConfigError, match="unknown msmarco collection 'pages'"):
        CollectionSpec("msmarco", "pages")


def test_remedy_chosen_under_another_filter_is_not_taken_for_this_one(small, tmp_path):
    stages, others = (
        build(replace(small, question_filter=question_filter), {}).stages
        for question_filter in ("no_all_negative", "clean")
    )
    assert {name for name in stages if stages[name] != others[name]} == {
        *(name for name in stages if name.startswith(("scores/", "evaluations/"))),
        "rankers/pseudo+8-0-towards",
    }
    PIPELINE.run(small, tmp_path / "out", HERE)
    with pytest.raises(StaleStageError, match="question_filter: 'no_all_negative' -> 'clean'"):
        PIPELINE.run(replace(small, question_filter="clean"), tmp_path / "out", HERE)


def test_study_that_shares_its_runs_with_another_trains_nothing(small, tmp_path):
    PIPELINE.run(small, tmp_path / "first", HERE)
    trained = sorted((tmp_path / "store").glob("*Ranker/*"))
    few_shot = replace(
        small.few_shot, remedies=("bm25_mixing",), published_results={"Paper, pseudo": 0.5}
    )
    PIPELINE.run(replace(small, few_shot=few_shot, measures=["AP"]), tmp_path / "second", HERE)
    assert sorted((tmp_path / "store").glob("*Ranker/*")) == trained
    names = {"Paper, pseudo", "pseudo+8, with BM25"}
    assert systems(tmp_path / "second" / "test.json") >= names
    assert "| pseudo | AP | 0.5000 |" in (tmp_path / "second" / "test.md").read_text()


def test_source_without_dev_and_with_its_leaks_is_trained_once_for_all_targets(small, tmp_path):
    def build_source(study, data_dirs):
        return Experiment({"source": build(study, data_dirs).stages["rankers/general"]})

    pipeline = Pipeline(Study, build_source, lambda *_: None)
    first = replace(small, transfer_sources={"general": TableSpec("asnq", "train")})
    second = replace(first, dev=TableSpec("asnq", "train", num_questions=12))
    num_rankers = {}
    for select_by, leaks in (("epoch", "keep"), ("dev/AP", "keep"), ("epoch", "drop")):
        paths = set()
        for number, study in enumerate((first, second)):
            training = replace(study.training, select_by=select_by)
            out = tmp_path / f"{select_by[:3]}-{leaks}-{number}"
            pipeline.run(replace(study, training=training, source_leaks=leaks), out, HERE)
            paths.add((out / "source").resolve())
        num_rankers[select_by, leaks] = len(paths)
    assert num_rankers == {("epoch", "keep"): 1, ("dev/AP", "keep"): 2, ("epoch", "drop"): 2}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_file_parses_into_a_study(path):
    study, _ = read_recipe(Study, ["--config", str(path), "--output", "out"])
    assert study.tests
    assert study.training.head_learning_rate is not None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run_of_a_recipe_needs_no_data(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path / "nothing"))
    arguments = ["--config", str(path), "--output", str(tmp_path / "out"), "--dry_run", "true"]
    PIPELINE.command(arguments)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line[lines[0].index("updates") :].split() for line in lines}
    assert {"bm25", "index", "tables/pseudo", "rankers/pseudo+all-0"} <= rows.keys()
    # 32 epochs on 32 questions, and fewer on more.
    few, more = (int(rows[f"rankers/scratch+{size}-0"][0]) for size in (32, 128))
    assert 0 < few < more < 4 * few
    assert not list(tmp_path.iterdir())
