"""Two-in-One, end to end on a made-up release of HotpotQA."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import tiny
from pydantic import ValidationError

from as2ray.checkpoints.loading import load
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, LeakError
from as2ray.experiments.recipe import RunSpec, TableSpec, read_recipe
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import read_metrics
from pipelines.two_in_one import PIPELINE, Recipe

HERE = WorkersConfig(num_workers=0)
FILES = {"hotpot_train_v1.1.json": 40, "hotpot_dev_distractor_v1.json": 10}


def _question(random, name):
    """Two of four passages have a sentence with the question's rare word; one fact lies past."""
    topic = random.choice(tiny.TOPICS)
    context, facts = [], []
    for place in range(4):
        sentences = [tiny.sentence(random, 3) for _ in range(3)]
        if place < 2:
            sentences[place] = tiny.sentence(random, 3, topic)
            facts.append([f"{name} {place}", place])
        context.append([f"{name} {place}", sentences])
    random.shuffle(context)
    return {
        "_id": name,
        "question": f"What is {topic} {name}?",
        "answer": topic,
        "supporting_facts": [*facts, [f"{name} 1", 9]],
        "context": context,
    }


@pytest.fixture
def recipe(common, data_root):
    (data_root / "hotpotqa").mkdir(exist_ok=True)
    for seed, (name, size) in enumerate(FILES.items()):
        made = [_question(Random(f"{seed}-{n}"), f"{name[7]}{n}") for n in range(size)]
        (data_root / "hotpotqa" / name).write_text(json.dumps(made))
    training = TrainingConfig(epochs=1, global_batch_size=16, learning_rate=2e-3, precision="fp32")
    learn = {"train": ["hotpot"], "training": training}
    longer = {"train": ["hotpot"], "training": replace(training, epochs=8, global_batch_size=8)}
    tables = common["tables"] | {
        "hotpot": TableSpec("hotpotqa", "train"),
        "hotpot-dev": TableSpec("hotpotqa", "dev"),
    }
    return Recipe(
        **common | {"tables": tables, "dev": "hotpot-dev"},
        runs={
            "general": RunSpec(["general"], training, dev="dev"),
            "sentences": RunSpec(**learn),
            "cascade": RunSpec(**learn, exit_layers=(1, 3), loss="uniform_exit"),
            "passages": RunSpec(**learn, loss=TwoInOneLoss(sentence_loss=False)),
            "joint": RunSpec(**longer, loss=TwoInOneLoss()),
            "transferred": RunSpec(
                **learn,
                init_from="general",
                loss=TwoInOneLoss(consistency_loss=True, similarity_loss=True, answer_loss=True),
            ),
        },
        baseline="sentences",
        seeds=[0],
        fact_selection_tests=["hotpot-dev"],
        drop_ratio=0.9,
    )


