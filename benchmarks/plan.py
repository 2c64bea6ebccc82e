"""What a full reproduction of each paper takes: hours and GPU-hours on 1, 8 and 64 GPUs.

    python -m benchmarks.plan                 # measures this machine's device first
    python -m benchmarks.plan --teraflops 200 # plans for another

Knows the recipes and the published sizes of the corpora, neither of which need be here. Must not
know Ray. Of each recipe's steps it counts the floating-point operations; how many of them a device
does in a second it measures, for each size of encoder on one of its layers, training and scoring.
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
from pipelines import cascade, distill, transfer_adapt, two_in_one
from pipelines.few_shot import Protocol
from pipelines.recipe import Recipe, Step, TableSpec, read_recipe

RECIPE_FOLDER = Path("pipelines/recipes")
PAPER_RECIPES: dict[str, tuple[type[Recipe], tuple[str, ...]]] = {
    "TANDA": (transfer_adapt.Recipe, ("tanda_table*", "tanda_figure*")),
    "Cascade Transformer": (cascade.Recipe, ("cascade_table*",)),
    "CERBERUS": (distill.Recipe, ("cerberus_table*",)),
    "Two-in-One": (two_in_one.Recipe, ("two_in_one_table*",)),
}
"""Of each paper its recipes. Pseudo-labels and transfer has none at full size: `PSEUDO_LABELS`."""

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
"""Sizes of the encoders that the recipes name; no hub is asked."""

MEAN_PAIR_TOKENS = {"asnq": 37, "wikiqa": 39, "trecqa": 46, "hotpotqa": 45, "qnli": 50}
"""Mean tokens of a pair: of ASNQ's questions with SQuAD's sentences, of the corpora, of samples."""

MEAN_PASSAGE_TOKENS = 150
"""Of a question with a passage of HotpotQA."""

QNLI_PAIRS = 104_743
"""Pairs of QNLI's train split."""

HOTPOTQA_QUESTIONS = {"train": 90_447, "dev": 7_405}
"""Questions; ten passages and some 41 sentences each."""

PSEUDO_LABEL_CORPORA = {
    "Yahoo! Answers": (100_000, 78),
    "MS MARCO doc": (357_000, 465),
    "MS MARCO pass": (788_700, 95),
    "DPR NQ": (53_900, 160),
    "DPR SQuAD": (73_700, 160),
}
"""Training queries (the paper's Table 2) and tokens of a pair: documents are cut at 445."""

NUM_SAMPLES, NUM_STARTS = 3, 6
"""Draws of each few-shot size, and what each is trained from."""

DeviceRates = dict[EncoderShape, dict[bool, float]]
"""Operations a second by encoder, and by whether it trains."""

DEVICE_COUNTS = (1, 8, 64)
MIN_PAIRS_PER_DEVICE = 8
"""A device gets no fewer pairs of a step: below, more devices do not make it faster."""
SCALING_EFFICIENCY = 0.9
"""Part of the sum of their rates that several devices reach."""


@dataclass(frozen=True)
class Computation:
    """Something a device does."""

    shape: EncoderShape
    is_training: bool
    flops: float
    """Floating-point operations in all."""
    batch_size: float
    """Pairs of a step, over which devices are spread; scoring has no such bound."""

    def estimate_duration_s(self, flops_per_second: float, num_devices: int) -> float:
        """How long it takes on devices that do `rate` operations a second each."""
        used = max(1.0, min(num_devices, self.batch_size / MIN_PAIRS_PER_DEVICE))
        return self.flops / (flops_per_second * used * (SCALING_EFFICIENCY if used > 1 else 1.0))


def count_pairs(table_spec: TableSpec, has_passages: bool) -> float:
    """Pairs, or passages, of a table, by the published sizes."""
    if table_spec.corpus == "hotpotqa":
        questions = HOTPOTQA_QUESTIONS["train" if table_spec.split == "train" else "dev"]
        # Training takes as many irrelevant passages as relevant ones.
        return questions * (
            41.0 if not has_passages else 4.0 if table_spec.split == "train" else 10.0
        )
    if table_spec.corpus == "asnq":
        kept = {4, *table_spec.corpus_options.get("negatives", (1, 2, 3))}
        grades = GRADE_COUNTS["train" if table_spec.split == "train" else "dev-all"]
        rows = sum(n for grade, n in enumerate(grades, 1) if grade in kept)
        return rows / (2.0 if table_spec.split in ("dev", "test") else 1.0)
    if table_spec.corpus == "qnli":
        return float(QNLI_PAIRS)
    found = [
        p.counts.num_pairs
        for p in get_corpus(table_spec.corpus).published_counts
        if (p.split, p.question_filter) == (table_spec.split, table_spec.question_filter)
        and all(
            table_spec.corpus_options.get(name, value) == value for name, value in p.options.items()
        )
    ]
    if not found:
        sys.exit(
            f"no published size of {table_spec.corpus} {table_spec.split} {table_spec.question_filter} {table_spec.corpus_options}"
        )
    return float(found[0])


