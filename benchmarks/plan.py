"""Estimates the hours of a reproduction of each paper on 1, 8 and 64 GPUs.

    python -m benchmarks.plan                 # rates that were measured on an NVIDIA H200
    python -m benchmarks.plan --device cuda   # measures this machine's device
    python -m benchmarks.plan --teraflops 200 # assumes another device

It builds the graph of every recipe, as `--dry_run` does, and estimates each stage by
`as2ray.experiments.cost_model`, so neither corpora nor models are needed. The stages run in
sequence, on all devices, or side by side, as the executor admits them. The operations per second of
a device are measured on one layer of each encoder size, for training and, fused, for scoring.
"""

import argparse
import heapq
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from as2ray.cascade.cost import EncoderShape
from as2ray.corpora.registry import CORPORA
from as2ray.experiments import cost_model
from as2ray.experiments.cost_model import (
    Cost,
    DeviceRates,
    device_rates,
    scoring_cost,
    training_cost,
)
from as2ray.experiments.executor import run_graph
from as2ray.experiments.rankers import TableScores, TrainedRanker
from as2ray.experiments.recipe import read_recipe
from as2ray.experiments.stage import Label, Result, Stage, sorted_stages
from as2ray.experiments.store import Store
from benchmarks.report import Claim, parse_arguments, write_report

RECIPES = Path("pipelines/recipes")
PIPELINES = {
    "tanda_*": "transfer_adapt",
    "cascade_*": "cascade",
    "cerberus_teachers": "transfer_adapt",
    "cerberus_*": "distill",
    "two_in_one_*": "two_in_one",
    "pseudo_label_*": "pseudo_label",
    "mokrii_epochs": "search",
    "mokrii_*": "pseudo_label",
}
"""Pipeline of each recipe; the first pattern counts."""

PAPERS = {
    "TANDA": "tanda_[tf]*",
    "Cascade Transformer": "cascade_t*",
    "CERBERUS": "cerberus_table*",
    "Two-in-One": "two_in_one_t*",
    "Pseudo-labels and transfer": "mokrii_[dmy]*",
}
"""Recipes of each paper."""

DEVICE_COUNTS = (1, 8, 64)


def build_stages(path: Path) -> list[Stage]:
    """Returns the stages of a recipe, inputs first."""
    module = next(name for pattern, name in PIPELINES.items() if path.match(f"{pattern}.yaml"))
    pipeline = import_module(f"pipelines.{module}").PIPELINE
    recipe, _ = read_recipe(pipeline.recipe_type, ["--config", str(path), "--output", "-"])
    data_dirs = dict.fromkeys(CORPORA, "data")  # nothing is read, so nothing is missing
    return sorted_stages(pipeline.build(recipe, data_dirs).targets)


def stage_cost(stage: Stage) -> Cost:
    """Returns the estimated cost of a stage; work on CPUs costs nothing."""
    if isinstance(stage, TrainedRanker):
        return training_cost(stage)
    if isinstance(stage, TableScores):
        return scoring_cost(stage)
    return Cost(None, 0.0 if stage.RESOURCES == "cpu" else stage.hours(), fixed_hours=0.0)


def count_runs(stages: Sequence[Stage]) -> int:
    """Returns the number of training runs among stages."""
    return sum(isinstance(stage, TrainedRanker) for stage in stages)


@dataclass
class SimulatedBackend:
    """A backend on which stages only take time."""

    costs: Mapping[Stage, Cost]
    num_devices: int
    gang_size: int
    """Devices that each training run or scoring pool holds, whether it can use them or not."""
    max_parallel: int = sys.maxsize
    clock: float = 0.0
    """Hours since the start."""
    ends: list[tuple[float, int, Stage]] = field(default_factory=list)
    num_submitted: int = 0

    def count_devices(self, stage: Stage) -> int:
        """Returns the number of devices that a stage holds."""
        return {"cpu": 0, "device": 1}.get(stage.RESOURCES, self.gang_size)

    def check(self, stages: Sequence[Stage]) -> None:
        """See `Backend`."""

    def admits(self, stage: Stage, running: Sequence[Stage]) -> bool:
        """See `Backend`."""
        return sum(map(self.count_devices, (stage, *running))) <= self.num_devices

    def submit(self, stage: Stage, inputs: Mapping[Stage, Result], label: Label) -> Any:
        """See `Backend`."""
        self.num_submitted += 1
        hours = self.costs[stage].hours_on(self.gang_size) or 0.0
        heapq.heappush(self.ends, (self.clock + hours, self.num_submitted, stage))
        return stage

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        self.clock, _, stage = heapq.heappop(self.ends)
        return stage

    def result(self, handle: Any) -> Result:
        """See `Backend`."""
        return Result(handle.kind, handle.key, {})


