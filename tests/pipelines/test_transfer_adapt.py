"""Transfer and adapt, end to end on made-up corpora in the formats of real ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from as2ray.checkpoints.loading import load
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, LeakError, StaleStageError
from as2ray.experiments import command
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec, read_recipe
from as2ray.experiments.store import Store
from as2ray.experiments.tables import read_table
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig, read_metrics
from pipelines.transfer_adapt import PIPELINE

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def recipe(checkpoint, data_root):
    training = TrainingConfig(epochs=2, global_batch_size=64, learning_rate=1e-3, precision="fp32")
    return Recipe(
        title="Tiny",
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        tables={
            "target": TableSpec("wikiqa", "train"),
            "noisy": TableSpec("wikiqa", "train", label_noise=0.2),
            "general": TableSpec("qnli", "dev"),
            "dev": TableSpec("wikiqa", "dev"),
            "test": TableSpec("wikiqa", "test"),
        },
        dev="dev",
        tests=["test"],
        runs={
            "fine-tune": RunSpec(["target"], training),
            "transfer": RunSpec(["general"], training),
            "transfer-then-adapt": RunSpec(["target"], training, init_from="transfer"),
            "union": RunSpec(["general", "target"], training),
            "noise": RunSpec(["noisy"], training),
            "lists": RunSpec(
                ["target"], replace(training, global_batch_size=8), loss=ListwiseLoss(4)
            ),
        },
        baseline="fine-tune",
        seeds=[0, 1],
        tracking=TrackingConfig(tensorboard=False),
    )


def test_pipeline_run_twice_reports_every_step_and_makes_each_stage_once(
    recipe, tmp_path, monkeypatch
):
    tracked = []
    monkeypatch.setattr(command, "log_reports", lambda *arguments: tracked.append(arguments))
    # Of Table 5.
    printed = {
        "paper": {"AP": 0.813, "RR": 0.828},
        "paper, noise": {"AP": 0.629, "RR": 0.645},
    }
    reproduces = {"fine-tune": "paper", "noise": "paper, noise"}
    recipe = replace(recipe, published_results={"test": printed}, reproduces={"test": reproduces})
    recipe = replace(recipe, plot_learning_curves=True)
    PIPELINE.run(recipe, tmp_path / "out", HERE)
    assert tracked[-1] == (recipe.tracking, recipe.title, tmp_path / "out")
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    PIPELINE.run(recipe, tmp_path / "other", HERE)
    again = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    assert made == again
    # Tables, a leak check, and for each run and seed a ranker, its scores and its evaluation.
    assert len(made) == 5 + 1 + 6 * 2 * 3
    report = json.loads((tmp_path / "out" / "test.json").read_text())
    assert {row["system"] for row in report["rows"] if row["seeds"]} == set(recipe.runs)
    assert all(row["seeds"] in ([0, 1], []) for row in report["rows"])
    ranker = load(tmp_path / "out" / "rankers" / "union-seed0" / "ranker")
    num_weights = sum(weights.numel() for weights in ranker.network.parameters())
    assert {row["parameters"] for row in report["rows"] if row["seeds"]} == {num_weights}
    assert (tmp_path / "out" / "test-curve-RR.png").stat().st_size > 0
    columns, _, row = (tmp_path / "out" / "test-noise.md").read_text().splitlines()
    drops = dict(zip(columns.split("|"), row.split("|")))
    assert drops[" AP drop as printed "] == " 22.63% "
    assert drops[" RR drop as printed "] == " 22.10% "
    ap = {row["system"]: row["measures"]["AP"]["mean"] for row in report["rows"]}
    assert row.startswith("| noise | fine-tune | ")
    assert row.split("|")[3].strip() == f"{1 - ap['noise'] / ap['fine-tune']:.2%}"
    stability = (tmp_path / "out" / "test-stability.md").read_text().splitlines()
    assert len(stability) == 2 + 6 * 2  # each run and seed
    lines = read_metrics(tmp_path / "out" / "rankers" / "union-seed0" / "metrics.jsonl")
    first, second = (line["test/AP"] for line in lines if "test/AP" in line)
    [row] = [line for line in stability if "| union-seed0 " in line]
    assert float(row.split("|")[2]) == pytest.approx(abs(first - second), abs=1e-4)
    assert (tmp_path / "out" / "test-curve.png").stat().st_size > 0
    assert not list((tmp_path / "store").rglob("scratch"))


def test_adapt_starts_from_the_transferred_ranker(recipe, tmp_path):
    steps = {name: recipe.runs[name] for name in ("transfer", "transfer-then-adapt")}
    slow = replace(steps["transfer-then-adapt"].training, learning_rate=1e-12)
    steps["transfer-then-adapt"] = replace(steps["transfer-then-adapt"], training=slow)
    PIPELINE.run(replace(recipe, runs=steps, baseline="transfer", seeds=[0]), tmp_path, HERE)
    one, other = (
        load(tmp_path / "rankers" / f"{name}-seed0" / "ranker", dtype="fp32") for name in steps
    )
    question, texts = "What is it?", ["This.", "That there."]
    scores = [[r.score for r in ranker.rank(question, texts)] for ranker in (one, other)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_noise_turns_a_fifth_of_the_labels_over(recipe, tmp_path):
    PIPELINE.run(
        replace(recipe, runs={"noise": recipe.runs["noise"]}, baseline="noise", seeds=[0]),
        tmp_path,
        HERE,
    )
    clean, noisy = (
        read_table(tmp_path / "tables" / name)["label"].to_numpy() for name in ("target", "noisy")
    )
    assert int((clean != noisy).sum()) == int(0.2 * len(clean))


def test_recipe_changed_under_the_same_output_is_refused(recipe, tmp_path):
    small = replace(recipe, runs={"fine-tune": recipe.runs["fine-tune"]}, seeds=[0])
    PIPELINE.run(small, tmp_path, HERE)
    faster = replace(small.runs["fine-tune"].training, learning_rate=2e-3)
    changed = replace(small, runs={"fine-tune": replace(small.runs["fine-tune"], training=faster)})
    with pytest.raises(StaleStageError, match=r"training\.learning_rate: 0\.001 -> 0\.002"):
        PIPELINE.run(changed, tmp_path, HERE)


def test_weights_of_training_tables_change_the_union_and_are_checked(recipe, tmp_path):
    def run(name: str, weights: dict) -> list[float]:
        union = replace(recipe.runs["union"], train_weights=weights)
        small = replace(recipe, runs={"union": union}, baseline="union", seeds=[0])
        PIPELINE.run(small, tmp_path / name, HERE)
        lines = read_metrics(tmp_path / name / "rankers" / "union-seed0" / "metrics.jsonl")
        return [x["train/loss"] for x in lines if "train/loss" in x]

    plain, equal = run("plain", {}), run("equal", {"general": 1.0})
    assert equal == plain
    assert run("double", {"target": 2.0, "general": 2.0})[0] == pytest.approx(
        2 * plain[0], rel=0.02
    )
    with pytest.raises(ConfigError, match="train_weights"):
        run("wrong", {"noisy": 2.0})


def test_leak_between_training_and_test_is_refused_or_dropped(recipe, tmp_path):
    leaky = replace(
        recipe,
        tables={**recipe.tables, "target": TableSpec("wikiqa", "test")},
        runs={"fine-tune": recipe.runs["fine-tune"]},
        seeds=[0],
    )
    with pytest.raises(LeakError, match="'target' and 'test'"):
        PIPELINE.run(leaky, tmp_path / "refused", HERE)
    with pytest.raises(LeakError, match="questions"):
        PIPELINE.run(replace(leaky, on_leak="drop"), tmp_path / "dropped", HERE)
    kept = replace(leaky, on_leak="keep", runs=dict(leaky.runs))
    PIPELINE.run(kept, tmp_path / "kept", HERE)
    assert (tmp_path / "kept" / "test.md").is_file()


def test_recipe_with_an_unknown_table_or_step_is_refused(recipe):
    with pytest.raises(ConfigError, match="'nothing'"):
        replace(recipe, tests=["nothing"])
    with pytest.raises(ConfigError, match="init_from 'later'"):
        replace(recipe, runs={"fine-tune": RunSpec(["target"], init_from="later")})
    with pytest.raises(ConfigError, match="baseline"):
        replace(recipe, baseline="nothing")


@pytest.mark.parametrize(
    "path", sorted(Path("pipelines/recipes").glob("tanda_*.yaml")), ids=lambda p: p.stem
)
def test_recipe_file_parses_into_a_recipe(path):
    recipe, options = read_recipe(Recipe, ["--config", str(path), "--output", "out"])
    assert recipe.runs
    assert options.output == "out"
    assert options.workers.num_workers >= 0


def test_test_named_dev_beside_another_dev_is_refused(recipe):
    steps = {**recipe.runs, "other": RunSpec(["target"], dev="test")}
    assert replace(recipe, tests=["dev"]).tests == ["dev"]  # the same table
    with pytest.raises(ConfigError, match="a test is named 'dev'"):
        replace(recipe, tests=["dev"], runs=steps)


def test_recipe_with_an_unknown_key_is_refused(tmp_path):
    (tmp_path / "bad.yaml").write_text("title: x\nlearning_rte: 1\n")
    with pytest.raises(ConfigError, match="learning_rte: unknown key"):
        read_recipe(Recipe, ["--config", str(tmp_path / "bad.yaml"), "--output", "out"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("listwise_cross_entropy", "listwise_cross_entropy"),
        ("{type: listwise_cross_entropy, list_size: 30}", ListwiseLoss(30)),
        ("{type: margin_ranking, margin: 0.5}", MarginRankingLoss(0.5)),
        ("{type: distillation, alpha: 0.1}, teachers: [b]", DistillationLoss(0.1)),
    ],
)
def test_loss_in_a_recipe_is_a_name_or_has_a_type(tmp_path, written, meant):
    (tmp_path / "recipe.yaml").write_text(
        "title: x\nmodel: {path: x}\ntables: {t: {corpus: wikiqa, split: dev}}\ndev: t\n"
        "tests: [t]\non_leak: keep\nbaseline: a\n"
        f"runs: {{b: {{train: [t]}}, a: {{train: [t], loss: {written}}}}}\n"
    )
    recipe, *_ = read_recipe(Recipe, ["--config", str(tmp_path / "recipe.yaml"), "--output", "o"])
    assert recipe.runs["a"].loss == meant


@pytest.mark.parametrize(
    ("run", "error"),
    [
        ("training: {epochs: 0}", "runs.a.training.epochs=0: Input should be greater than 0"),
        ("training: {batch: 3}", "runs.a.training.batch: unknown key"),
        ("start: b", "runs.a.start: unknown key"),
        ("loss: margin", "runs.a.loss='margin': unknown loss"),
        ("loss: {alpha: 0.1}", "runs.a.loss={'alpha': 0.1}: a loss is a name, or settings with"),
        ("loss: {type: distil}", "runs.a.loss={'type': 'distil'}: a loss is a name, or settings"),
        ("loss: {type: distillation, alpha: 2}", "runs.a.loss.distillation.alpha=2: Input should"),
        ("loss: {type: distillation, beta: 2}", "runs.a.loss.distillation.beta: unknown key"),
        ("loss: {type: distillation, alfa: 2}", "alfa: unknown key; did you mean 'alpha'?"),
    ],
)
def test_wrong_value_in_a_recipe_is_refused_with_its_path(tmp_path, run, error):
    (tmp_path / "recipe.yaml").write_text(
        "title: x\nmodel: {path: x}\ntables: {t: {corpus: wikiqa, split: dev}}\ndev: t\n"
        f"tests: [t]\nbaseline: a\nruns: {{a: {{train: [t], {run}}}}}\n"
    )
    with pytest.raises(ConfigError) as raised:
        read_recipe(Recipe, ["--config", str(tmp_path / "recipe.yaml"), "--output", "o"])
    assert error in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_step_of_other_seeds_than_its_start_is_refused(recipe):
    steps = {**recipe.runs, "transfer": replace(recipe.runs["transfer"], seeds=[1])}
    with pytest.raises(ConfigError, match=r"'transfer-then-adapt' has seeds \[0"):
        replace(recipe, runs=steps)
    with pytest.raises(ConfigError, match=r"'union' has seeds \[5\]"):
        replace(recipe, runs={**recipe.runs, "union": replace(recipe.runs["union"], seeds=[5])})
    with pytest.raises(ConfigError, match=r"has seeds \[\]"):
        replace(recipe, seeds=[])


@pytest.mark.parametrize("name", ["no teacher", "", "a/b"])
def test_step_whose_name_cannot_name_a_folder_is_refused(recipe, name):
    with pytest.raises(ConfigError, match="the run name"):
        replace(recipe, runs={**recipe.runs, name: RunSpec(["target"])})


@pytest.mark.parametrize("moment", ["before the manifest", "after the manifest"])
def test_run_killed_at_its_end_is_not_trained_again(recipe, tmp_path, monkeypatch, moment):
    recipe = replace(recipe, runs={"fine-tune": recipe.runs["fine-tune"]}, seeds=[0])
    rmtree, commit = shutil.rmtree, Store.commit

    def rmtree_but_not_scratch(path, *args, **options):
        if Path(path).name == "scratch" and Path(path).parents[1].name == "TrainedRanker":
            raise KeyboardInterrupt
        return rmtree(path, *args, **options)

    def commit_all_but_rankers(store, kind, *args):
        if kind == "TrainedRanker":
            raise KeyboardInterrupt
        return commit(store, kind, *args)

    with monkeypatch.context() as patch:
        if moment == "before the manifest":
            patch.setattr(Store, "commit", commit_all_but_rankers)
        else:
            patch.setattr(shutil, "rmtree", rmtree_but_not_scratch)
        with pytest.raises(KeyboardInterrupt):
            PIPELINE.run(recipe, tmp_path / "out", HERE)
    train_step = Mock(side_effect=AssertionError("trained again"))
    monkeypatch.setattr("as2ray.training.trainer.Trainer._train_step", train_step)
    PIPELINE.run(recipe, tmp_path / "out", HERE)
    lines = read_metrics(tmp_path / "out" / "rankers" / "fine-tune-seed0" / "metrics.jsonl")
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 2]
