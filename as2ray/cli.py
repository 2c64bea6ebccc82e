"""The command line: `as2ray corpora | rank | evaluate | cost`. Pipelines have their own.

Knows jsonargparse and how results look on a terminal. Must hold no logic of its own.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from jsonargparse import CLI
from rich.console import Console
from rich.table import Table

from as2ray import corpora
from as2ray.errors import As2rayError, EvaluationError, RecipeError
from as2ray.evaluation.cost import Shape, layer_cost, operation_cost
from as2ray.evaluation.measures import Evaluation, evaluate
from as2ray.evaluation.runs import evaluate_run
from as2ray.evaluation.significance import compare
from as2ray.evaluation.trec import read_qrels, read_run, scores_of_run, write_run
from as2ray.filters import Filter
from as2ray.models.ranker import Precision
from as2ray.retrieval.bm25 import BM25
from as2ray.text.stream import PairFiles

N = TypeVar("N", int, float)


class Corpora:
    """Raw releases in, candidates tables out."""

    def list(self) -> None:
        """The corpora that as2ray reads."""
        shown = _table("corpus", "splits", "options", "hub", "licence")
        for corpus in corpora.list_corpora():
            options = ", ".join(f"{k}={v}" for k, v in corpus.options.items())
            splits = ", ".join(corpus.splits)
            shown.add_row(corpus.name, splits, options, corpus.hub or "", corpus.licence)
        _console().print(shown)

    def verify(self, root: str | None = None) -> None:
        """Compares everything found under the data root with its published counts.

        Args:
            root: By default AS2RAY_DATA, or ../shared/data.
        """
        checks = corpora.verify_all(Path(root) if root else None)
        shown = _table("corpus", "split", "what", "published", "found", "")
        for check in checks:
            state = "ok" if check.ok else check.problem or "DIFFERS"
            shown.add_row(
                check.corpus, check.split, check.what, str(check.published), str(check.found), state
            )
        _console().print(shown)
        wrong = sum(not check.ok for check in checks)
        _console().print(f"{len(checks) - wrong} of {len(checks)} counts as published")
        if wrong or not checks:
            sys.exit(1)

    def prepare(
        self,
        corpus: str,
        output: str,
        splits: dict[str, Filter],
        source: str | None = None,
        verify: bool = True,
        options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Writes splits of a corpus as Parquet files with a manifest.

        Args:
            corpus: Its name.
            output: A new folder.
            splits: For each split the questions to keep, such as {"train": "raw"}.
            source: Folder of the raw release, or `hub`; by default its place in the data root.
            verify: Whether published counts must be met.
            options: The corpus' own options.
        """
        manifest = corpora.prepare(corpus, source, output, splits, verify, **options)
        _console().print_json(json.dumps(manifest))

    def stats(
        self,
        corpus: str,
        split: str,
        filter: Filter = "raw",
        source: str | None = None,
        options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Sizes, lengths and oddities of a split.

        Args:
            corpus: Its name.
            split: One of its splits.
            filter: Questions to keep.
            source: Folder of the raw release, or `hub`; by default its place in the data root.
            options: The corpus' own options.
        """
        table = corpora.read(corpus, split, source, filter, **options)
        _console().print_json(json.dumps(asdict(corpora.stats(table))))


def rank(
    model: str,
    question: str,
    candidates: str = "-",
    top_k: int | None = None,
    precision: Precision = "auto",
    drop: str | None = None,
    json_lines: bool = False,
) -> None:
    """Ranks sentences by how well they answer a question.

    Args:
        model: Checkpoint folder or hub id.
        question: The question.
        candidates: A file with one candidate a line; `-` reads standard input.
        top_k: How many to show.
        precision: Number format of the matrix products.
        drop: Other drop ratios than a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        json_lines: Print one JSON object a line.
    """
    from as2ray.checkpoint import load

    text = sys.stdin.read() if candidates == "-" else Path(candidates).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ranked = load(model, precision=precision).rank(question, lines, top_k, _ratios(drop))
    for place, found in enumerate(ranked, 1):
        if json_lines:
            sys.stdout.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")
        else:
            layer = "" if found.exit_layer is None else f"  layer {found.exit_layer:2d}"
            sys.stdout.write(f"{place:3d}  {found.score:.4f}{layer}  {found.text}\n")


def _ratios(drop: str | None) -> float | list[float] | None:
    """Drop ratios from `0.3` or `0.3,0.5`."""
    ratios = [] if drop is None else _numbers(drop, float)
    return ratios[0] if len(ratios) == 1 else ratios or None


def _numbers(text: str, kind: type[N]) -> list[N]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(
            f"{text!r}", expected="numbers with commas between them", mend="correct it"
        ) from error


def evaluate_(
    model: str | None = None,
    run: str | None = None,
    qrels: str | None = None,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "test",
    source: str | None = None,
    options: dict[str, Any] = {},  # noqa: B006
    filter: Filter = "clean",
    measures: list[str] = ["AP", "RR", "P@1", "nDCG@10"],  # noqa: B006
    baseline: str | None = None,
    drop: str | None = None,
    output: str | None = None,
) -> None:
    """Measures a ranker or a run.

    Args:
        model: Checkpoint folder or hub id, `bm25`, or `constant` (every candidate the same score).
        run: A TREC run in place of a model.
        qrels: TREC qrels; then no table is needed.
        table: Folder of a prepared table.
        corpus: Name of a corpus in place of a table.
        split: Split of the corpus.
        source: Folder of the raw release, or `hub`.
        options: The corpus' own options.
        filter: Questions that count.
        measures: Names of ir-measures.
        baseline: Another model or run to test against, paired by question.
        drop: Other drop ratios than a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        output: Write the run here, and measures by question beside it (`.json`).
    """
    if (model is None) == (run is None) or (qrels and not run):
        raise EvaluationError(
            f"model={model}, run={run}, qrels={qrels}",
            expected="either --model, or --run (with --qrels, --table or --corpus)",
            mend="give one of them",
        )
    if qrels is not None:
        found = evaluate_run(read_run(str(run)), read_qrels(qrels), measures)
        _show(found)
        if baseline:
            _compare(evaluate_run(read_run(baseline), read_qrels(qrels), measures), found)
        return
    rows = _rows(table, corpus, split, source, options)
    scores = _scores(str(model or run), rows, _ratios(drop))
    result = evaluate(rows, scores, measures, filter=filter)
    _show(result.per_question)
    _console().print(f"{result.counts} ({filter}), ties {result.ties}, table {result.fingerprint}")
    if output:
        _write(Path(output), rows, scores, result)
    if baseline:
        against = evaluate(rows, _scores(baseline, rows), measures, filter=filter)
        _compare(against.per_question, result.per_question)


def _rows(
    table: str | None,
    corpus: str | None,
    split: str,
    source: str | None,
    options: dict[str, Any],
) -> pa.Table:
    if (table is None) == (corpus is None):
        raise EvaluationError(
            f"table={table}, corpus={corpus}", expected="one of the two", mend="give one"
        )
    if table is not None:
        return PairFiles.find(table).table()
    return corpora.read(str(corpus), split, source, **options)


def _scores(system: str, rows: pa.Table, drop: float | list[float] | None = None) -> np.ndarray:
    """Scores of a model's name or a run's path for every row."""
    if system == "constant":
        return np.zeros(rows.num_rows)
    if system == "bm25":
        return BM25().scores_within(rows)
    if Path(system).is_file():
        return scores_of_run(read_run(system), rows)
    from as2ray.checkpoint import load

    return load(system).score_table(rows, drop).rank_by


def _show(per_question: pa.Table) -> None:
    shown = _table("measure", "mean", f"over {per_question.num_rows:,} questions")
    for name in per_question.column_names[1:]:
        values = per_question[name].to_numpy()
        shown.add_row(name, f"{values.mean():.4f}", f"std {values.std():.4f}")
    _console().print(shown)


def _compare(baseline: pa.Table, system: pa.Table) -> None:
    shown = _table("measure", "difference", "95% interval", "p (randomisation)", "p (t)")
    for name in system.column_names[1:]:
        test = compare(baseline, system, name)
        low, high = test.interval
        shown.add_row(
            name,
            f"{test.difference:+.4f}",
            f"[{low:+.4f}, {high:+.4f}]",
            f"{test.p_randomisation:.4f}",
            f"{test.p_t:.4f}",
        )
    _console().print(shown)


def _write(path: Path, rows: pa.Table, scores: np.ndarray, result: Evaluation) -> None:
    write_run(path, rows, scores)
    dump = {"measures": result.measures, "per_question": result.per_question.to_pylist()}
    path.with_suffix(".json").write_text(json.dumps(dump, indent=2) + "\n")


def _table(*columns: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    return shown


def _console() -> Console:
    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)


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
    shown = _table("", "cascade", "sequential ranker")
    if model is None:
        layers, ratios = _numbers(exits, int), _ratios(drop) or 0.3
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

        rows = _rows(table, corpus, split, source, options)
        found = savings(load(model), rows, _ratios(drop), repeats)
        shown = _table("", "drop " + ", ".join(f"{ratio:g}" for ratio in found.drop))
        shown.add_row("layers (the paper's formula)", _saved(found.layers))
        shown.add_row(f"operations over {rows.num_rows:,} pairs", _saved(found.operations))
        shown.add_row("time, nothing dropped = 1", f"{_saved(1 / found.time.median)} {found.time}")
    _console().print(shown)


def _saved(part: float) -> str:
    return f"{100 * (part - 1):+.1f} %"


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `as2ray`."""
    commands = {"corpora": Corpora, "rank": rank, "evaluate": evaluate_, "cost": cost}
    try:
        CLI(commands, args=arguments, as_positional=False)
    except As2rayError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
