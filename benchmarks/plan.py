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

from as2ray import corpora
from as2ray.corpora.asnq import GRADES
from as2ray.evaluation.cost import Shape
from as2ray.models.attention import Layout
from as2ray.models.encoder import Encoder
from benchmarks.report import Claim, arguments, finish
from pipelines import cascade, distill, transfer_adapt, two_in_one
from pipelines.few_shot import Protocol
from pipelines.recipe import Data, Recipe, Step, read_recipe

RECIPES = Path("pipelines/recipes")
PAPERS: dict[str, tuple[type[Recipe], tuple[str, ...]]] = {
    "TANDA": (transfer_adapt.Recipe, ("tanda_table*", "tanda_figure*")),
    "Cascade Transformer": (cascade.Recipe, ("cascade_table*",)),
    "CERBERUS": (distill.Recipe, ("cerberus_table*",)),
    "Two-in-One": (two_in_one.Recipe, ("two_in_one_table*",)),
}
"""Of each paper its recipes. Pseudo-labels and transfer has none at full size: `PSEUDO_LABELS`."""

SHAPES = {
    "bert-base-uncased": Shape(),
    "roberta-base": Shape(),
    "google/electra-base-discriminator": Shape(),
    "albert/albert-base-v2": Shape(embedding=128),
    "bert-large-uncased": Shape(1_024, 4_096, 1_024, 24),
    "roberta-large": Shape(1_024, 4_096, 1_024, 24),
    "roberta-large-mnli": Shape(1_024, 4_096, 1_024, 24),
    "google/electra-large-discriminator": Shape(1_024, 4_096, 1_024, 24),
    "albert/albert-xxlarge-v2": Shape(4_096, 16_384, 128, 12),
}
"""Sizes of the encoders that the recipes name; no hub is asked."""

TOKENS = {"asnq": 37, "wikiqa": 39, "trecqa": 46, "hotpotqa": 45, "qnli": 50}
"""Mean tokens of a pair: of ASNQ's questions with SQuAD's sentences, of the corpora, of samples."""

PASSAGE_TOKENS = 150
"""Of a question with a passage of HotpotQA."""

QNLI = 104_743
"""Pairs of QNLI's train split."""

HOTPOTQA = {"train": 90_447, "dev": 7_405}
"""Questions; ten passages and some 41 sentences each."""

PSEUDO_LABELS = {
    "Yahoo! Answers": (100_000, 78),
    "MS MARCO doc": (357_000, 465),
    "MS MARCO pass": (788_700, 95),
    "DPR NQ": (53_900, 160),
    "DPR SQuAD": (73_700, 160),
}
"""Training queries (the paper's Table 2) and tokens of a pair: documents are cut at 445."""

SAMPLES, STARTS = 3, 6
"""Draws of each few-shot size, and what each is trained from."""

Rates = dict[Shape, dict[bool, float]]
"""Operations a second by encoder, and by whether it trains."""

DEVICES = (1, 8, 64)
PAIRS_EACH = 8
"""A device gets no fewer pairs of a step: below, more devices do not make it faster."""
EFFICIENCY = 0.9
"""Part of the sum of their rates that several devices reach."""


@dataclass(frozen=True)
class Work:
    """Something a device does."""

    shape: Shape
    trains: bool
    operations: float
    """Floating-point operations in all."""
    batch: float
    """Pairs of a step, over which devices are spread; scoring has no such bound."""

    def seconds(self, rate: float, devices: int) -> float:
        """How long it takes on devices that do `rate` operations a second each."""
        used = max(1.0, min(devices, self.batch / PAIRS_EACH))
        return self.operations / (rate * used * (EFFICIENCY if used > 1 else 1.0))


def pairs(data: Data, passages: bool) -> float:
    """Pairs, or passages, of a table, by the published sizes."""
    if data.corpus == "hotpotqa":
        questions = HOTPOTQA["train" if data.split == "train" else "dev"]
        # Training takes as many irrelevant passages as relevant ones.
        return questions * (41.0 if not passages else 4.0 if data.split == "train" else 10.0)
    if data.corpus == "asnq":
        kept = {4, *data.options.get("negatives", (1, 2, 3))}
        grades = GRADES["train" if data.split == "train" else "dev-all"]
        rows = sum(n for grade, n in enumerate(grades, 1) if grade in kept)
        return rows / (2.0 if data.split in ("dev", "test") else 1.0)
    if data.corpus == "qnli":
        return float(QNLI)
    found = [
        p.counts.pairs
        for p in corpora.get(data.corpus).published
        if (p.split, p.filter) == (data.split, data.filter)
        and all(data.options.get(name, value) == value for name, value in p.options.items())
    ]
    if not found:
        sys.exit(f"no published size of {data.corpus} {data.split} {data.filter} {data.options}")
    return float(found[0])


