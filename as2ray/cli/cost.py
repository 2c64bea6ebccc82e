"""`as2ray cost`: shows what dropping candidates saves."""

from typing import Any

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from as2ray.cascade.cost import EncoderShape, batch_sizes, relative_flops, relative_layers
from as2ray.cascade.pruning import Rounding, expand_drop_ratios
from as2ray.cascade.ranker_shape import check_exit_layers
from as2ray.cli.console import (
    create_console,
    create_console_table,
    load_table,
    parse_drop_ratios,
    parse_numbers,
)
from as2ray.errors import ConfigError

ROBERTA_EXITS = "4,6,8,10,12"
"""Exits of RoBERTa-base in the Cascade Transformer's Table 3."""


def cost(  # noqa: PLR0913 - every argument is a flag
    *,
    exit_layers: str | None = None,
    drop_ratio: str | None = None,
    rounding: Rounding = "floor",
    num_candidates: PositiveInt = 128,
    tokens_per_pair: PositiveInt = 64,
    model: str | None = None,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "test",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    num_repeats: PositiveInt = 3,
    scores: str | None = None,
    margins: str | None = None,
    top_k: PositiveInt = 1,
    budget_ms: PositiveFloat | None = None,
    layer_us: PositiveFloat = 2.0,
    question_id: str | None = None,
    memory_batch: PositiveInt = 84,
) -> None:
    """Shows what dropping candidates saves: in layers, in operations, and in measured time.

    Without a model, the sizes are those of RoBERTa-base, and no time is measured. With stored
    scores of all exits (`--scores`), margins, drop ratios and a time budget are replayed: which
    share of the candidates left after each exit, what that saved, and what it lost.

    Args:
        exit_layers: Without a model or with `--scores`: number of layers below each partial
            classifier; by default those of the scores, or 4,6,8,10,12.
        drop_ratio: Drop ratio after each exit but the last: 0.3 for all, or 0.3,0.5,... for each.
            By default the model's own, or what its margins drop; 0.3 if there are neither.
        rounding: How a drop ratio is rounded, without a model: down as in the paper's text, or to
            the nearest number as in its example.
        num_candidates: Candidates of a question, without a model.
        tokens_per_pair: Tokens of a question with a candidate, without a model.
        model: A cascade or a sequential ranker, measured over the pairs of a table.
        table: Folder of a prepared table.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        num_repeats: Timed passes, alternating with and without dropping.
        scores: Folder of the scores of all exits over the table, as a stage of the experiment graph
            stores them; those of the model that are missing are stored there. Scores of another
            table or model are refused.
        margins: With `--scores`: margin after each exit but the last in log-odds, such as 4,2.5; by
            default those of the model.
        top_k: With `--margins`: the margin lies below so many best candidates.
        budget_ms: With `--scores`: milliseconds for a question.
        layer_us: With `--budget_ms`: microseconds that one layer takes for a token.
        question_id: With `--scores`: shows where each candidate of this question left.
        memory_batch: Without a model: pairs that fit into memory at once; a batch that shrinks may
            begin with more of them (section 4.3.2).
    """
    drop_ratios = parse_drop_ratios(drop_ratio)
    if scores is not None:
        from as2ray.cli.cost_replay import Ways, print_replay

        rows = load_table(table, corpus, split, data_dir, corpus_options)
        ways = Ways(
            None if exit_layers is None else parse_numbers(exit_layers, int),
            drop_ratios,
            None if margins is None else parse_numbers(margins, float),
            top_k,
            budget_ms,
            layer_us,
        )
        print_replay(scores, rows, model, ways, rounding, question_id)
        return
    replayed = {"margins": margins, "budget_ms": budget_ms, "question_id": question_id}
    if model is not None:
        replayed["exit_layers"] = exit_layers
    if given := {name: value for name, value in replayed.items() if value is not None}:
        raise ConfigError(
            f"{', '.join(f'{name}={value}' for name, value in given.items())} without scores: only "
            "stored scores of all exits are replayed",
            fix="name a folder, in which the model's are stored if it is new: --scores DIR",
        )
    exit_layers = exit_layers or ROBERTA_EXITS
    if model is None:
        if table or corpus:
            raise ConfigError(
                f"table={table}, corpus={corpus} and no model; a table needs a model",
                fix="name a model, or leave the table out",
            )
        layers = parse_numbers(exit_layers, int)
        check_exit_layers(layers, layers[-1])
        ratios = expand_drop_ratios(0.3 if drop_ratios is None else drop_ratios, len(layers))
        shape = EncoderShape(num_layers=layers[-1])
        layer_costs = [relative_layers(layers, ratios, sequential=s) for s in (False, True)]
        flop_costs = [
            relative_flops(shape, layers, ratios, num_candidates, tokens_per_pair, s, rounding)
            for s in (False, True)
        ]
        costs = create_console_table("", "cascade", "sequential ranker")
        costs.add_row("layers (the paper's formula)", *map(_format_change, layer_costs))
        costs.add_row(
            f"operations, {num_candidates} x {tokens_per_pair} tokens",
            *map(_format_change, flop_costs),
        )
        sizes = batch_sizes(num_candidates, ratios, rounding)
        mean_batch = float(np.average(sizes, weights=np.diff(layers, prepend=0)))
        fits, gain = mean_batch <= memory_batch, _format_change(num_candidates / memory_batch)
        largest = int(memory_batch * num_candidates / mean_batch)
        costs.add_row("mean batch of " + ", ".join(map(str, sizes)), f"{mean_batch:.1f}", "")
        costs.add_row(f"largest first batch where {memory_batch} fit", str(largest), "")
        costs.add_row(f"throughput of a first batch of {num_candidates}", gain if fits else "", "")
    else:
        from as2ray.checkpoints.loading import load
        from as2ray.profiling.savings import measure_savings

        rows = load_table(table, corpus, split, data_dir, corpus_options)
        ranker: Any = load(model)
        savings = measure_savings(ranker, rows, drop_ratios, num_repeats)
        costs = create_console_table("", "drop " + ", ".join(f"{r:g}" for r in savings.drop_ratios))
        costs.add_row("layers (the paper's formula)", _format_change(savings.relative_layers))
        costs.add_row(
            f"operations over {rows.num_rows:,} pairs", _format_change(savings.relative_flops)
        )
        costs.add_row(
            "time, nothing dropped = 1",
            f"{_format_change(1 / savings.speedup.median)} {savings.speedup}",
        )
    create_console().print(costs)
    if model is not None and drop_ratios is None and ranker.margins is not None:
        create_console().print(str(ranker.margins.bound or "margins without a bound"))


def _format_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
