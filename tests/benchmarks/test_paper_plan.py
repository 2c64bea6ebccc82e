"""The plan simulates the executor's order on devices; checked by hand on few stages."""

import json
import math
import shutil
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch

from as2ray.cascade.cost import EncoderShape
from as2ray.experiments.cost_model import SCALING_EFFICIENCY, Cost, DeviceRates, device_rates
from as2ray.experiments.rankers import TrainedRanker
from as2ray.experiments.stage import Stage
from benchmarks import plan
from benchmarks.plan import build_stages, measure_rates, simulate, stage_cost


@dataclass(frozen=True, eq=False)
class Work(Stage):
    """A run that takes hours on one device."""

    RESOURCES = "gang"

    name: str
    work_hours: float
    max_devices: float
    start: Stage | None = None

    def hours(self):
        return self.work_hours


@pytest.fixture(autouse=True)
def _restored_rates():
    earlier = dict(device_rates)
    yield
    device_rates.clear()
    device_rates.update(earlier)


def _costs(*stages):
    return {s: Cost(None, s.work_hours, s.max_devices, fixed_hours=0.0) for s in stages}


def test_independent_stages_share_the_devices():
    costs = _costs(*(Work(f"run {n}", 1.0, 1.0) for n in range(5)))
    assert [simulate(costs, n, 1) for n in (1, 2, 4, 8)] == [5.0, 3.0, 2.0, 1.0]


def test_longest_chain_goes_first():
    short = [Work(f"short {n}", 1.0, 1.0) for n in range(4)]
    first = Work("first", 2.0, 1.0)
    costs = _costs(*short, first, Work("second", 2.0, 1.0, start=first))
    assert simulate(costs, 2, 1) == 4.0


def test_gang_waits_for_all_its_devices_and_is_not_passed():
    class Scored(Work):
        RESOURCES = "device"

    long, small = Scored("long", 3.0, 1.0), Scored("small", 1.0, 1.0)
    gang = Work("gang", 2.0, 2.0)
    # The gang waits for the long stage; the small one, which has room beside it, waits behind it.
    costs = _costs(long, gang, small)
    assert simulate(costs, 2, 2) == pytest.approx(3.0 + 2.0 / (2 * SCALING_EFFICIENCY) + 1.0)


def test_hours_fall_with_devices_and_side_by_side():
    costs = _costs(*(Work(f"run {n}", 1.0, 4.0) for n in range(16)))
    hours = plan.estimate_hours(costs)
    assert hours[1]["in sequence"] == hours[1]["side by side"] == 16.0
    assert hours[64]["in sequence"] == hours[8]["in sequence"]  # a run feeds four devices
    assert hours[64]["side by side"] == pytest.approx(1 / (4 * SCALING_EFFICIENCY))
    assert hours[64]["devices of a gang"] == 4


def test_recipes_of_a_paper_share_their_equal_runs():
    stages = [
        stage
        for path in sorted(plan.RECIPES.glob("cerberus_table*.yaml"))
        for stage in build_stages(path)
    ]
    runs = [stage for stage in stages if isinstance(stage, TrainedRanker)]
    assert (len(set(runs)), len(runs)) == (109, 163)


@pytest.mark.parametrize("path", sorted(plan.RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_hours_of_every_stage_of_a_recipe_are_known(path):
    costs = {stage: stage_cost(stage) for stage in build_stages(path)}
    assert not [stage.kind for stage, cost in costs.items() if cost.hours is None]


def test_rate_is_measured_on_the_device():
    rates = measure_rates(EncoderShape(64, 128, 64, 1), torch.device("cpu"), 0.01)
    assert 0 < rates.train_flops < math.inf
    assert 0 < rates.score_flops < math.inf


def test_rates_are_those_of_the_cost_model_unless_a_device_or_a_rate_is_named():
    measured = dict(device_rates)
    assert measured[384].train_flops < measured[768].train_flops < measured[1024].train_flops
    plan._set_rates(Namespace(teraflops=None, device=None))
    assert device_rates == measured
    plan._set_rates(Namespace(teraflops=7.0, device=None))
    assert device_rates == {None: DeviceRates(7e12, 7e12, layer_launch_s=0.0)}


def test_plan_names_every_paper_and_scales_with_the_rate(tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in ("tanda_figure4", "cascade_table3", "cerberus_teachers", "two_in_one_table1"):
        shutil.copy(plan.RECIPES / f"{name}.yaml", recipes)
    monkeypatch.setattr(plan, "RECIPES", recipes)
    monkeypatch.setattr(plan, "DEVICE_COUNTS", (1, 8))
    for rate in ("100", "200"):
        plan.main(["--teraflops", rate, "--output", str(tmp_path / rate)])
    slow, fast = (json.loads((tmp_path / rate).read_text())["results"] for rate in ("100", "200"))
    assert set(slow["papers"]) == {*plan.PAPERS}
    assert set(slow["recipes"]) == {path.stem for path in recipes.iterdir()}
    for name, summary in slow["recipes"].items():
        assert sorted(map(int, summary["hours"])) == [1, 8]
        assert summary["hours"]["8"]["side by side"] < summary["hours"]["1"]["side by side"]
        # All but the start of the workers and the copies of checkpoints takes twice as long.
        assert summary["training"] == pytest.approx(2 * fast["recipes"][name]["training"], rel=0.05)


def test_pseudo_label_paper_has_all_its_runs_and_each_source_once():
    paths = sorted(plan.RECIPES.glob("mokrii_[dmy]*.yaml"))
    stages = [stage for path in paths for stage in build_stages(path)]
    runs = [stage for stage in stages if isinstance(stage, TrainedRanker)]
    assert len(paths) == 5
    # Four sources, pseudo-labels, and six starts with three samples of ten sizes, and all queries.
    assert len(runs) == 5 * (4 + 1 + 6 * (3 * 10 + 1))
    assert len(set(runs)) == len(runs) - 5 * 4 + 5
