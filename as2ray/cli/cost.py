"""`as2ray cost`: what dropping candidates saves."""

from typing import Any

from as2ray.cascade.cost import EncoderShape, relative_flops, relative_layers
from as2ray.cli.console import (
    create_console,
    create_console_table,
    load_table,
    parse_drop_ratios,
    parse_numbers,
)
from as2ray.errors import ConfigError
from as2ray.models.multi_stage import check_exit_layers


def cost(
    exit_layers: str = "4,6,8,10,12",
    drop_ratio: str | None = None,
    num_candidates: int = 128,
    tokens_per_pair: int = 64,
    model: str | None = None,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "test",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    num_repeats: int = 3,
) -> None:
    """What dropping candidates saves: by the paper's formula, in operations, on the clock.

    Without a model RoBERTa-base's sizes count, and nothing is timed.

    Args:
        exits: Layers run before each partial classifier.
        drop: Drop ratio after each but the last: 0.3 for all, or 0.3,0.5,... for each; by
            default the model's own, or 0.3.
        candidates: Of a question, without a model.
        tokens: Of a question with a candidate, without a model.
        model: A cascade or a sequential ranker; its exits and sizes count, over a table's pairs.
        table: Folder of a prepared table.
        corpus: Name of a corpus in place of a table.
        split: Split of the corpus.
        source: Folder of the raw release, or `hub`.
        options: The corpus' own options.
        repeats: Passes with and without dropping, in turns, whose ratio is told.
    """
    shown = create_console_table("", "cascade", "sequential ranker")
    if model is None:
        if table or corpus or min(num_candidates, tokens_per_pair) < 1:
            raise ConfigError(
                f"table={table}, corpus={corpus}, candidates={num_candidates}, tokens={tokens_per_pair}, and "
                "no model"
                "; expected a model with a table, or candidates and tokens above 0 alone",
                fix="name a model, or correct the numbers",
            )
        layers, given = parse_numbers(exit_layers, int), parse_drop_ratios(drop_ratio)
        check_exit_layers(layers, layers[-1])
        ratios = 0.3 if given is None else given
        shape = EncoderShape(num_layers=layers[-1])
        paper = [relative_layers(layers, ratios, sequential=s) for s in (False, True)]
        counted = [
            relative_flops(shape, layers, ratios, num_candidates, tokens_per_pair, s)
            for s in (False, True)
        ]
        shown.add_row("layers (the paper's formula)", *map(_format_change, paper))
        shown.add_row(
            f"operations, {num_candidates} x {tokens_per_pair} tokens",
            *map(_format_change, counted),
        )
    else:
        from as2ray.checkpoints.loading import load
        from as2ray.profiling.savings import measure_savings

        rows = load_table(table, corpus, split, data_dir, corpus_options)
        found = measure_savings(load(model), rows, parse_drop_ratios(drop_ratio), num_repeats)
        shown = create_console_table(
            "", "drop " + ", ".join(f"{ratio:g}" for ratio in found.drop_ratios)
        )
        shown.add_row("layers (the paper's formula)", _format_change(found.relative_layers))
        shown.add_row(
            f"operations over {rows.num_rows:,} pairs", _format_change(found.relative_flops)
        )
        shown.add_row(
            "time, nothing dropped = 1",
            f"{_format_change(1 / found.speedup.median)} {found.speedup}",
        )
    create_console().print(shown)


def _format_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
