"""`as2ray evaluate`: measures of a ranker or a run, and tests against another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.commands.shown import console, ratios_of, rows_of, table_of
from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import Evaluation, Measure, as_measure, kept_of
from as2ray.evaluation.measures import evaluate as measured
from as2ray.evaluation.runs import evaluate_run
from as2ray.evaluation.significance import compare
from as2ray.evaluation.trec import read_qrels, read_run, scores_of_run, write_run
from as2ray.filters import Filter
from as2ray.retrieval.bm25 import BM25


def evaluate(
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
    wanted = _wanted(measures)
    if output:
        _check_output(Path(output))
    if qrels is not None:
        if table or corpus or drop or output:
            raise EvaluationError(
                f"qrels={qrels} with table={table}, corpus={corpus}, drop={drop}, output={output}",
                expected="a run and qrels alone: there is nothing to score or to write",
                mend="leave the others out",
            )
        judged = read_qrels(_file(qrels))
        found, *others = (
            evaluate_run(read_run(_file(path)), judged, wanted)
            for path in (str(run), *([baseline] if baseline else []))
        )
        _show(found)
        for other in others:
            _compare(other, found)
        return
    rows = rows_of(table, corpus, split, source, options)
    kept_of(rows, filter)
    score = _scorer(str(model or _file(str(run))), rows, ratios_of(drop))
    of_baseline = _scorer(baseline, rows) if baseline else None
    scores = score()
    result = measured(rows, scores, wanted, filter=filter)
    _show(result.per_question)
    console().print(f"{result.counts} ({filter}), ties {result.ties}, table {result.fingerprint}")
    if output:
        _write(Path(output), rows, scores, result)
    if of_baseline:
        against = measured(rows, of_baseline(), wanted, filter=filter)
        _compare(against.per_question, result.per_question)


def _file(path: str) -> str:
    if not Path(path).is_file():
        raise EvaluationError(f"no file {path}", expected="a run or qrels", mend="check the path")
    return path


def _wanted(measures: list[str]) -> list[Measure]:
    if not measures:
        raise EvaluationError("no measures", expected="one or more", mend="leave the flag out")
    return [as_measure(measure) for measure in measures]


def _check_output(run: Path) -> None:
    """Refuses a place where a run cannot go, or its measures would end another file."""
    beside = run.with_suffix(".json") if run.name else run
    fine = run.parent.is_dir() and not run.is_dir() and run != beside
    # Where evaluate wrote the measures, the run lies beside them.
    if not fine or (beside.exists() and not run.exists()):
        raise EvaluationError(
            f"output={run}" + (f", with another {beside.name} beside it" if fine else ""),
            expected="a name for the run in a folder that is there; the measures go beside it, "
            "to the same name with .json",
            mend="name it .run, and as no other file there is named",
        )


def _scorer(
    system: str, rows: pa.Table, drop: float | list[float] | None = None
) -> Callable[[], np.ndarray]:
    """What scores every row by a model's name or a run's path, which are read now."""
    if drop is not None and (system in ("constant", "bm25") or Path(system).is_file()):
        raise EvaluationError(
            f"drop={drop} of {system}", expected="a ranker that has stages", mend="leave it out"
        )
    if system == "constant":
        return lambda: np.zeros(rows.num_rows)
    if system == "bm25":
        return lambda: BM25().scores_within(rows)
    if Path(system).is_file():
        scores = scores_of_run(read_run(system), rows)
        return lambda: scores
    from as2ray.checkpoint import load

    ranker = load(system)
    return lambda: ranker.score_table(rows, drop).rank_by


def _show(per_question: pa.Table) -> None:
    shown = table_of("measure", "mean", f"over {per_question.num_rows:,} questions")
    for name in per_question.column_names[1:]:
        values = per_question[name].to_numpy()
        shown.add_row(name, f"{values.mean():.4f}", f"std {values.std():.4f}")
    console().print(shown)


def _compare(baseline: pa.Table, system: pa.Table) -> None:
    shown = table_of("measure", "difference", "95% interval", "p (randomisation)", "p (t)")
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
    console().print(shown)


def _write(path: Path, rows: pa.Table, scores: np.ndarray, result: Evaluation) -> None:
    write_run(path, rows, scores)
    dump = {"measures": result.measures, "per_question": result.per_question.to_pylist()}
    path.with_suffix(".json").write_text(json.dumps(dump, indent=2) + "\n")