def simulate(costs: Mapping[Stage, Cost], num_devices: int, gang_size: int) -> float:
    """Returns the hours that stages take side by side, in the order of the executor.

    Args:
        costs: The stages, inputs first.
        num_devices: Devices of the cluster.
        gang_size: Devices of each training run and of each scoring pool.
    """
    backend = SimulatedBackend(costs, num_devices, gang_size)
    executor_log = logging.getLogger("as2ray.experiments.executor")
    level = executor_log.level
    executor_log.setLevel(logging.ERROR)  # thousands of stages start and end
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = run_graph(list(costs), Store(folder), backend)
    finally:
        executor_log.setLevel(level)
    run.raise_failures({})
    return backend.clock


def estimate_hours(costs: Mapping[Stage, Cost]) -> dict[int, dict[str, float]]:
    """Returns the hours in sequence and side by side, and the best size of a gang, by devices."""
    hours = {}
    # Further devices of a gang would stay idle.
    gangs = (cost.max_devices for stage, cost in costs.items() if stage.RESOURCES == "gang")
    largest = max(gangs, default=1)
    for n in DEVICE_COUNTS:
        sizes = [2**k for k in range(int(math.log2(n)) + 1) if 2**k < 2 * largest]
        side_by_side, gang_size = min((simulate(costs, n, size), size) for size in sizes)
        hours[n] = {
            "in sequence": sum(cost.hours_on(n) or 0.0 for cost in costs.values()),
            "side by side": side_by_side,
            "devices of a gang": gang_size,
        }
    return hours