def iter_recipe_computations(recipe: Recipe) -> Iterator[Computation]:
    """All that a recipe's steps train, validate and, for their students, score."""
    for name, step in recipe.runs.items():
        seeds = len(recipe.seeds_of(name))
        for work in _iter_run_computations(recipe, step):
            yield replace(work, operations=seeds * work.flops)


def _iter_run_computations(recipe: Recipe, run: Step) -> Iterator[Computation]:
    shape, training = _get_encoder_shape(recipe, run), run.training
    passages = not isinstance(run.loss, str)
    passages &= any(recipe.tables[table].corpus == "hotpotqa" for table in run.train)
    sizes = {n: count_pairs(recipe.tables[n], passages) for n in run.train}
    total = sum(sizes.values())
    tokens = (
        sum(_get_mean_tokens(recipe.tables[n], passages) * size for n, size in sizes.items())
        / total
    )
    batch = (training.global_batch_tokens or training.global_batch_size * tokens) / tokens
    layers = _count_mean_layers(run, recipe, shape)
    each = _count_layer_flops(shape, tokens)
    # Forward, and twice as much backward; what is not kept is computed again.
    passes = 4.0 if training.gradient_checkpointing else 3.0
    yield Computation(shape, True, total * training.epochs * passes * layers * each, batch)
    dev = count_pairs(recipe.tables[run.dev or recipe.dev], passages)
    checks = training.epochs
    if training.eval_steps:
        checks = math.ceil(total * training.epochs / batch / training.eval_steps)
    yield Computation(shape, False, checks * dev * layers * each, math.inf)
    for teacher in run.teachers:
        taught = _get_encoder_shape(recipe, recipe.runs[teacher])
        cost = total * taught.num_layers * _count_layer_flops(taught, tokens)
        yield Computation(taught, False, cost, math.inf)


def _count_layer_flops(shape: EncoderShape, num_tokens: float) -> float:
    """Of one layer over one pair."""
    return float(shape.layer_flops(np.array([num_tokens]))[0])


def _get_mean_tokens(table_spec: TableSpec, has_passages: bool) -> float:
    return float(MEAN_PASSAGE_TOKENS if has_passages else MEAN_PAIR_TOKENS[table_spec.corpus])


def _get_encoder_shape(recipe: Recipe, run: Step) -> EncoderShape:
    while run.model is None and run.init_from is not None:
        run = recipe.runs[run.init_from]
    name = run.model or recipe.model.path
    if name not in ENCODER_SHAPES:
        sys.exit(f"no sizes of {name!r}; describe it in benchmarks.plan.SHAPES")
    return ENCODER_SHAPES[name]


def _count_mean_layers(run: Step, recipe: Recipe, shape: EncoderShape) -> float:
    """Layers that a pair goes through in training, on average."""
    first = run
    while first.exit_layers is None and first.num_layers is None and first.init_from is not None:
        first = recipe.runs[first.init_from]
    exits = first.exit_layers or recipe.model.exit_layers
    if first.num_ranking_heads and exits:
        return exits[-1] + first.num_ranking_heads * (shape.num_layers - exits[-1])
    if exits:
        return float(np.mean(exits))  # one exit a step, drawn uniformly
    return float(first.num_layers or shape.num_layers)


def iter_pseudo_label_computations() -> Iterator[Computation]:
    """Mokrii et al.: every source and BM25's labels, and the few-shot curves from each start."""
    base, epochs = ENCODER_SHAPES["bert-base-uncased"], Protocol().epochs_of
    for queries, tokens in PSEUDO_LABEL_CORPORA.values():
        each = (
            3.0 * base.num_layers * _count_layer_flops(base, tokens) * 2.0
        )  # an answer and another
        # BM25's labels; all annotated queries from each start; samples of 32, 64, ... of them.
        full = (1 + NUM_STARTS) * queries * epochs(queries)
        sizes = [32 << n for n in range(int(math.log2(queries / 32)) + 1)]
        few = NUM_SAMPLES * NUM_STARTS * sum(size * epochs(size) for size in sizes)
        yield Computation(base, True, (full + few) * each, 16)
        tested = 1_500 * 100 * NUM_STARTS * (len(sizes) * NUM_SAMPLES + 2)
        yield Computation(
            base, False, tested * base.num_layers * _count_layer_flops(base, tokens), math.inf
        )


