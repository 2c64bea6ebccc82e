"""Teachers, their stored logits and students, end to end on a made-up corpus."""

import json
from dataclasses import replace

import numpy as np
import pytest

from as2ray.checkpoints.loading import load
from as2ray.distributed.score import read_scores
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.recipe import Recipe, RunSpec, read_recipe
from as2ray.losses.distillation import DistillationLoss
from pipelines.transfer_adapt import PIPELINE

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def recipe(common, learn):
    teachers = ["first", "second"]
    return Recipe(
        **common,
        runs={
            "first": RunSpec(**learn),
            "second": RunSpec(num_layers=2, **learn),
            "single": RunSpec(
                num_layers=1, teachers=["first"], loss=DistillationLoss(teacher_index=0), **learn
            ),
            "sum": RunSpec(
                num_layers=1,
                teachers=teachers,
                loss=DistillationLoss(teacher_assignment="sum"),
                **learn,
            ),
            "heads": RunSpec(
                exit_layers=(2,),
                num_ranking_heads=2,
                teachers=teachers,
                loss=DistillationLoss(),
                **learn,
            ),
            "alone": RunSpec(exit_layers=(2,), num_ranking_heads=2, loss="all_exits", **learn),
        },
        baseline="first",
        seeds=[0],
    )


def test_teachers_are_scored_once_and_students_learn_from_what_was_stored(recipe, tmp_path):
    out, store = tmp_path / "out", tmp_path / "store"
    PIPELINE.run(recipe, out, HERE)
    scores = [json.loads(path.read_text()) for path in store.glob("TableScores/*/manifest.json")]
    assert [entries["inputs"]["score_kind"] for entries in scores].count("logits") == 2
    made = {p: p.stat().st_mtime_ns for p in store.rglob("manifest.json")}
    PIPELINE.run(recipe, out, HERE)
    assert made == {p: p.stat().st_mtime_ns for p in store.rglob("manifest.json")}
    report = json.loads((out / "test.json").read_text())
    assert {row["system"] for row in report["rows"]} == set(recipe.runs)
    student = load(out / "rankers" / "heads-seed0" / "ranker")
    assert len(student.network.heads[-1].networks) == 2
    manifest = json.loads((out / "rankers" / "heads-seed0" / "manifest.json").read_text())
    assert len(manifest["inputs"]["teacher_logits"]) == 2


def test_a_list_of_runs_is_one_teacher_with_the_mean_of_their_probabilities(recipe, tmp_path):
    single = replace(recipe.runs["single"], teachers=[["first", "second"]])
    runs = {name: recipe.runs[name] for name in ("first", "second")} | {"taught": single}
    PIPELINE.run(replace(recipe, runs=runs), tmp_path / "out", HERE)
    [folder] = (tmp_path / "store" / "EnsembleLogits").iterdir()

    def answers(path):
        table = read_scores(path)
        logits = np.stack([table[name].to_numpy() for name in ("not_answer", "answer")])
        return table["candidate_id"], (np.exp(logits) / np.exp(logits).sum(0))[1]

    stored = (tmp_path / "store" / "TableScores").iterdir()
    manifests = {path: json.loads((path / "manifest.json").read_text()) for path in stored}
    members = [path for path, m in manifests.items() if m["inputs"]["score_kind"] == "logits"]
    assert len(members) == 2
    ids, mean = answers(folder)
    expected = np.mean([answers(path)[1] for path in members], axis=0)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    assert ids.equals(answers(members[0])[0])
    with pytest.raises(ConfigError, match="nobody"):
        replace(recipe, runs={**runs, "taught": replace(single, teachers=[["first", "nobody"]])})


def test_step_taught_by_a_later_one_is_refused(recipe):
    steps = {"single": recipe.runs["single"], "first": recipe.runs["first"]}
    with pytest.raises(ConfigError, match=r"teachers \['first'\]"):
        replace(recipe, runs=steps)


def test_distillation_is_read_from_yaml(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        """
title: x
model: {path: y}
tables: {t: {corpus: wikiqa, split: train}, d: {corpus: wikiqa, split: dev}}
dev: d
tests: [d]
baseline: a
runs:
  a: {train: [t]}
  b: {train: [t], teachers: [a], exit_layers: [11], num_ranking_heads: 3,
      loss: {type: distillation, alpha: 0.1, temperature: 3, teacher_index: 0}}
"""
    )
    found, *_ = read_recipe(Recipe, ["--config", str(tmp_path / "recipe.yaml"), "--output", "o"])
    expected = DistillationLoss(alpha=0.1, temperature=3, teacher_index=0)
    assert found.runs["b"].loss == expected
    assert found.runs["a"].loss == "cross_entropy"
