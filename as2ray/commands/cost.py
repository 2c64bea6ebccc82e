"""`as2ray cost`: what dropping candidates saves."""

from typing import Any

from as2ray.commands.shown import console, numbers_of, ratios_of, rows_of, table_of
from as2ray.errors import RecipeError
from as2ray.evaluation.cost import Shape, layer_cost, operation_cost
from as2ray.models.staged import check_exits


def cost(
    exits: str = "4,6,8,10,12",
    drop: str | None = None,
    candidates: int = 128,
    tokens: int = 64,
    model: str | None = None,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "test",
    source: str | None = None,
    options: dict[str, Any] = {},  # noqa: B006
    repeats: int = 3,
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
    shown = table_of("", "cascade", "sequential ranker")
    if model is None:
        if table or corpus or min(candidates, tokens) < 1:
            raise RecipeError(
                f"table={table}, corpus={corpus}, candidates={candidates}, tokens={tokens}, and "
                "no model",
                expected="a model with a table, or candidates and tokens above 0 alone",
                mend="name a model, or correct the numbers",
            )
        layers, given = numbers_of(exits, int), ratios_of(drop)
        check_exits(layers, layers[-1])
        ratios = 0.3 if given is None else given
        shape = Shape(layers=layers[-1])
        paper = [layer_cost(layers, ratios, sequential=s) for s in (False, True)]
        counted = [
            operation_cost(shape, layers, ratios, candidates, tokens, s) for s in (False, True)
        ]
        shown.add_row("layers (the paper's formula)", *map(_saved, paper))
        shown.add_row(f"operations, {candidates} x {tokens} tokens", *map(_saved, counted))
    else:
        from as2ray.checkpoint import load
        from as2ray.savings import savings

        rows = rows_of(table, corpus, split, source, options)
        found = savings(load(model), rows, ratios_of(drop), repeats)
        shown = table_of("", "drop " + ", ".join(f"{ratio:g}" for ratio in found.drop))
        shown.add_row("layers (the paper's formula)", _saved(found.layers))
        shown.add_row(f"operations over {rows.num_rows:,} pairs", _saved(found.operations))
        shown.add_row("time, nothing dropped = 1", f"{_saved(1 / found.time.median)} {found.time}")
    console().print(shown)


def _saved(part: float) -> str:
    return f"{100 * (part - 1):+.1f} %"