def works(recipe: Recipe) -> Iterator[Work]:
    """All that a recipe's steps train, validate and, for their students, score."""
    for name, step in recipe.steps.items():
        seeds = len(recipe.seeds_of(name))
        for work in _of_step(recipe, step):
            yield replace(work, operations=seeds * work.operations)


def _of_step(recipe: Recipe, step: Step) -> Iterator[Work]:
    shape, training = _shape(recipe, step), step.training
    passages = not isinstance(step.objective, str)
    passages &= any(recipe.tables[table].corpus == "hotpotqa" for table in step.train)
    sizes = {n: pairs(recipe.tables[n], passages) for n in step.train}
    total = sum(sizes.values())
    tokens = sum(_tokens(recipe.tables[n], passages) * size for n, size in sizes.items()) / total
    batch = (training.batch_tokens or training.batch * tokens) / tokens
    layers = _layers(step, recipe, shape)
    each = _operations(shape, tokens)
    # Forward, and twice as much backward; what is not kept is computed again.
    passes = 4.0 if training.gradient_checkpointing else 3.0
    yield Work(shape, True, total * training.epochs * passes * layers * each, batch)
    dev = pairs(recipe.tables[step.dev or recipe.dev], passages)
    checks = training.epochs
    if training.validate_every:
        checks = math.ceil(total * training.epochs / batch / training.validate_every)
    yield Work(shape, False, checks * dev * layers * each, math.inf)
    for teacher in step.teachers:
        taught = _shape(recipe, recipe.steps[teacher])
        cost = total * taught.layers * _operations(taught, tokens)
        yield Work(taught, False, cost, math.inf)


def _operations(shape: Shape, tokens: float) -> float:
    """Of one layer over one pair."""
    return float(shape.layer(np.array([tokens]))[0])


def _tokens(data: Data, passages: bool) -> float:
    return float(PASSAGE_TOKENS if passages else TOKENS[data.corpus])


def _shape(recipe: Recipe, step: Step) -> Shape:
    while step.model is None and step.start is not None:
        step = recipe.steps[step.start]
    name = step.model or recipe.model.path
    if name not in SHAPES:
        sys.exit(f"no sizes of {name!r}; describe it in benchmarks.plan.SHAPES")
    return SHAPES[name]


def _layers(step: Step, recipe: Recipe, shape: Shape) -> float:
    """Layers that a pair goes through in training, on average."""
    first = step
    while first.exits is None and first.layers is None and first.start is not None:
        first = recipe.steps[first.start]
    exits = first.exits or recipe.model.exits
    if first.heads and exits:
        return exits[-1] + first.heads * (shape.layers - exits[-1])
    if exits:
        return float(np.mean(exits))  # one exit a step, drawn uniformly
    return float(first.layers or shape.layers)


def pseudo_labels() -> Iterator[Work]:
    """Mokrii et al.: every source and BM25's labels, and the few-shot curves from each start."""
    base, epochs = SHAPES["bert-base-uncased"], Protocol().epochs_of
    for queries, tokens in PSEUDO_LABELS.values():
        each = 3.0 * base.layers * _operations(base, tokens) * 2.0  # an answer and another
        # BM25's labels; all annotated queries from each start; samples of 32, 64, ... of them.
        full = (1 + STARTS) * queries * epochs(queries)
        sizes = [32 << n for n in range(int(math.log2(queries / 32)) + 1)]
        few = SAMPLES * STARTS * sum(size * epochs(size) for size in sizes)
        yield Work(base, True, (full + few) * each, 16)
        tested = 1_500 * 100 * STARTS * (len(sizes) * SAMPLES + 2)
        yield Work(base, False, tested * base.layers * _operations(base, tokens), math.inf)


