"""Teachers, students, an ensemble and their resemblance, end to end on a made-up corpus."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from as2ray.checkpoints.loading import load
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.cascades import DropSearchConfig
from as2ray.experiments.recipe import Recipe as BaseRecipe
from as2ray.experiments.recipe import RunSpec, read_recipe
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.cascade import CascadeRanker
from as2ray.models.ensemble import EnsembleRanker
from pipelines.distill import PIPELINE, Recipe, Savings, _format_latencies, summarize_confidence

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def recipe(checkpoint, common, learn):
    teachers = ["first", "second", "third"]
    return Recipe(
        **common,
        runs={
            "first": RunSpec(**learn),
            "second": RunSpec(num_layers=2, **learn),
            "third": RunSpec(model=str(checkpoint("electra", None)), **learn),
            "cerberus": RunSpec(
                exit_layers=(2,),
                num_ranking_heads=3,
                teachers=teachers,
                loss=DistillationLoss(),
                **learn,
            ),
            "pruning": RunSpec(
                exit_layers=(1, 2),
                num_ranking_heads=3,
                teachers=teachers,
                loss=DistillationLoss(),
                **learn,
            ),
        },
        ensembles={"all": teachers},
        num_ensemble_trials=3,
        search=DropSearchConfig(num_trials=2),
        teacher_agreement=["cerberus"],
        baseline="first",
        seeds=[0],
    )


@pytest.mark.slow
def test_confidence_of_an_ensemble_is_drawn_beside_that_of_its_members(recipe, tmp_path, learn):
    student = RunSpec(teachers=[["first", "second"]], loss=DistillationLoss(), **learn)
    runs = {name: recipe.runs[name] for name in ("first", "second")} | {"student": student}
    recipe = replace(recipe, runs=runs, ensembles={}, teacher_agreement=[], measure_speed=False)
    out = tmp_path / "out"
    PIPELINE.run(recipe, out, HERE)
    lines = (out / "target-student-confidence.md").read_text().splitlines()[2:]
    names = [line.split("|")[1].strip() for line in lines]
    assert names == ["first", "second", "ensemble"]
    assert (out / "target-student-confidence.png").stat().st_size > 0
    stored = json.loads((out / "confidence" / "target-student" / "manifest.json").read_text())
    outputs = stored["outputs"]
    # The mean of probabilities is never surer than its members are in the mean (Jensen).
    members = [outputs[name]["entropy"] for name in names[:2]]
    assert outputs["ensemble"]["entropy"] >= sum(members) / 2 - 1e-6
    assert sum(outputs["ensemble"]["shares"]) == pytest.approx(1)


def test_confidence_is_the_share_of_probabilities_close_to_0_or_1():
    summary = summarize_confidence(np.array([0.5, 0.96, 0.01, 0.9]))
    assert summary["confident"] == 0.5
    assert np.flatnonzero(summary["shares"]).tolist() == [0, 10, 18, 19]
    assert summarize_confidence(np.array([0.5, 0.5]))["entropy"] == pytest.approx(1)
    assert summarize_confidence(np.array([0.0, 1.0]))["entropy"] == 0


@pytest.mark.slow
def test_pipeline_makes_ensembles_and_tells_how_heads_resemble_teachers(
    recipe, tmp_path, ray_local
):
    out = tmp_path / "out"
    PIPELINE.run(recipe, out, HERE)
    systems = {*recipe.runs, "all", "pruning-searched"}
    report = json.loads((out / "test.json").read_text())
    assert {row["system"] for row in report["rows"]} == systems == set(recipe.systems())
    pruning = load(out / "rankers" / "pruning-searched-seed0" / "ranker")
    assert isinstance(pruning, CascadeRanker)
    assert pruning.exit_layers[-1] == 2
    assert pruning.network.heads[-1].num_outputs == 3
    ensemble = load(out / "rankers" / "all-seed0" / "ranker")
    assert isinstance(ensemble, EnsembleRanker)
    assert sum(ensemble.weights) == pytest.approx(1.0)
    found = json.loads((out / "rankers" / "all-seed0" / "manifest.json").read_text())["outputs"]
    assert found["dev MAP"] >= found["equal weights"]
    told = (out / "test-cerberus-agreement.md").read_text()
    assert all(f"| head {number} |" in told for number in range(3))
    assert "all_right: the student is right on" in told
    assert "| teachers right | student |" in told
    assert (out / "test-cerberus-agreement.png").stat().st_size > 0
    rows = [line.split(" | ") for line in (out / "latency.md").read_text().splitlines()[2:]]
    sizes = {row[0].removeprefix("| "): int(row[1].replace(",", "")) for row in rows}
    assert next(iter(sizes)) == recipe.baseline
    assert sizes.keys() == systems
    assert sizes["all"] == sum(sizes[teacher] for teacher in recipe.ensembles["all"])


def test_latencies_have_the_paper_s_claims_as_columns():
    # Tables 2 and 5: CERBERUS against RoBERTa-large.
    def values(num_parameters, latency_us):
        times = dict.fromkeys(("latency_us", "batched_latency_us"), (latency_us, 0.0))
        return {"num_parameters": num_parameters, **times, "slowdown": ""}

    systems = {"cerberus": values(124_000_000, 1.0), "large": values(335_000_000, 2.5)}
    cells = _format_latencies(systems, {}, {"large": 6.5}).splitlines()[-1].split(" | ")
    assert cells[-4:] == ["2.70", "63%", "60%", "6.5 |"]
    claims = _format_latencies(systems, {"large": Savings(2.7, 0.64, 0.6)}, {}).splitlines()[-3:]
    assert claims == [
        "| large | parameters | 2.7 | 2.7 | holds |",
        "| large | size | 0.64 | 0.63 | does not hold |",
        "| large | latency | 0.6 | 0.6 | holds |",
    ]


def test_savings_of_an_unknown_system_are_refused(recipe):
    with pytest.raises(ConfigError, match=r"published_savings of \['large'\]"):
        replace(recipe, published_savings={"large": Savings(2.7, 0.64, 0.6)})
    with pytest.raises(ConfigError, match=r"published_latencies_us of \['large'\]"):
        replace(recipe, published_latencies_us={"large": 6.5})


def test_ensembles_and_resemblance_that_name_no_such_steps_are_refused(recipe):
    with pytest.raises(ConfigError, match="ensemble 'all'"):
        replace(recipe, ensembles={"all": ["first", "nobody"]})
    with pytest.raises(ConfigError, match="teacher_agreement of 'first'"):
        replace(recipe, teacher_agreement=["first"])


def test_ensemble_of_steps_that_share_no_seed_is_refused(recipe):
    steps = {name: recipe.runs[name] for name in recipe.ensembles["all"]}
    steps["second"] = replace(steps["second"], seeds=[1])
    steps["third"] = replace(steps["third"], seeds=[0])
    with pytest.raises(
        ConfigError, match=r"'all' is made of runs that share no seed.*\[1\].*\[0\]"
    ):
        replace(recipe, seeds=[0, 1], runs=steps, teacher_agreement=[])


@pytest.mark.parametrize(
    "path", sorted(Path("pipelines/recipes").glob("cerberus_*[!s].yaml")), ids=lambda p: p.stem
)
def test_recipe_file_parses_into_a_recipe(path):
    found, *_ = read_recipe(Recipe, ["--config", str(path), "--output", "out"])
    assert any(step.teachers for step in found.runs.values())


def test_teachers_of_hydra_differ_from_its_student_by_their_seeds_alone():
    path = "pipelines/recipes/cerberus_table2.yaml"
    found, *_ = read_recipe(Recipe, ["--config", path, "--output", "out"])
    steps = [found.runs[name] for name in found.runs["hydra"].teachers]
    steps += [found.runs[step.init_from or ""] for step in steps]
    assert all(step.model is None and step.num_layers is None for step in steps)
    assert [step.training.seed for step in steps] == [0, 100, 200, 0, 100, 200]


def test_teachers_recipe_parses_into_a_recipe():
    path = "pipelines/recipes/cerberus_teachers.yaml"
    found, *_ = read_recipe(BaseRecipe, ["--config", path, "--output", "out"])
    assert {step.model for step in found.runs.values() if step.model} == {
        "roberta-large",
        "google/electra-large-discriminator",
        "albert/albert-xxlarge-v2",
    }