def measure_rates(shape: EncoderShape, device: Any, duration_s: float) -> DeviceRates:
    """Measures the operations per second of one layer in bf16 for pairs of 40 tokens.

    Args:
        shape: Sizes of the encoder.
        device: A device of torch.
        duration_s: Duration of the measurement of training, and of that of scoring.
    """
    import torch
    from transformers import BertConfig, BertModel

    from as2ray.models.encoder.encoder import Encoder
    from as2ray.models.encoder.packed_attention import SequenceLayout

    config = BertConfig(
        vocab_size=8,
        hidden_size=shape.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=max(1, shape.hidden_size // 64),
        intermediate_size=shape.intermediate_size,
    )
    model = BertModel(config, add_pooling_layer=False).to(device)
    encoder = Encoder(model)
    lengths = np.full(1_024 if device.type == "cuda" else 24, 40)
    hidden = torch.randn(int(lengths.sum()), shape.hidden_size, device=device, requires_grad=True)
    layout = SequenceLayout.from_lengths(lengths, device)
    forward_flops = float(shape.layer_flops(lengths).sum())

    def time_step(is_training: bool) -> float:
        started_at = time.perf_counter()
        if is_training:
            with torch.autocast(device.type, torch.bfloat16):
                encoder.run_layers(hidden, layout).sum().backward()  # type: ignore[no-untyped-call]
        else:
            with torch.inference_mode(), encoder.fused_inference(torch.bfloat16):
                encoder.run_layers(hidden, layout)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_at

    rates = {}
    for is_training in (True, False):
        model.train(is_training)
        step_times_s = [time_step(is_training)]  # the first is a warm-up
        deadline = time.perf_counter() + duration_s
        while len(step_times_s) < 3 or time.perf_counter() < deadline:
            step_times_s.append(time_step(is_training))
        num_flops = (3.0 if is_training else 1.0) * forward_flops
        rates[is_training] = num_flops / float(np.median(step_times_s[1:]))
    launch_s = DeviceRates.layer_launch_s if device.type == "cuda" else 0.0
    return DeviceRates(rates[True], rates[False], layer_launch_s=launch_s)


ASSUMPTIONS = (
    "sizes of tables are the published ones, or means of the corpus times its questions; tokens "
    f"per pair: {cost_model.MEAN_PAIR_TOKENS}, per passage of HotpotQA: "
    f"{cost_model.PASSAGE_TOKENS}",
    "ASNQ has the 20.4M pairs that TANDA counts; the two halves of dev are equally large",
    "no run stops early; this is an upper bound for recipes with early stopping",
    f"a device gets at least {cost_model.MIN_PAIRS_PER_DEVICE} pairs of a step, or "
    f"{cost_model.MIN_PAIRS_PER_ACTOR:,} pairs to score; several devices reach "
    f"{cost_model.SCALING_EFFICIENCY:.0%} of the sum of their rates",
    "an update takes at least "
    f"{1e3 * DeviceRates.layer_launch_s:g} ms for each layer, on a GPU whose rates were measured",
    f"training workers and scoring pools start in {cost_model.START_HOURS * 3_600:.0f} s",
    f"a state to resume from is copied every {cost_model.RESUME_EVERY_HOURS * 60:.0f} minutes, and "
    f"the weights after {cost_model.IMPROVING_SHARE:.0%} of the validations, at "
    f"{DeviceRates().write_bytes / 1e9:g} GB/s",
    "the optimizer step of large batches, loading, waiting for data, and stages on CPUs (tables, "
    "measures, reports) take no time",
    "side by side: the longest chain goes first, nothing passes the head of the queue, all "
    "training runs and scoring pools hold equally many devices, whose best number is shown; in "
    "sequence: each stage has all devices",
    "stages that recipes of a paper share run once",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the estimates."""
    args = parse_arguments(__doc__, argv, _add_flags)
    recipes = {path.stem: build_stages(path) for path in sorted(RECIPES.glob("*.yaml"))}
    _set_rates(args)
    results: dict[str, Any] = {
        "rates": {str(size): vars(rates) for size, rates in device_rates.items()},
        "papers": {},
        "recipes": {name: _summarize(each, count_runs(each)) for name, each in recipes.items()},
    }
    for paper, pattern in PAPERS.items():
        stages = [s for name, each in recipes.items() if Path(name).match(pattern) for s in each]
        results["papers"][paper] = _summarize(sorted_stages(stages), count_runs(stages))
    claims = [
        Claim(
            f"hidden size {size or 'of any other encoder'}",
            f"{rates.train_flops / 1e12:.3g} TFLOP/s training, {rates.score_flops / 1e12:.3g} "
            "scoring",
            None,
        )
        for size, rates in device_rates.items()
    ]
    legend = "hours on n devices in sequence, side by side (devices of each run or pool)"
    for group in ("papers", "recipes"):
        claims.append(Claim(f"{group}, hours of one device", legend, None))
        for name, summary in results[group].items():
            claims.append(_format_summary(name, summary))
    sys.stdout.write("".join(f"- {assumption}\n" for assumption in ASSUMPTIONS))
    write_report("plan", args, claims, results)


def _summarize(stages: Sequence[Stage], num_listed: int) -> dict[str, Any]:
    costs = {stage: stage_cost(stage) for stage in stages}

    def total(kind: Any) -> float:
        return sum(cost.hours or 0.0 for stage, cost in costs.items() if isinstance(stage, kind))

    return {
        "runs": count_runs(stages),
        "runs listed": num_listed,
        "stages of unknown size": sum(cost.hours is None for cost in costs.values()),
        "training": total(TrainedRanker),
        "scoring": total(TableScores),
        "hours": estimate_hours(costs),
    }


def _format_summary(name: str, summary: Mapping[str, Any]) -> Claim:
    num_unknown = summary["stages of unknown size"]
    runs = f"{summary['runs']} runs"
    if summary["runs listed"] != summary["runs"]:
        runs += f" (listed {summary['runs listed']} times)"
    hours = "; ".join(
        f"{n}: {of['in sequence']:,.1f}, {of['side by side']:,.1f} ({of['devices of a gang']})"
        for n, of in summary["hours"].items()
    )
    return Claim(
        f"{name}: {runs}, {summary['training']:,.1f} h training, {summary['scoring']:,.1f} h "
        "scoring" + (f", {num_unknown} stages of unknown size" if num_unknown else ""),
        hours,
        None,
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help="device to measure, such as cuda or cpu; by default that of the cost model"
    )
    parser.add_argument("--teraflops", type=float, help="assume this rate instead of measuring")


def _set_rates(args: argparse.Namespace) -> None:
    """Sets the rates of the cost model to those of the command line, or to measured ones."""
    if not args.teraflops and not args.device:
        return
    device_rates.clear()
    if args.teraflops:
        rate = args.teraflops * 1e12
        device_rates[None] = DeviceRates(rate, rate, layer_launch_s=0.0)
        return
    import torch

    device = torch.device(args.device)
    for shape in cost_model.ENCODER_SHAPES.values():
        if shape.hidden_size not in device_rates:
            device_rates[shape.hidden_size] = measure_rates(
                shape, device, 0.2 if args.small else 3.0
            )
    device_rates[None] = device_rates[EncoderShape().hidden_size]


if __name__ == "__main__":
    main()
