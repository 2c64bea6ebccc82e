"""Estimates the hours and GPU-hours of a full reproduction of each paper on 1, 8 and 64 GPUs.

    python -m benchmarks.plan                 # measures this machine's device
    python -m benchmarks.plan --teraflops 200 # assumes another device

It counts the floating-point operations of the runs of each recipe from the published sizes of the
corpora, which need not be on this machine. The FLOP/s of a device are measured on one layer of each
encoder size, for training and for scoring.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from as2ray.cascade.cost import EncoderShape
from as2ray.corpora.asnq import GRADE_COUNTS
from as2ray.corpora.registry import get_corpus
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.encoder.packed_attention import SequenceLayout
from benchmarks.report import Claim, parse_arguments, write_report
from pipelines import cascade, distill, two_in_one
from pipelines.few_shot import FewShotConfig
from pipelines.recipe import Recipe, RunSpec, TableSpec, read_recipe

RECIPE_FOLDER = Path("pipelines/recipes")
PAPER_RECIPES: dict[str, tuple[type[Recipe], tuple[str, ...]]] = {
    "TANDA": (Recipe, ("tanda_table*", "tanda_figure*")),
    "Cascade Transformer": (cascade.Recipe, ("cascade_table*",)),
    "CERBERUS": (distill.Recipe, ("cerberus_table*",)),
    "Two-in-One": (two_in_one.Recipe, ("two_in_one_table*",)),
}
"""Recipes of each paper. "Pseudo-labels and transfer" has no recipe of full size; see
`PSEUDO_LABEL_CORPORA`."""

ENCODER_SHAPES = {
    "bert-base-uncased": EncoderShape(),
    "roberta-base": EncoderShape(),
    "google/electra-base-discriminator": EncoderShape(),
    "albert/albert-base-v2": EncoderShape(embedding_size=128),
    "bert-large-uncased": EncoderShape(1_024, 4_096, 1_024, 24),
    "roberta-large": EncoderShape(1_024, 4_096, 1_024, 24),
    "roberta-large-mnli": EncoderShape(1_024, 4_096, 1_024, 24),
    "google/electra-large-discriminator": EncoderShape(1_024, 4_096, 1_024, 24),
    "albert/albert-xxlarge-v2": EncoderShape(4_096, 16_384, 128, 12),
}
"""Sizes of the encoders that the recipes name, so that no model hub is needed."""

MEAN_PAIR_TOKENS = {"asnq": 37, "wikiqa": 39, "trecqa": 46, "hotpotqa": 45, "qnli": 50}
"""Mean tokens per pair. For ASNQ they are of its questions with SQuAD's sentences."""

MEAN_PASSAGE_TOKENS = 150
"""Mean tokens of a question with a passage of HotpotQA."""

QNLI_PAIRS = 104_743
"""Pairs of QNLI's train split."""

HOTPOTQA_QUESTIONS = {"train": 90_447, "dev": 7_405}
"""Questions; each has ten passages with about 41 sentences."""

PSEUDO_LABEL_CORPORA = {
    "Yahoo! Answers": (100_000, 78),
    "MS MARCO doc": (357_000, 465),
    "MS MARCO pass": (788_700, 95),
    "DPR NQ": (53_900, 160),
    "DPR SQuAD": (73_700, 160),
}
"""Training queries (the paper's Table 2) and tokens per pair; documents are cut at 445 tokens."""

NUM_SAMPLES, NUM_STARTS = 3, 6
"""Samples of each few-shot size, and rankers from which each is trained."""

DeviceRates = dict[EncoderShape, dict[bool, float]]
"""FLOP/s by encoder, for training (True) and scoring (False)."""

DEVICE_COUNTS = (1, 8, 64)
MIN_PAIRS_PER_DEVICE = 8
"""Minimum number of pairs of a step per device; with fewer, more devices do not help."""
SCALING_EFFICIENCY = 0.9
"""Share of the sum of their rates that several devices reach."""