def measure_rates(
    shape: EncoderShape, device: torch.device, duration_s: float
) -> dict[bool, float]:
    """Operations a second of one layer, by whether it trains; bf16, 40 tokens a pair."""
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
    once = float(shape.layer_flops(lengths).sum())

    def step(trains: bool) -> float:
        began = time.perf_counter()
        with torch.set_grad_enabled(trains), torch.autocast(device.type, torch.bfloat16):
            states = encoder.run_layers(hidden, layout)
            if trains:
                states.sum().backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    found = {}
    for trains in (True, False):
        model.train(trains)
        taken = [step(trains)]
        until = time.perf_counter() + duration_s
        while len(taken) < 3 or time.perf_counter() < until:
            taken.append(step(trains))
        found[trains] = (3.0 if trains else 1.0) * once / float(np.median(taken[1:]))
    return found


ASSUMPTIONS = (
    "ASNQ as TANDA counts it (20.4M pairs); its halves of dev equal",
    f"mean tokens of a pair: {MEAN_PAIR_TOKENS}, of a passage of HotpotQA {MEAN_PASSAGE_TOKENS}",
    "no run stops early: an upper bound where a recipe has patience",
    f"a device gets {MIN_PAIRS_PER_DEVICE} pairs of a step or more; several reach {SCALING_EFFICIENCY:.0%} together",
    "the optimiser's step, loading, and waiting for data cost nothing; CPUs tokenise in time",
    "steps run one after the other, as the pipelines run them; seeds could run beside each other",
    f"pseudo-labels: 32, 64, ... queries, {NUM_SAMPLES} samples x {NUM_STARTS} starts, then all of them; "
    "1,500 test queries each",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan."""
    args = parse_arguments(__doc__, argv, _add_flags)
    chosen: dict[str, list[Computation]] = {}
    for paper, (kind, names) in PAPER_RECIPES.items():
        paths = sorted(p for name in names for p in RECIPE_FOLDER.glob(f"{name}.yaml"))
        read = [read_recipe(kind, ["--config", str(p), "--output", "-"])[0] for p in paths]
        chosen[paper] = [work for recipe in read for work in iter_recipe_computations(recipe)]
    chosen["Pseudo-labels and transfer"] = list(iter_pseudo_label_computations())
    rates = _get_rates({work.shape for listed in chosen.values() for work in listed}, args)
    results = {paper: _compute_costs(listed, rates) for paper, listed in chosen.items()}
    claims = [
        Claim(f"{args.device}: {size}", told, None) for size, told in _format_rates(rates).items()
    ]
    for paper, cost in results.items():
        hours = [f"{h:,.1f} h on {n} ({n * h:,.0f})" for n, h in cost["hours"].items()]
        claims.append(Claim(f"{paper}: hours on n GPUs (GPU-hours)", ", ".join(hours), None))
    sys.stdout.write("".join(f"- {assumption}\n" for assumption in ASSUMPTIONS))
    write_report("plan", args, claims, results)


def _compute_costs(computations: Sequence[Computation], rates: DeviceRates) -> dict[str, Any]:
    """Operations of a paper, and hours by number of devices."""
    hours = {
        n: sum(
            work.estimate_duration_s(rates[work.shape][work.is_training], n)
            for work in computations
        )
        / 3_600
        for n in DEVICE_COUNTS
    }
    return {"operations": sum(work.flops for work in computations), "hours": hours}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--teraflops", type=float, help="take this rate, and measure nothing")


def _get_rates(shapes: set[EncoderShape], args: argparse.Namespace) -> DeviceRates:
    if args.teraflops:
        return {shape: dict.fromkeys((True, False), args.teraflops * 1e12) for shape in shapes}
    layer = {replace(shape, layers=1, embedding=shape.hidden_size) for shape in shapes}
    seconds = 0.2 if args.small else 3.0
    found = {one: measure_rates(one, args.device, seconds) for one in layer}
    return {shape: found[replace(shape, layers=1, embedding=shape.hidden_size)] for shape in shapes}


def _format_rates(rates: DeviceRates) -> dict[str, str]:
    """Rates by size of encoder."""
    return {
        f"hidden size {shape.hidden_size}": f"{found[True] / 1e12:.3g} TFLOP/s training, "
        f"{found[False] / 1e12:.3g} scoring"
        for shape, found in sorted(rates.items(), key=lambda item: item[0].hidden_size)
    }


if __name__ == "__main__":
    main()
