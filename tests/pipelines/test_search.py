"""A search of a student's settings, end to end on a made-up corpus."""

from dataclasses import replace

import pytest

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, StaleStageError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.rankers import RANKER
from as2ray.experiments.recipe import RunSpec, read_recipe
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.tracking import METRICS, TrackingConfig, read_metrics
from pipelines import distill
from pipelines.search import PIPELINE, Recipe
from tune_spaces import distillation

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


@pytest.mark.slow
def test_search_writes_the_best_settings_as_a_recipe_whose_student_is_that_of_the_search(
    recipe, tmp_path, ray_local
):
    mlflow = pytest.importorskip("mlflow")
    output, uri = tmp_path / "out", f"sqlite:///{tmp_path}/mlflow.db"
    recipe = replace(recipe, tracking=TrackingConfig(mlflow_uri=uri, upload_rankers=False))
    PIPELINE.run(recipe, output, HERE)
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("Tiny").experiment_id])
    runs = {run.info.run_name.partition("-alpha")[0]: run for run in found}
    assert runs["search"].info.status == "FINISHED"
    files = {file.path for file in client.list_artifacts(runs["search"].info.run_id)}
    assert files >= {"trials.csv", "search.md", "optuna.journal"}
    for trial in ("001", "002"):
        assert runs[trial].data.tags["mlflow.parentRunId"] == runs["search"].info.run_id
        assert runs[trial].data.metrics.keys() >= {"train/loss/hard", "train/loss/soft", "dev/AP"}
        assert runs[trial].data.params.keys() >= {"alpha", "training.epochs"}
    assert len(list((output / "search").glob("trials/*/tensorboard/events*"))) == 2
    path = output / "best.yaml"
    best, *_ = read_recipe(distill.Recipe, ["--config", str(path), "--output", "out"])
    student = best.runs["student"]
    assert student.loss.alpha in distillation.ALPHA
    assert student.loss.temperature in distillation.TEMPERATURE
    assert student.loss.teacher_index == 0
    assert student.training.global_batch_size in distillation.GLOBAL_BATCH_SIZE
    assert student.training.epochs == 1
    assert best.runs["teacher"] == recipe.runs["teacher"]
    search = output / "search"
    assert (search / "trials.csv").read_text().count("\n") == 3
    assert (search / "optuna.journal").exists()
    assert not (search / "scratch").exists()
    before = {file: file.stat().st_mtime_ns for file in search.iterdir()}
    PIPELINE.run(recipe, output, HERE)
    assert {file: file.stat().st_mtime_ns for file in search.iterdir()} == before
    with pytest.raises(StaleStageError, match="num_trials"):
        PIPELINE.run(replace(recipe, num_trials=3), output, HERE)
    # The written recipe shares the teacher of the search, and trains the same student.
    rankers = Pipeline(distill.Recipe, distill.build, lambda recipe, finished: None)
    rankers.run(replace(best, seeds=[0], measure_speed=False), tmp_path / "best", HERE)
    weights = f"{RANKER}/model.safetensors"
    written_out = tmp_path / "best" / "rankers" / "student-seed0" / weights
    assert written_out.read_bytes() == (search / weights).read_bytes()
    assert len(list((tmp_path / "store" / "TrainedRanker").iterdir())) == 2


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