@dataclass(frozen=True)
class Computation:
    """An amount of training or scoring."""

    shape: EncoderShape
    is_training: bool
    flops: float
    """Total number of floating-point operations."""
    batch_size: float
    """Pairs per step, which bound the number of useful devices; infinite for scoring."""

    def estimate_duration_s(self, flops_per_second: float, num_devices: int) -> float:
        """Returns the seconds on devices that reach `flops_per_second` each."""
        num_used = max(1.0, min(num_devices, self.batch_size / MIN_PAIRS_PER_DEVICE))
        efficiency = SCALING_EFFICIENCY if num_used > 1 else 1.0
        return self.flops / (flops_per_second * num_used * efficiency)


def count_pairs(table_spec: TableSpec, has_passages: bool) -> float:
    """Returns the number of pairs, or of passages, of a table, by the published counts."""
    if table_spec.corpus == "hotpotqa":
        num_questions = HOTPOTQA_QUESTIONS["train" if table_spec.split == "train" else "dev"]
        if not has_passages:
            return num_questions * 41.0
        # Training uses as many irrelevant passages as relevant ones.
        return num_questions * (4.0 if table_spec.split == "train" else 10.0)
    if table_spec.corpus == "asnq":
        used_grades = {4, *table_spec.corpus_options.get("negative_grades", (1, 2, 3))}
        grades = GRADE_COUNTS["train" if table_spec.split == "train" else "dev-all"]
        num_rows = sum(n for grade, n in enumerate(grades, 1) if grade in used_grades)
        return num_rows / (2.0 if table_spec.split in ("dev", "test") else 1.0)
    if table_spec.corpus == "qnli":
        return float(QNLI_PAIRS)
    options = table_spec.corpus_options
    sizes = [
        published.counts.num_pairs
        for published in get_corpus(table_spec.corpus).published_counts
        if (published.split, published.question_filter)
        == (table_spec.split, table_spec.question_filter)
        and all(options.get(name, value) == value for name, value in published.options.items())
    ]
    if not sizes:
        sys.exit(f"no published size of {table_spec}")
    return float(sizes[0])


def iter_recipe_computations(recipe: Recipe) -> Iterator[Computation]:
    """Yields what the runs of a recipe train, evaluate and, for students, score."""
    for name, run in recipe.runs.items():
        num_seeds = len(recipe.seeds_of(name))
        for computation in _iter_run_computations(recipe, run):
            yield replace(computation, flops=num_seeds * computation.flops)


def _iter_run_computations(recipe: Recipe, run: RunSpec) -> Iterator[Computation]:
    shape, training = _get_encoder_shape(recipe, run), run.training
    has_passages = not isinstance(run.loss, str)
    has_passages &= any(recipe.tables[table].corpus == "hotpotqa" for table in run.train)
    sizes = {name: count_pairs(recipe.tables[name], has_passages) for name in run.train}
    num_pairs = sum(sizes.values())
    num_tokens = sum(
        _get_mean_tokens(recipe.tables[name], has_passages) * size for name, size in sizes.items()
    )
    mean_tokens = num_tokens / num_pairs
    batch_size = (
        training.global_batch_tokens or training.global_batch_size * mean_tokens
    ) / mean_tokens
    flops_per_pair = _count_mean_layers(run, recipe, shape) * _count_layer_flops(shape, mean_tokens)
    # The backward pass takes twice as much as the forward pass; checkpointing repeats the latter.
    num_passes = 4.0 if training.gradient_checkpointing else 3.0
    train_flops = num_pairs * training.epochs * num_passes * flops_per_pair
    yield Computation(shape, True, train_flops, batch_size)
    num_dev_pairs = count_pairs(recipe.tables[run.dev or recipe.dev], has_passages)
    num_evals = training.epochs
    if training.eval_steps:
        num_evals = math.ceil(num_pairs * training.epochs / batch_size / training.eval_steps)
    yield Computation(shape, False, num_evals * num_dev_pairs * flops_per_pair, math.inf)
    for teacher in run.teachers:
        teacher_shape = _get_encoder_shape(recipe, recipe.runs[teacher])
        teacher_flops = teacher_shape.num_layers * _count_layer_flops(teacher_shape, mean_tokens)
        yield Computation(teacher_shape, False, num_pairs * teacher_flops, math.inf)


