"""`as2ray evaluate`: measures of a ranker or a run, and tests against another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.cli.console import create_console, create_console_table, load_table, parse_drop_ratios
from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import EvaluationResult, Measure, evaluated_rows, parse_measure
from as2ray.evaluation.measures import evaluate as measured
from as2ray.evaluation.significance import compare_systems
from as2ray.evaluation.trec_runs import evaluate_run
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.trec import align_run, read_qrels, read_run, write_run
from as2ray.text.bm25 import BM25


def evaluate(
    model: str | None = None,
    run: str | None = None,
    qrels: str | None = None,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "test",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter = "clean",
    measures: list[str] = ["AP", "RR", "P@1", "nDCG@10"],  # noqa: B006
    baseline: str | None = None,
    drop_ratio: str | None = None,
    output_run: str | None = None,
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
            f"model={model}, run={run}, qrels={qrels}"
            "; expected either --model, or --run (with --qrels, --table or --corpus)",
        )
    wanted = _parse_measures(measures)
    if output_run:
        _check_output(Path(output_run))
    if qrels is not None:
        if table or corpus or drop_ratio or output_run:
            raise EvaluationError(
                f"qrels={qrels} with table={table}, corpus={corpus}, drop={drop_ratio}, output={output_run}"
                "; expected a run and qrels alone: there is nothing to score or to write",
                fix="leave the others out",
            )
        judged = read_qrels(_require_file(qrels))
        found, *others = (
            evaluate_run(read_run(_require_file(path)), judged, wanted)
            for path in (str(run), *([baseline] if baseline else []))
        )
        _print_measures(found)
        for other in others:
            _print_comparison(other, found)
        return
    rows = load_table(table, corpus, split, data_dir, corpus_options)
    evaluated_rows(rows, question_filter)
    score = _create_scorer(
        str(model or _require_file(str(run))), rows, parse_drop_ratios(drop_ratio)
    )
    of_baseline = _create_scorer(baseline, rows) if baseline else None
    scores = score()
    result = measured(rows, scores, wanted, question_filter=question_filter)
    _print_measures(result.per_question)
    create_console().print(
        f"{result.counts} ({question_filter}), ties {result.ties}, table {result.fingerprint}"
    )
    if output_run:
        _write_results(Path(output_run), rows, scores, result)
    if of_baseline:
        against = measured(rows, of_baseline(), wanted, question_filter=question_filter)
        _print_comparison(against.per_question, result.per_question)


def _require_file(path: str) -> str:
    if not Path(path).is_file():
        raise EvaluationError(
            f"no file {path}; expected a run or qrels",
            fix="check the path",
        )
    return path


def _parse_measures(measures: list[str]) -> list[Measure]:
    if not measures:
        raise EvaluationError(
            "no measures; expected one or more",
            fix="leave the flag out",
        )
    return [parse_measure(measure) for measure in measures]


def _check_output(run_path: Path) -> None:
    """Refuses a place where a run cannot go, or its measures would end another file."""
    beside = run_path.with_suffix(".json") if run_path.name else run_path
    fine = run_path.parent.is_dir() and not run_path.is_dir() and run_path != beside
    # Where evaluate wrote the measures, the run lies beside them.
    if not fine or (beside.exists() and not run_path.exists()):
        raise EvaluationError(
            (f"output={run_path}" + (f", with another {beside.name} beside it" if fine else ""))
            + "; expected a name for the run in a folder that is there; the measures go beside it, "
            "to the same name with .json",
            fix="name it .run, and as no other file there is named",
        )


def _create_scorer(
    system: str, rows: pa.Table, drop_ratios: float | list[float] | None = None
) -> Callable[[], np.ndarray]:
    """What scores every row by a model's name or a run's path, which are read now."""
    if drop_ratios is not None and (system in ("constant", "bm25") or Path(system).is_file()):
        raise EvaluationError(
            f"drop={drop_ratios} of {system}; expected a ranker that has stages",
        )
    if system == "constant":
        return lambda: np.zeros(rows.num_rows)
    if system == "bm25":
        return lambda: BM25().score_candidates(rows)
    if Path(system).is_file():
        scores = align_run(read_run(system), rows)
        return lambda: scores
    from as2ray.checkpoints.loading import load

    ranker = load(system)
    return lambda: ranker.predict_table(rows, drop_ratios).sort_keys


def _print_measures(per_question: pa.Table) -> None:
    shown = create_console_table("measure", "mean", f"over {per_question.num_rows:,} questions")
    for name in per_question.column_names[1:]:
        values = per_question[name].to_numpy()
        shown.add_row(name, f"{values.mean():.4f}", f"std {values.std():.4f}")
    create_console().print(shown)


def _print_comparison(baseline: pa.Table, system: pa.Table) -> None:
    shown = create_console_table(
        "measure", "difference", "95% interval", "p (randomisation)", "p (t)"
    )
    for name in system.column_names[1:]:
        test = compare_systems(baseline, system, name)
        low, high = test.interval
        shown.add_row(
            name,
            f"{test.difference:+.4f}",
            f"[{low:+.4f}, {high:+.4f}]",
            f"{test.p_randomization:.4f}",
            f"{test.p_t:.4f}",
        )
    create_console().print(shown)


def _write_results(
    path: Path, rows: pa.Table, scores: np.ndarray, result: EvaluationResult
) -> None:
    write_run(path, rows, scores)
    dump = {"measures": result.measures, "per_question": result.per_question.to_pylist()}
    path.with_suffix(".json").write_text(json.dumps(dump, indent=2) + "\n")
