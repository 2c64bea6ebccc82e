"""Teachers, students, an ensemble and their resemblance, end to end on a made-up corpus."""

import json
from dataclasses import replace
from pathlib import Path

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
from pipelines.distill import PIPELINE, Recipe, _format_latencies

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
    cells = _format_latencies(systems).splitlines()[-1].split(" | ")
    assert cells[-3:] == ["2.70", "63%", "60% |"]


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