def test_pipeline_measures_every_system_and_makes_each_stage_once(recipe, tmp_path):
    out, recipe = tmp_path / "out", replace(recipe, published_gaps={"joint": 0.11})
    PIPELINE.run(recipe, out, HERE)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    PIPELINE.run(recipe, out, HERE)
    assert made == {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    report = json.loads((out / "hotpot-dev.json").read_text())
    rows = {row["system"]: row["measures"] for row in report["rows"]}
    assert set(rows) == set(recipe.runs)
    # One fact of three lies past its passage: nobody finds it.
    assert all(row["SP EM"]["mean"] == 0 for row in rows.values())
    assert rows["joint"]["SP recall"]["mean"] > 0.3
    assert rows["joint"]["passage EM"]["mean"] > 1 / 6  # of drawing two of four
    assert 0 <= rows["passages"]["SP recall"]["mean"] <= 1 / 3  # first sentences alone
    chosen = json.loads((out / "selections/cascade-seed0-hotpot-dev/prediction.json").read_text())
    assert all(len(facts) <= 1 for facts in chosen["sp"].values())  # of 12 sentences one survives
    assert {row["system"] for row in json.loads((out / "test.json").read_text())["rows"]}
    followed = read_metrics(out / "rankers" / "joint-seed0" / "metrics.jsonl")[-1]
    parts = [followed["dev/AP/passage"], followed["dev/AP/sentence"]]
    assert followed["dev/AP"] == pytest.approx(sum(parts) / 2)
    # Its head for sentences is random: it must not choose among the checkpoints.
    followed = read_metrics(out / "rankers" / "passages-seed0" / "metrics.jsonl")[-1]
    assert followed["dev/AP"] == followed["dev/AP/passage"] != followed["dev/AP/sentence"]
    prediction = json.loads((out / "selections/joint-seed0-hotpot-dev/prediction.json").read_text())
    assert len(prediction["sp"]) == 10
    gaps = [line.split("|") for line in (out / "consistency.md").read_text().splitlines()[2:]]
    printed = {cells[1].strip(): cells[3].strip() for cells in gaps}
    assert printed == {"joint-seed0-hotpot-dev": "0.11", "transferred-seed0-hotpot-dev": ""}
    answers = json.loads((out / "hotpot-dev-answers.json").read_text())
    [row] = answers["rows"]
    assert row["system"] == "transferred"
    assert {"EM", "F1", "joint EM", "joint F1"} <= set(row["measures"])
    ranker = load(out / "rankers" / "joint-seed0" / "ranker")
    assert len(ranker.rank_passages("What is kovarin?", [["Kovarin ne."], ["Lala."]])) == 2


def test_recipe_without_a_table_to_select_on_is_refused(recipe):
    for selects in ([], ["test"], ["general"]):
        with pytest.raises(ConfigError, match="fact_selection_tests"):
            replace(recipe, fact_selection_tests=selects, tests=["test"], on_leak="keep")
    with pytest.raises(ConfigError, match="fact_selection_tests"):
        replace(recipe, tests=["test", "hotpot-dev"])  # whose report there would be two of


def test_gaps_of_an_unknown_run_are_refused(recipe):
    with pytest.raises(ConfigError, match=r"published_gaps of \['jont'\]"):
        replace(recipe, published_gaps={"jont": 0.11})


def test_training_questions_of_what_is_selected_on_are_refused(recipe, tmp_path):
    again = TableSpec("hotpotqa", "train", num_questions=10)
    leaky = replace(
        recipe, tables={**recipe.tables, "again": again}, fact_selection_tests=["again"]
    )
    with pytest.raises(LeakError, match="'hotpot' and 'again'"):
        PIPELINE.run(leaky, tmp_path, HERE)
    with pytest.raises(ConfigError, match="'sentences' trains on"):
        replace(recipe, fact_selection_tests=["hotpot"])


def test_selections_without_a_baseline_are_refused_before_anything_is_trained(recipe):
    with pytest.raises(ConfigError, match="'hotpot-dev': None"):
        replace(recipe, baseline={"test": "sentences"})


def test_drop_ratio_out_of_range_is_refused_before_anything_is_trained(recipe):
    with pytest.raises(ValidationError, match="drop_ratio"):
        replace(recipe, drop_ratio=1.0)


def test_objective_is_read_from_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        """
title: T
model: {path: m}
tables: {hotpot: {corpus: hotpotqa, split: train}}
dev: hotpot
tests: []
fact_selection_tests: [hotpot]
runs:
  joint: {train: [hotpot], loss: {type: two_in_one, consistency_loss: true, similarity_loss: true}}
  passages: {train: [hotpot], loss: {type: two_in_one, sentence_loss: false}}
baseline: joint
on_leak: keep
"""
    )
    recipe, *_ = read_recipe(
        Recipe, ["--config", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path)]
    )
    assert recipe.runs["joint"].loss == TwoInOneLoss(consistency_loss=True, similarity_loss=True)
    assert recipe.rule(recipe.runs["passages"]) == "passages"


@pytest.mark.parametrize(
    "path", sorted(Path("pipelines/recipes").glob("two_in_one_*.yaml")), ids=lambda p: p.stem
)
def test_recipes_that_are_shipped_are_valid(path, tmp_path):
    recipe, *_ = read_recipe(Recipe, ["--config", str(path), "--output", str(tmp_path)])
    rules = {recipe.rule(step) for step in recipe.runs.values()}
    assert rules == (
        {"joint"}
        if path.stem in ("two_in_one_table2", "two_in_one_fullwiki")
        else {"sentences", "passages", "joint"}
    )


def test_baselines_read_whole_passages_or_single_sentences(recipe, tmp_path):
    """Q </s> P </s> and Q </s> S </s> (section 5.2), with the squared error of the model."""
    loss, training = TwoInOneLoss(sentence_loss=False), recipe.runs["sentences"].training
    tables = recipe.tables | {
        f"{split}-{kind}": TableSpec("hotpotqa", split, corpus_options={"passages": kind})
        for split in ("train", "dev")
        for kind in ("joined", "single")
    }
    baselines = replace(
        recipe,
        tables=tables,
        runs={
            kind: RunSpec([f"train-{kind}"], training, dev=f"dev-{kind}", loss=loss)
            for kind in ("joined", "single")
        },
        passage_tables={kind: f"dev-{kind}" for kind in ("joined", "single")},
        baseline="single",
        tests=[],
    )
    PIPELINE.run(baselines, tmp_path, HERE)
    rows = json.loads((tmp_path / "hotpot-dev.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["joined", "single"]
    passages = json.loads((tmp_path / "tables/train-single-passages/manifest.json").read_text())
    assert passages["outputs"]["passages"] == 40 * 4 * 3
    first, scored = (
        json.loads((tmp_path / f"selections/{kind}-seed0-hotpot-dev/prediction.json").read_text())
        for kind in ("joined", "single")
    )
    assert all([index for _, index in facts] == [0, 0] for facts in first["sp"].values())
    assert {index for facts in scored["sp"].values() for _, index in facts} <= {0, 1, 2}
    with pytest.raises(ConfigError, match="passage_tables"):
        replace(recipe, passage_tables={"sentences": "hotpot-dev"})
