"""The plan counts what a recipe's steps do; checked by hand on small ones."""

import json
import math

import pytest
import torch

from as2ray.cascade.cost import EncoderShape
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from benchmarks.plan import (
    DEVICE_COUNTS,
    ENCODER_SHAPES,
    MEAN_PAIR_TOKENS,
    Computation,
    count_pairs,
    iter_recipe_computations,
    main,
    measure_rates,
)
from pipelines.recipe import Recipe, RunSpec, TableSpec


def _recipe(**steps):
    tables = {
        "train": TableSpec("wikiqa", "train", "no_all_negative"),
        "dev": TableSpec("wikiqa", "dev", "clean"),
    }
    names = {"dev": "dev", "tests": ["dev"], "baseline": next(iter(steps)), "seeds": [0, 1]}
    return Recipe("plan", ModelSpec("bert-base-uncased"), tables, runs=steps, **names)


def _layer(tokens, hidden=768):
    """Operations of a layer over a pair: 12 hidden^2 weights, and two products of attention."""
    return 24 * tokens * hidden**2 + 4 * tokens**2 * hidden


def test_step_costs_its_epochs_thrice_and_a_validation_after_each():
    step = RunSpec(["train"], TrainingConfig(epochs=3, global_batch_size=20))
    trains, validates = iter_recipe_computations(_recipe(only=step))
    each = 12 * _layer(MEAN_PAIR_TOKENS["wikiqa"])
    assert trains.flops == pytest.approx(2 * 8_672 * 3 * 3 * each)
    assert validates.flops == pytest.approx(2 * 3 * 1_126 * each)
    assert (trains.is_training, trains.batch_size, validates.is_training) == (True, 20, False)


def test_cascade_costs_its_mean_exit_also_in_a_step_that_starts_from_it():
    learn = {"train": ["train"], "training": TrainingConfig(epochs=1), "loss": "uniform_exit"}
    first = RunSpec(**learn, exit_layers=(4, 6, 8, 10, 12))
    trains, _, again, _ = iter_recipe_computations(
        _recipe(one=first, two=RunSpec(**learn, init_from="one"))
    )
    assert trains.flops == pytest.approx(2 * 8_672 * 3 * 8 * _layer(MEAN_PAIR_TOKENS["wikiqa"]))
    assert again.flops == trains.flops


def test_student_pays_for_its_teachers_logits():
    teacher = RunSpec(["train"], TrainingConfig(epochs=1), model="roberta-large")
    taught = {"teachers": ["teacher"], "loss": DistillationLoss()}
    student = RunSpec(["train"], TrainingConfig(epochs=1), **taught)
    stored = list(iter_recipe_computations(_recipe(teacher=teacher, student=student)))[-1]
    assert stored.shape == ENCODER_SHAPES["roberta-large"]
    assert stored.flops == pytest.approx(2 * 8_672 * 24 * _layer(MEAN_PAIR_TOKENS["wikiqa"], 1_024))


def test_label_sets_of_asnq_are_counted_by_grade():
    assert count_pairs(TableSpec("asnq", "train"), has_passages=False) == 20_377_568
    assert (
        count_pairs(
            TableSpec("asnq", "train", corpus_options={"negative_grades": [3]}), has_passages=False
        )
        == 503_326
    )
    assert count_pairs(TableSpec("asnq", "dev"), has_passages=False) == 930_062 / 2


def test_devices_that_a_batch_cannot_feed_do_not_help():
    work = Computation(EncoderShape(), True, 3.6e15, batch_size=32)
    assert work.estimate_duration_s(1e12, 1) == 3_600
    assert (
        work.estimate_duration_s(1e12, 64)
        == work.estimate_duration_s(1e12, 4)
        == pytest.approx(1_000)
    )


def test_rate_is_measured_on_the_device():
    found = measure_rates(EncoderShape(64, 128, 64, 1), torch.device("cpu"), 0.01)
    assert all(rate > 0 and math.isfinite(rate) for rate in found.values())


def test_plan_names_every_paper_and_scales_with_the_rate(tmp_path):
    for rate in ("100", "200"):
        main(["--teraflops", rate, "--output", str(tmp_path / rate)])
    slow, fast = (json.loads((tmp_path / rate).read_text())["results"] for rate in ("100", "200"))
    assert len(slow) == 5
    for paper, cost in slow.items():
        assert sorted(map(int, cost["hours"])) == list(DEVICE_COUNTS)
        assert cost["hours"]["1"] == pytest.approx(2 * fast[paper]["hours"]["1"])
        assert cost["hours"]["64"] <= cost["hours"]["8"] < cost["hours"]["1"]
