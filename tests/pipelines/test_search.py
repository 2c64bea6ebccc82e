"""A search of a student's settings, end to end on a made-up corpus."""

from dataclasses import replace

import pytest

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, StaleStageError
from as2ray.losses.distillation import DistillationLoss
from pipelines import distill
from pipelines.recipe import RunSpec, read_recipe
from pipelines.search import Recipe, run
from tune_spaces import distillation


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
def test_search_writes_the_best_settings_as_a_recipe_and_goes_on(recipe, tmp_path, ray_local):
    path = run(recipe, tmp_path, WorkersConfig(num_workers=0))
    found, *_ = read_recipe(distill.Recipe, ["--config", str(path), "--output", "out"])
    student = found.runs["student"]
    assert student.loss.alpha in distillation.ALPHA
    assert student.loss.temperature in distillation.TEMPERATURE
    assert student.loss.teacher_index == 0
    assert student.training.global_batch_size in distillation.GLOBAL_BATCH_SIZE
    assert student.training.epochs == 1
    assert found.runs["teacher"] == recipe.runs["teacher"]
    assert sorted(p.name for p in (tmp_path / "rankers").iterdir()) == ["teacher-seed0"]
    runs = tmp_path / "search" / "tune" / "runs"
    trials = sorted(p.name for p in runs.iterdir())
    assert len(trials) == 2
    before = path.read_text()
    assert run(recipe, tmp_path, WorkersConfig(num_workers=0)).read_text() == before
    assert sorted(p.name for p in runs.iterdir()) == trials
    with pytest.raises(StaleStageError, match="trials"):
        run(replace(recipe, num_trials=3), tmp_path, WorkersConfig(num_workers=0))


def test_step_that_does_not_distil_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"student 'teacher'(.|\n)*\['student'\]"):
        replace(recipe, student="teacher")


@pytest.mark.parametrize("student", ["teacher", "nobody", ""])
def test_student_that_does_not_distil_is_refused(recipe, student):
    with pytest.raises(ConfigError, match=rf"student '{student}'.*distillation loss"):
        replace(recipe, student=student)
