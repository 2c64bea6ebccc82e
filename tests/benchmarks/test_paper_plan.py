"""The plan counts what a recipe's steps do; checked by hand on small ones."""

import json
import math

import pytest
import torch

from as2ray.evaluation.cost import Shape
from as2ray.objectives import Distillation
from as2ray.training.config import Training
from as2ray.training.job import Model
from benchmarks.plan import DEVICES, SHAPES, TOKENS, Work, main, measured, pairs, works
from pipelines.recipe import Data, Recipe, Step


def _recipe(**steps):
    tables = {
        "train": Data("wikiqa", "train", "no_all_negative"),
        "dev": Data("wikiqa", "dev", "clean"),
    }
    names = {"dev": "dev", "tests": ["dev"], "baseline": next(iter(steps)), "seeds": [0, 1]}
    return Recipe("plan", Model("bert-base-uncased"), tables, steps=steps, **names)


def _layer(tokens, hidden=768):
    """Operations of a layer over a pair: 12 hidden^2 weights, and two products of attention."""
    return 24 * tokens * hidden**2 + 4 * tokens**2 * hidden


def test_step_costs_its_epochs_thrice_and_a_validation_after_each():
    step = Step(["train"], Training(epochs=3, batch=20))
    trains, validates = works(_recipe(only=step))
    each = 12 * _layer(TOKENS["wikiqa"])
    assert trains.operations == pytest.approx(2 * 8_672 * 3 * 3 * each)
    assert validates.operations == pytest.approx(2 * 3 * 1_126 * each)
    assert (trains.trains, trains.batch, validates.trains) == (True, 20, False)


def test_cascade_costs_its_mean_exit_also_in_a_step_that_starts_from_it():
    learn = {"train": ["train"], "training": Training(epochs=1), "objective": "uniform_exit"}
    first = Step(**learn, exits=(4, 6, 8, 10, 12))
    trains, _, again, _ = works(_recipe(one=first, two=Step(**learn, start="one")))
    assert trains.operations == pytest.approx(2 * 8_672 * 3 * 8 * _layer(TOKENS["wikiqa"]))
    assert again.operations == trains.operations


def test_student_pays_for_its_teachers_logits():
    teacher = Step(["train"], Training(epochs=1), model="roberta-large")
    taught = {"teachers": ["teacher"], "objective": Distillation()}
    student = Step(["train"], Training(epochs=1), **taught)
    stored = list(works(_recipe(teacher=teacher, student=student)))[-1]
    assert stored.shape == SHAPES["roberta-large"]
    assert stored.operations == pytest.approx(2 * 8_672 * 24 * _layer(TOKENS["wikiqa"], 1_024))


def test_label_sets_of_asnq_are_counted_by_grade():
    assert pairs(Data("asnq", "train"), passages=False) == 20_377_568
    assert pairs(Data("asnq", "train", options={"negatives": [3]}), passages=False) == 503_326
    assert pairs(Data("asnq", "dev"), passages=False) == 930_062 / 2


def test_devices_that_a_batch_cannot_feed_do_not_help():
    work = Work(Shape(), True, 3.6e15, batch=32)
    assert work.seconds(1e12, 1) == 3_600
    assert work.seconds(1e12, 64) == work.seconds(1e12, 4) == pytest.approx(1_000)


def test_rate_is_measured_on_the_device():
    found = measured(Shape(64, 128, 64, 1), torch.device("cpu"), 0.01)
    assert all(rate > 0 and math.isfinite(rate) for rate in found.values())


def test_plan_names_every_paper_and_scales_with_the_rate(tmp_path):
    for rate in ("100", "200"):
        main(["--teraflops", rate, "--output", str(tmp_path / rate)])
    slow, fast = (json.loads((tmp_path / rate).read_text())["results"] for rate in ("100", "200"))
    assert len(slow) == 5
    for paper, cost in slow.items():
        assert sorted(map(int, cost["hours"])) == list(DEVICES)
        assert cost["hours"]["1"] == pytest.approx(2 * fast[paper]["hours"]["1"])
        assert cost["hours"]["64"] <= cost["hours"]["8"] < cost["hours"]["1"]
