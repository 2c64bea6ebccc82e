"""Cascades, monoliths and a sequential ranker, end to end on a made-up corpus."""

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from as2ray.checkpoints.loading import load
from as2ray.distributed.tune_run import JOURNAL
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.cascades import DropSearchConfig
from as2ray.experiments.recipe import RunSpec, read_recipe
from as2ray.training.cascade_config import CascadeConfig
from pipelines.cascade import PIPELINE, BoundSpec, RankerCascadeSpec, Recipe, build

HERE = WorkersConfig(num_workers=0)
JOINT = CascadeConfig(drop_ratios=(0.5,), epochs=1, joint=True, joint_epochs=1)


@pytest.fixture
def recipe(common, learn):
    return Recipe(
        **common,
        runs={
            "one": RunSpec(num_layers=1, seeds=[0], **learn),
            "three": RunSpec(**learn),
            "cascade": RunSpec(exit_layers=(1, 2, 3), loss="uniform_exit", **learn),
        },
        baseline="three",
        sequential_rankers={"sequence": ["one", "three"]},
        ranker_cascades={
            "frozen": RankerCascadeSpec("three", "target", "dev", CascadeConfig(max_loss=0.3)),
            "joint": RankerCascadeSpec("three", "target", cascade=JOINT),
        },
        run_tests={"one": ["test"]},
        bounds={"ranker": [BoundSpec("joint", "test", "three", max_cost=0.9)]},
        drop_ratios=[0.0, 0.5],
        search=DropSearchConfig(num_trials=4),
        seeds=[0],
    )


def assert_searched(folder: Path, num_trials: int) -> None:
    """A search of drop ratios has left its study, and its points as a plot and a table."""
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    [study] = optuna.get_all_study_summaries(storage)
    assert study.n_trials == num_trials
    assert (folder / "pareto.png").stat().st_size > 0
    assert "chosen" in (folder / "pareto.md").read_text()


@pytest.mark.slow
def test_pipeline_run_twice_reports_every_ranker_and_makes_each_stage_once(
    recipe, tmp_path, ray_local
):
    recipe = replace(recipe, published_costs={"cascade, drop 0.5": -0.42})
    PIPELINE.run(recipe, tmp_path / "out", HERE)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    PIPELINE.run(recipe, tmp_path / "out", HERE)
    again = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    assert made == again

    out = tmp_path / "out"
    systems = [row["system"] for row in json.loads((out / "test.json").read_text())["rows"]]
    of_cascade = ["exit 1", "exit 2", "drop 0", "drop 0.5", "searched"]
    of_sequence = ["drop 0", "drop 0.5"]
    expected = {"one", "three", *(f"cascade, {what}" for what in of_cascade)}
    expected |= {"frozen", "joint"}
    assert set(systems) == expected | {f"sequence, {what}" for what in of_sequence}
    assert set(recipe.systems()) == set(systems)
    costs = json.loads((out / "test-cost.json").read_text())
    assert costs["cascade, drop 0.5"][0]["relative_layers"] == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert costs["sequence, drop 0.5"][0]["relative_layers"] == pytest.approx((1 + 3 * 0.5) / 3)
    # A monolith costs its share of the deepest one's layers (Table 3, last column).
    assert [costs[n][0]["relative_layers"] for n in ("one", "three")] == pytest.approx([1 / 3, 1.0])
    lines = (out / "test-cost.md").read_text().splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[3:7] for line in lines}
    assert (cells["one"][0], cells["cascade, drop 0.5"][3]) == (" -66.7 % ", " -42% ")
    assert cells["cascade, drop 0"][2].strip() == "100.0%"
    assert (out / "cascade-exits.png").stat().st_size > 0
    against = json.loads((out / "test-cascade.json").read_text())
    assert against["baseline"] == "cascade, drop 0"
    assert len((out / "time.md").read_text().splitlines()) == 2 + 3 + 2

    # Cascades of rankers are checkpoints that rank as their replays said.
    for name in ("frozen", "joint"):
        folder = out / "ranker-cascades" / f"{name}-seed0"
        outputs = json.loads((folder / "manifest.json").read_text())["outputs"]
        made = load(folder / "ranker")
        assert list(made.exit_layers) == outputs["shape"]["exit_layers"]
        stored = outputs["margins"]
        assert (stored and tuple(stored["values"])) == (made.margins and made.margins.values)
        bm25 = [] if made.bm25_margin is None else [0]
        assert list(costs[name][0]["exit_layers"]) == [*bm25, *made.exit_layers]
    assert costs["joint"][0]["relative_flops"] < 0.9
    row, pooled = json.loads((out / "bound-ranker.json").read_text())
    assert row["cost"] == costs["joint"][0]["relative_flops"]
    means = [costs[name][0]["measures"]["AP"] for name in ("three", "joint")]
    comparison = row["comparison"]
    assert [comparison["baseline_mean"], comparison["system_mean"]] == pytest.approx(means)
    assert pooled["comparison"] == comparison
    assert "joint against three" in (out / "bound-ranker.md").read_text()

    # The searched cascade is a checkpoint that ranks as its replay said.
    chosen = json.loads((out / "searched" / "cascade-seed0" / "manifest.json").read_text())
    chosen = chosen["outputs"]["chosen"]
    ranker = load(out / "searched" / "cascade-seed0" / "ranker")
    assert list(ranker.exit_layers) == chosen["exit_layers"]
    assert ranker.drop_ratios == pytest.approx(chosen["drop_ratios"])
    assert_searched(out / "searched" / "cascade-seed0", num_trials=4)
    assert not list((tmp_path / "store").rglob("scratch"))