def _count_layer_flops(shape: EncoderShape, num_tokens: float) -> float:
    """Returns the FLOPs of one layer over one pair."""
    return float(shape.layer_flops(np.array([num_tokens]))[0])


def _get_mean_tokens(table_spec: TableSpec, has_passages: bool) -> float:
    return float(MEAN_PASSAGE_TOKENS if has_passages else MEAN_PAIR_TOKENS[table_spec.corpus])


def _get_encoder_shape(recipe: Recipe, run: RunSpec) -> EncoderShape:
    while run.model is None and run.init_from is not None:
        run = recipe.runs[run.init_from]
    name = run.model or recipe.model.path
    if name not in ENCODER_SHAPES:
        sys.exit(f"the size of {name!r} is unknown; add it to benchmarks.plan.ENCODER_SHAPES")
    return ENCODER_SHAPES[name]


def _count_mean_layers(run: RunSpec, recipe: Recipe, shape: EncoderShape) -> float:
    """Returns the mean number of layers that a pair passes in training."""
    initial_run = run
    while (
        initial_run.exit_layers is None
        and initial_run.num_layers is None
        and initial_run.init_from is not None
    ):
        initial_run = recipe.runs[initial_run.init_from]
    exits = initial_run.exit_layers or recipe.model.exit_layers
    if initial_run.num_ranking_heads and exits:
        return exits[-1] + initial_run.num_ranking_heads * (shape.num_layers - exits[-1])
    if exits:
        return float(np.mean(exits))  # one exit per step, sampled uniformly
    return float(initial_run.num_layers or shape.num_layers)


def iter_pseudo_label_computations() -> Iterator[Computation]:
    """Yields what Mokrii et al. train: every source, BM25's labels, and the few-shot curves."""
    shape, epochs_of = ENCODER_SHAPES["bert-base-uncased"], FewShotConfig().epochs_of
    for num_queries, num_tokens in PSEUDO_LABEL_CORPORA.values():
        flops_per_pair = shape.num_layers * _count_layer_flops(shape, num_tokens)
        flops_per_query = 3.0 * 2.0 * flops_per_pair  # a positive and a negative candidate
        # BM25's labels; all annotated queries from each start; samples of 32, 64, ... of them.
        num_full = (1 + NUM_STARTS) * num_queries * epochs_of(num_queries)
        sizes = [32 << n for n in range(int(math.log2(num_queries / 32)) + 1)]
        num_few = NUM_SAMPLES * NUM_STARTS * sum(size * epochs_of(size) for size in sizes)
        yield Computation(shape, True, (num_full + num_few) * flops_per_query, 16)
        num_tested_pairs = 1_500 * 100 * NUM_STARTS * (len(sizes) * NUM_SAMPLES + 2)
        yield Computation(shape, False, num_tested_pairs * flops_per_pair, math.inf)


