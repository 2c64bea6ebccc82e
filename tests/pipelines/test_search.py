"""A search of a student's settings; `cluster/test_watched_search.py` runs one with Ray Tune."""

import json
import re
from dataclasses import replace

import pytest
from pydantic import ValidationError

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.recipe import RunSpec, read_recipe
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.tracking import METRICS, read_metrics
from pipelines import distill
from pipelines.search import PIPELINE, Recipe, build
from tune_spaces.run_fields import Interval

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def recipe(common, learn):
    return Recipe(
        **common,
        runs={
            "teacher": RunSpec(**learn),
            "student": RunSpec(
                num_layers=1, teachers=["teacher"], loss=DistillationLoss(teacher_index=0), **learn
            ),
        },
        baseline="teacher",
        seeds=[0, 1],
        student="student",
        num_trials=2,
    )


@pytest.mark.parametrize("student", ["teacher", "nobody", ""])
def test_student_that_does_not_distil_is_refused(recipe, student):
    with pytest.raises(ConfigError, match=rf"student '{student}'.*distillation loss"):
        replace(recipe, student=student)


def test_grid_trains_every_combination_of_any_run_and_writes_every_row(recipe, tmp_path):
    grid = {"training.learning_rate": [1e-5, 1e-3], "training.global_batch_size": [8, 16]}
    training = replace(recipe.runs["teacher"].training, max_steps=6)
    runs = {**recipe.runs, "teacher": replace(recipe.runs["teacher"], training=training)}
    searched = replace(recipe, student="teacher", runs=runs, grid=grid)
    PIPELINE.run(searched, tmp_path, HERE)
    rows = (tmp_path / "grid.md").read_text().strip().splitlines()[2:]
    assert len(rows) == 4
    quality = [float(row.split("|")[-2]) for row in rows]
    best, *_ = read_recipe(
        distill.Recipe, ["--config", str(tmp_path / "best.yaml"), "--output", "out"]
    )
    row = rows[quality.index(max(quality))]
    chosen = best.runs["teacher"].training
    values = (f"{chosen.learning_rate:g}", str(chosen.global_batch_size))
    cells = [cell.strip() for cell in row.split("|")[1:3]]
    assert (f"{float(cells[0]):g}", cells[1]) == values
    steps = [x["step"] for x in read_metrics(tmp_path / "grid" / "0" / METRICS)]
    assert max(steps) == 6  # whatever the batch size
    for name, value in (("training.epoch", 1), ("training.epochs", -1), ("epochs", 1)):
        with pytest.raises(ConfigError, match=name):
            replace(searched, grid={name: [value]})


def test_grid_has_any_field_of_a_run(recipe, tmp_path, checkpoint):
    searched = replace(recipe, student="teacher", grid={"num_layers": [1, 2]})
    PIPELINE.run(searched, tmp_path, HERE)
    for number, num_layers in enumerate((1, 2)):
        manifest = json.loads((tmp_path / "grid" / str(number) / "manifest.json").read_text())
        assert manifest["outputs"]["shape"]["num_layers"] == num_layers
    assert re.search(r"num_layers: [12]\n", (tmp_path / "best.yaml").read_text())
    tables = build(replace(searched, grid={"train": [["target"], ["general"]]}), {})
    assert len(tables.stages["grid/0"].inputs) == len(tables.stages["grid/1"].inputs)
    assert tables.stages["grid/0"].inputs != tables.stages["grid/1"].inputs
    models = build(replace(searched, grid={"model": [str(checkpoint("electra", None))]}), {})
    assert "electra" in models.stages["grid/0"].model.path
    training = build(replace(searched, grid={"training": [{"epochs": 2}]}), {})
    assert training.stages["grid/0"].training.epochs == 2
    with pytest.raises(ConfigError, match="exit_layers"):
        build(replace(searched, grid={"exit_layers": [(1,)]}), {})