def test_printed_costs_are_of_systems_of_the_recipe(recipe):
    with pytest.raises(ConfigError, match=r"published_costs of \['four'\]"):
        replace(recipe, published_costs={"four": 0.0})


def test_results_of_a_paper_are_those_of_systems_of_the_recipe(recipe):
    published = {"test": {"paper": {"AP": 0.5}}}
    recipe = replace(recipe, published_results=published)
    assert replace(recipe, reproduces={"test": {"cascade, drop 0.5": "paper"}}).reproduces
    for wrong in ({"nobody": "paper"}, {"three": "other"}):
        with pytest.raises(ConfigError, match=r"reproduces .* on 'test'; the systems are \['one'"):
            replace(recipe, reproduces={"test": wrong})
    with pytest.raises(ConfigError, match=r"reproduces .* on 'dev'"):
        replace(recipe, reproduces={"dev": {"three": "paper"}})


def test_sequential_ranker_of_a_step_that_is_no_pointwise_ranker_is_refused(recipe):
    for steps in (["one", "cascade"], []):
        with pytest.raises(ConfigError, match="sequential ranker 'wrong'"):
            replace(recipe, sequential_rankers={"wrong": steps})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ranker": "cascade"}, "cascade of a ranker 'wrong' of"),
        ({"table": "test"}, "choose among"),
        ({"calibration_table": "nowhere"}, "not described"),
    ],
)
def test_cascade_of_a_ranker_needs_a_pointwise_run_and_tables_that_are_no_tests(
    recipe, changes, problem
):
    spec = RankerCascadeSpec(**{"ranker": "three", "table": "target", **changes})
    with pytest.raises(ConfigError, match=problem):
        replace(recipe, ranker_cascades={"wrong": spec})


def test_calibration_table_keeps_the_questions_of_dev(recipe):
    tables = {**recipe.tables, "dev-raw": recipe.tables["dev"]}
    spec = RankerCascadeSpec("three", "target", "dev-raw", CascadeConfig(max_loss=0.3))
    recipe = replace(
        recipe, tables=tables, on_leak="drop", ranker_cascades={"frozen": spec}, bounds={}
    )
    stages = build(recipe, {}).stages
    assert stages["tables/dev-raw"].without == ()
    assert stages["tables/dev-raw"] in stages["tables/target"].without


BOUND = BoundSpec("joint", "test", "three", max_cost=0.9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bounds": {"b": []}}, "one entry for each"),
        ({"bounds": {"b": [BOUND, BOUND]}}, "one entry for each"),
        ({"bounds": {"b": [replace(BOUND, cascade="three")]}}, "compares 'three' with 'three'"),
        ({"bounds": {"b": [replace(BOUND, baseline="joint")]}}, "compares 'joint' with 'joint'"),
        ({"bounds": {"b": [replace(BOUND, test="dev")]}}, "on 'dev'; 'three' is evaluated on"),
        ({"run_tests": {"nobody": ["test"]}}, "run_tests has .* for 'nobody'"),
        ({"run_tests": {"three": ["dev"]}}, r"run_tests has \['dev'\] for 'three'"),
        ({"run_tests": {"three": []}}, r"run_tests has \[\] for 'three'"),
    ],
)
def test_bound_is_of_a_cascade_and_a_run_on_a_test_of_both(recipe, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        replace(recipe, **changes)


def test_bound_is_of_runs_with_the_same_seeds(recipe):
    bounds = {"b": [replace(BOUND, baseline="one")]}
    with pytest.raises(ConfigError, match=r"runs of the seeds \[0, 1\] and \[0\]"):
        replace(recipe, seeds=[0, 1], bounds=bounds)


def test_sequential_ranker_of_steps_that_share_no_seed_is_refused(recipe):
    steps = {**recipe.runs, "three": replace(recipe.runs["three"], seeds=[1])}
    with pytest.raises(
        ConfigError, match=r"'sequence' is made of runs that share no seed.*\[0\].*\[1\]"
    ):
        replace(recipe, seeds=[0, 1], runs=steps)


def test_baseline_is_a_system_of_the_report_which_a_cascade_without_its_drop_ratios_is_not(recipe):
    alone = {"runs": {"cascade": recipe.runs["cascade"]}, "sequential_rankers": {}}
    alone |= {"ranker_cascades": {}, "run_tests": {}, "bounds": {}}
    with pytest.raises(ConfigError, match=r"baselines .*'cascade'"):
        replace(recipe, **alone, baseline="cascade")
    assert replace(recipe, **alone, baseline="cascade, drop 0").against("test") == "cascade, drop 0"


@pytest.mark.parametrize(
    "path", sorted(Path("pipelines/recipes").glob("cascade_*.yaml")), ids=lambda p: p.stem
)
def test_recipe_file_parses_into_a_recipe(path):
    found, *_ = read_recipe(Recipe, ["--config", str(path), "--output", "out"])
    assert any(map(found.is_cascade, found.runs)) or found.ranker_cascades