def measured(shape: Shape, device: torch.device, seconds: float) -> dict[bool, float]:
    """Operations a second of one layer, by whether it trains; bf16, 40 tokens a pair."""
    config = BertConfig(
        vocab_size=8,
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=shape.hidden // 64,
        intermediate_size=shape.intermediate,
    )
    model = BertModel(config, add_pooling_layer=False).to(device)
    encoder = Encoder(model)
    lengths = np.full(1_024 if device.type == "cuda" else 24, 40)
    hidden = torch.randn(int(lengths.sum()), shape.hidden, device=device, requires_grad=True)
    layout = Layout.of(lengths, device)
    once = float(shape.layer(lengths).sum())

    def step(trains: bool) -> float:
        began = time.perf_counter()
        with torch.set_grad_enabled(trains), torch.autocast(device.type, torch.bfloat16):
            states = encoder.run(hidden, layout)
            if trains:
                states.sum().backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    found = {}
    for trains in (True, False):
        model.train(trains)
        taken = [step(trains)]
        until = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < until:
            taken.append(step(trains))
        found[trains] = (3.0 if trains else 1.0) * once / float(np.median(taken[1:]))
    return found


ASSUMPTIONS = (
    "ASNQ as TANDA counts it (20.4M pairs); its halves of dev equal",
    f"mean tokens of a pair: {TOKENS}, of a passage of HotpotQA {PASSAGE_TOKENS}",
    "no run stops early: an upper bound where a recipe has patience",
    f"a device gets {PAIRS_EACH} pairs of a step or more; several reach {EFFICIENCY:.0%} together",
    "the optimiser's step, loading, and waiting for data cost nothing; CPUs tokenise in time",
    "steps run one after the other, as the pipelines run them; seeds could run beside each other",
    f"pseudo-labels: 32, 64, ... queries, {SAMPLES} samples x {STARTS} starts, then all of them; "
    "1,500 test queries each",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan."""
    args = arguments(__doc__, argv, _more)
    chosen: dict[str, list[Work]] = {}
    for paper, (kind, names) in PAPERS.items():
        paths = sorted(p for name in names for p in RECIPES.glob(f"{name}.yaml"))
        read = [read_recipe(kind, ["--config", str(p), "--output", "-"])[0] for p in paths]
        chosen[paper] = [work for recipe in read for work in works(recipe)]
    chosen["Pseudo-labels and transfer"] = list(pseudo_labels())
    rates = _rates({work.shape for listed in chosen.values() for work in listed}, args)
    results = {paper: _costs(listed, rates) for paper, listed in chosen.items()}
    claims = [Claim(f"{args.device}: {size}", told, None) for size, told in _told(rates).items()]
    for paper, cost in results.items():
        hours = [f"{h:,.1f} h on {n} ({n * h:,.0f})" for n, h in cost["hours"].items()]
        claims.append(Claim(f"{paper}: hours on n GPUs (GPU-hours)", ", ".join(hours), None))
    sys.stdout.write("".join(f"- {assumption}\n" for assumption in ASSUMPTIONS))
    finish("plan", args, claims, results)


def _costs(listed: Sequence[Work], rates: Rates) -> dict[str, Any]:
    """Operations of a paper, and hours by number of devices."""
    hours = {
        n: sum(work.seconds(rates[work.shape][work.trains], n) for work in listed) / 3_600
        for n in DEVICES
    }
    return {"operations": sum(work.operations for work in listed), "hours": hours}


def _more(parser: argparse.ArgumentParser) -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--teraflops", type=float, help="take this rate, and measure nothing")


def _rates(shapes: set[Shape], args: argparse.Namespace) -> Rates:
    if args.teraflops:
        return {shape: dict.fromkeys((True, False), args.teraflops * 1e12) for shape in shapes}
    layer = {replace(shape, layers=1, embedding=shape.hidden) for shape in shapes}
    seconds = 0.2 if args.small else 3.0
    found = {one: measured(one, args.device, seconds) for one in layer}
    return {shape: found[replace(shape, layers=1, embedding=shape.hidden)] for shape in shapes}


def _told(rates: Rates) -> dict[str, str]:
    """Rates by size of encoder."""
    return {
        f"hidden size {shape.hidden}": f"{found[True] / 1e12:.3g} TFLOP/s training, "
        f"{found[False] / 1e12:.3g} scoring"
        for shape, found in sorted(rates.items(), key=lambda item: item[0].hidden)
    }


if __name__ == "__main__":
    main()