def test_space_is_of_fields_that_the_run_has(recipe):
    rates = Interval(1e-6, 1e-3, log=True)
    space = {"training.learning_rate": rates, "training.num_layers": [1, 2]}
    with pytest.raises(ConfigError, match="num_layers"):
        replace(recipe, student="teacher", space=space)
    space = {"training.learning_rate": rates, "training.epochs": [1, 2]}
    searched = replace(recipe, student="teacher", space=space)
    search = build(searched, {}).stages["search"]
    chosen = search.tuned_run({"training.learning_rate": 1e-4, "training.epochs": 2})
    assert (chosen.training.learning_rate, chosen.training.epochs) == (1e-4, 2)
    other = {**space, "training.epochs": [1, 3]}
    assert build(replace(searched, space=other), {}).stages["search"] != search
    for wrong in ({"training.epochs": [0]}, {"training.weight_decay": Interval(-1.0, 0.0)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(searched, space=wrong)
    epochs = {"training.epochs": [True]}
    for values in ({"grid": epochs, "space": {}}, {"space": epochs}):
        with pytest.raises(ConfigError, match=r"epochs' cannot be True, which is no number"):
            replace(searched, **values)
    with pytest.raises(ConfigError, match="loss 'uniform_exit', exit_layers"):
        replace(searched, space={"loss": ["cross_entropy", "uniform_exit"]})
    for early in ({"num_layers": [1]}, {"dev": ["dev"]}, {"training.epochs": []}):
        with pytest.raises((ConfigError, ValidationError), match=next(iter(early))):
            replace(searched, space=early)
    for end in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="low < high"):
            Interval(1.0, end)
    seeds = {"training.seed": [3, 4]}
    by_seed = replace(searched, space=seeds)
    trial = build(by_seed, {}).stages["search"].tuned_run({"training.seed": 3})
    grid = build(replace(searched, space={}, grid={"training.seed": [3]}), {})
    assert trial == grid.stages["grid/0"]
    with pytest.raises(ConfigError, match=r"cannot have training\.seed with seed 2"):
        replace(by_seed, seeds=[2, 0])
    with pytest.raises(ConfigError, match="a grid or a space"):
        replace(searched, grid={"training.epochs": [1]})


@pytest.mark.parametrize(("select_by", "best_of"), [("dev/P@1", max), ("epoch", lambda v: v[-1])])
def test_grid_is_ranked_by_what_selects_the_checkpoint(recipe, tmp_path, select_by, best_of):
    training = replace(recipe.runs["teacher"].training, max_steps=4, eval_steps=1)
    training = replace(training, select_by=select_by, learning_rate=1e-2)
    runs = {**recipe.runs, "teacher": replace(recipe.runs["teacher"], training=training)}
    grid = {"training.seed": [0, 1]}
    PIPELINE.run(replace(recipe, student="teacher", runs=runs, grid=grid), tmp_path, HERE)
    header, _, *rows = (tmp_path / "grid.md").read_text().strip().splitlines()
    metric = training.selection_metric
    assert header.split("|")[-2].strip() == metric
    for number, row in enumerate(rows):
        lines = read_metrics(tmp_path / "grid" / str(number) / METRICS)
        values = [line[metric] for line in lines if metric in line]
        assert len(values) == 4
        assert float(row.split("|")[-2]) == pytest.approx(best_of(values), abs=1e-4)


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ("{training.epochs: {lo: 1, high: 3}}", r"interval.lo: unknown key"),
        ("{training.epochs: 3}", r"epochs=3: a field has a list of numbers or texts, or an inter"),
        ("{training.epochs: [null]}", r"epochs=\[None\]: a field has a list"),
        ("{training.epochs: {low: true, high: 3}}", "low=True must be a number"),
        ("{training.epochs: {low: 1, high: 2.5}}", "'training.epochs' cannot be 2.5: epochs=2.5"),
        ("{loss.alpha: [0, 1]}", "the run has no field 'loss.alpha'"),
    ],
)
def test_wrong_space_of_a_command_line_is_refused_in_one_clear_line(space, problem, tmp_path):
    flags = ["--config", "tanda_minilm.yaml", "--student", "wikiqa", "--output", str(tmp_path)]
    with pytest.raises(ConfigError, match=problem) as raised:
        read_recipe(Recipe, [*flags, "--space", space])
    assert "pydantic" not in str(raised.value)
    assert "Interval" not in str(raised.value)