def measure_rates(
    shape: EncoderShape, device: torch.device, duration_s: float
) -> dict[bool, float]:
    """Measures the FLOP/s of one layer in bf16 for pairs of 40 tokens.

    Returns:
        The rates of training (True) and scoring (False).
    """
    config = BertConfig(
        vocab_size=8,
        hidden_size=shape.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=shape.hidden_size // 64,
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
        with torch.set_grad_enabled(is_training), torch.autocast(device.type, torch.bfloat16):
            states = encoder.run_layers(hidden, layout)
            if is_training:
                states.sum().backward()  # type: ignore[no-untyped-call]
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
    return rates


ASSUMPTIONS = (
    "ASNQ has the 20.4M pairs that TANDA counts; the two halves of dev are equally large",
    f"mean tokens per pair: {MEAN_PAIR_TOKENS}, per passage of HotpotQA: {MEAN_PASSAGE_TOKENS}",
    "no run stops early; this is an upper bound for recipes with early stopping",
    f"a device gets at least {MIN_PAIRS_PER_DEVICE} pairs of a step; several devices reach "
    f"{SCALING_EFFICIENCY:.0%} of the sum of their rates",
    "the optimizer step, loading, and waiting for data take no time",
    "runs are sequential, as in the pipelines; seeds could run in parallel",
    f"pseudo-labels: 32, 64, ... queries, {NUM_SAMPLES} samples x {NUM_STARTS} starts, then all "
    "queries; 1,500 test queries each",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the estimates."""
    args = parse_arguments(__doc__, argv, _add_flags)
    computations: dict[str, list[Computation]] = {}
    for paper, (recipe_type, patterns) in PAPER_RECIPES.items():
        paths = sorted(p for pattern in patterns for p in RECIPE_FOLDER.glob(f"{pattern}.yaml"))
        recipes = [
            read_recipe(recipe_type, ["--config", str(path), "--output", "-"])[0] for path in paths
        ]
        computations[paper] = [c for recipe in recipes for c in iter_recipe_computations(recipe)]
    computations["Pseudo-labels and transfer"] = list(iter_pseudo_label_computations())
    shapes = {c.shape for paper_computations in computations.values() for c in paper_computations}
    rates = _get_rates(shapes, args)
    results = {paper: _compute_costs(listed, rates) for paper, listed in computations.items()}
    claims = [
        Claim(f"{args.device}: {size}", rate, None) for size, rate in _format_rates(rates).items()
    ]
    for paper, costs in results.items():
        hours = [f"{h:,.1f} h on {n} ({n * h:,.0f})" for n, h in costs["hours"].items()]
        claims.append(Claim(f"{paper}: hours on n GPUs (GPU-hours)", ", ".join(hours), None))
    sys.stdout.write("".join(f"- {assumption}\n" for assumption in ASSUMPTIONS))
    write_report("plan", args, claims, results)


def _compute_costs(computations: Sequence[Computation], rates: DeviceRates) -> dict[str, Any]:
    """Returns the FLOPs of a paper, and the hours by number of devices."""
    hours = {
        n: sum(
            computation.estimate_duration_s(rates[computation.shape][computation.is_training], n)
            for computation in computations
        )
        / 3_600
        for n in DEVICE_COUNTS
    }
    return {"flops": sum(computation.flops for computation in computations), "hours": hours}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default_device))
    parser.add_argument("--teraflops", type=float, help="assume this rate instead of measuring")


def _get_rates(shapes: set[EncoderShape], args: argparse.Namespace) -> DeviceRates:
    if args.teraflops:
        return {shape: dict.fromkeys((True, False), args.teraflops * 1e12) for shape in shapes}
    layers = {
        shape: replace(shape, num_layers=1, embedding_size=shape.hidden_size) for shape in shapes
    }
    duration_s = 0.2 if args.small else 3.0
    rates = {layer: measure_rates(layer, args.device, duration_s) for layer in {*layers.values()}}
    return {shape: rates[layer] for shape, layer in layers.items()}


def _format_rates(rates: DeviceRates) -> dict[str, str]:
    """Returns the rates as texts, by encoder size."""
    return {
        f"hidden size {shape.hidden_size}": f"{shape_rates[True] / 1e12:.3g} TFLOP/s training, "
        f"{shape_rates[False] / 1e12:.3g} scoring"
        for shape, shape_rates in sorted(rates.items(), key=lambda item: item[0].hidden_size)
    }


if __name__ == "__main__":
    main()
