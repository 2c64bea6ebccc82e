"""`as2ray evaluate`: evaluates a ranker or a run, and tests it against another."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from as2ray.cli.console import create_console, create_console_table, load_table, parse_drop_ratios
from as2ray.errors import EvaluationError, lookup
from as2ray.tables.atomic import atomic_file, is_writable
from as2ray.tables.filters import FILTER_DESCRIPTIONS, QuestionFilter
from as2ray.tables.ranking_order import RelevanceColumn, read_relevance
from as2ray.tables.schema import count_table
from as2ray.tables.trec import align_run, check_names, read_qrels, read_run, write_run

if TYPE_CHECKING:
    from as2ray.evaluation.measures import EvaluationResult
    from as2ray.evaluation.presets import Measure

DEFAULT_MEASURES = ("AP", "RR", "P@1", "nDCG@10")

UNTRAINED = ("bm25", "similarity", "hybrid", "constant")
"""Names of what scores candidates without training."""


def evaluate(  # noqa: PLR0913 - every argument is a flag
    *,
    model: str | None = None,
    run: str | None = None,
    qrels: str | None = None,
    table: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    min_positive_grade: float | None = None,
    corpus: str | None = None,
    split: str = "test",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter | None = None,
    measures: list[str] | None = None,
    preset: str | None = None,
    relevance: RelevanceColumn = "label",
    baseline: str | None = None,
    drop_ratio: str | None = None,
    output_run: str | None = None,
) -> None:
    """Evaluates a ranker or a run.

    Args:
        model: Checkpoint folder or hub id, or what needs no training: `bm25`, `similarity` (of the
            packaged MiniLM), `hybrid` (the sum of both), `constant` (all candidates equal).
        run: A TREC run instead of a model.
        qrels: TREC qrels; then no table is needed.
        table: Folder of a prepared table, or a file such as those of `as2ray train`.
        columns: Names of the table's columns, such as {"question": "q", "label": "y"}.
        min_positive_grade: Lowest grade of the table that counts as an answer; by default labels
            are 0 and 1.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        question_filter: Questions of a table to evaluate; by default those of the preset, or
            `clean`. Of qrels all with a relevant document count.
        measures: Names of ir-measures; by default those of the preset, or AP, RR, P@1 and nDCG@10.
        preset: Measures and question filter of a paper: tanda, cascade, cerberus or pseudo_labels.
        relevance: Measure `label`, 0 or 1, or the column `grade`, as for nDCG and AP(rel=2) of
            MS MARCO's dl19. Qrels are measured by their grades.
        baseline: Another model or run to test against, paired by question.
        drop_ratio: Drop ratio instead of a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        output_run: File for the run; the measures by question go beside it (`.json`).
    """
    from as2ray.evaluation.measures import evaluate as evaluate_scores
    from as2ray.evaluation.measures import evaluated_rows
    from as2ray.evaluation.presets import PAPER_PRESETS, PaperPreset
    from as2ray.evaluation.trec_runs import evaluate_run

    if (model is None) == (run is None) or (qrels and not run):
        raise EvaluationError(
            f"model={model}, run={run}, qrels={qrels}; give either --model, or --run (with "
            "--qrels, --table or --corpus)"
        )
    paper = PaperPreset(DEFAULT_MEASURES, "clean")
    if preset is not None:
        paper = lookup(PAPER_PRESETS, preset, "preset")
    chosen_filter, question_filter = question_filter, question_filter or paper.question_filter
    parsed_measures = _parse_measures(
        paper.measures if measures is None else measures, "grade" if qrels else relevance
    )
    if output_run:
        _check_output(Path(output_run))
    if qrels is not None:
        of_tables = {
            **{"table": table, "corpus": corpus, "drop_ratio": drop_ratio},
            **{"output_run": output_run, "relevance": None if relevance == "label" else relevance},
            **{"question_filter": chosen_filter, "min_positive_grade": min_positive_grade},
        }
        if given := [f"{name}={value}" for name, value in of_tables.items() if value is not None]:
            raise EvaluationError(
                f"qrels={qrels} with {', '.join(given)}; with qrels there is nothing to score or "
                "to write, grades are measured, and all questions with a relevant document count",
                fix="leave out the other flags",
            )
        judgments = _read_nonempty(read_qrels, qrels)
        result, *baseline_results = (
            evaluate_run(_read_nonempty(read_run, path), judgments, parsed_measures)
            for path in (str(run), *([baseline] if baseline else []))
        )
        _print_measures(result)
        for baseline_result in baseline_results:
            _print_comparison(baseline_result, result)
        return
    if run is not None and not table and not corpus:
        raise EvaluationError(f"run={run}; a run needs --qrels, --table or --corpus")
    rows = load_table(table, corpus, split, data_dir, corpus_options, columns, min_positive_grade)
    read_relevance(rows, relevance)
    evaluated_rows(rows, question_filter)
    if output_run:
        check_names(rows)
    system = str(model or _require_file(str(run)))
    score = _create_scorer(system, rows, parse_drop_ratios(drop_ratio))
    score_baseline = _create_scorer(baseline, rows) if baseline else None
    scores = score()
    measure = partial(
        evaluate_scores,
        rows,
        measures=parsed_measures,
        question_filter=question_filter,
        relevance=relevance,
    )
    evaluation = measure(scores)
    _print_measures(evaluation.per_question)
    create_console().print(
        f"{evaluation.counts} ({question_filter}), ties {evaluation.ties}, "
        f"table {evaluation.fingerprint}"
    )
    if left_out := count_table(rows).num_questions - evaluation.counts.num_questions:
        create_console().print(
            f"left out: {left_out:,} questions, as {question_filter} keeps "
            f"{FILTER_DESCRIPTIONS[question_filter]}; --question_filter raw takes all"
        )
    if output_run:
        _write_results(Path(output_run), rows, scores, evaluation)
    if score_baseline:
        _print_comparison(measure(score_baseline()).per_question, evaluation.per_question)


def _require_file(path: str) -> str:
    if not Path(path).is_file():
        raise EvaluationError(f"no file {path}; a run or qrels must be a file")
    return path


def _read_nonempty(read: Callable[[str], pa.Table], path: str) -> pa.Table:
    lines = read(_require_file(path))
    if not lines.num_rows:
        raise EvaluationError(f"{path} is empty", fix="check what wrote it")
    return lines


def _parse_measures(
    measures: "Sequence[Measure | str]", relevance: RelevanceColumn
) -> "list[Measure]":
    from as2ray.evaluation.presets import parse_measure

    if not measures:
        raise EvaluationError("no measures; name at least one, or leave the flag out")
    return [parse_measure(measure, relevance) for measure in measures]


def _check_output(run_path: Path) -> None:
    """Checks that a run can be written, and that its measures replace no other file."""
    json_path = run_path.with_suffix(".json") if run_path.name else run_path
    is_valid = run_path.parent.is_dir() and not run_path.is_dir() and run_path != json_path
    if not is_valid:
        raise EvaluationError(
            f"output_run={run_path} must be a new file in an existing folder, without the suffix "
            ".json: the measures go beside it under that suffix",
            fix="name it .run",
        )
    if not is_writable(run_path.parent):
        raise EvaluationError(
            f"output_run={run_path}: {run_path.parent} may not be written to",
            fix="choose another folder",
        )
    # Measures that evaluate wrote have a run beside them.
    if json_path.exists() and not run_path.exists():
        raise EvaluationError(
            f"output_run={run_path} would replace another {json_path.name} beside it",
            fix="choose a name that no other file has",
        )


def _create_scorer(
    system: str, rows: pa.Table, drop_ratios: float | list[float] | None = None
) -> Callable[[], np.ndarray]:
    """Loads a model or a run; returns the function that scores every row with it."""
    if drop_ratios is not None and (system in UNTRAINED or Path(system).is_file()):
        raise EvaluationError(
            f"drop_ratio={drop_ratios} of {system}; only a ranker that has stages drops candidates"
        )
    if system == "constant":
        return lambda: np.zeros(rows.num_rows)
    if system == "bm25":
        from as2ray.text.bm25 import BM25

        return lambda: BM25().score_candidates(rows)
    if system in ("similarity", "hybrid"):
        from as2ray.checkpoints.packaged import MINILM_NAME
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
        from as2ray.retrieval.baselines import hybrid_scores, similarities

        encoder = load_sentence_encoder(MINILM_NAME)
        return partial(hybrid_scores if system == "hybrid" else similarities, encoder, rows)
    if Path(system).is_file():
        scores = align_run(_read_nonempty(read_run, system), rows)
        return lambda: scores
    from as2ray.checkpoints.loading import load

    ranker = load(system)
    return lambda: ranker.predict_table(rows, drop_ratios).sort_keys


def _print_measures(per_question: pa.Table) -> None:
    summary = create_console_table("measure", "mean", f"over {per_question.num_rows:,} questions")
    for name in per_question.column_names[1:]:
        values = per_question[name].to_numpy()
        summary.add_row(name, f"{values.mean():.4f}", f"std {values.std():.4f}")
    create_console().print(summary)


def _print_comparison(baseline: pa.Table, system: pa.Table) -> None:
    from as2ray.evaluation.significance import compare_systems

    summary = create_console_table(
        "measure", "difference", "95% interval", "p (randomization)", "p (t)"
    )
    for name in system.column_names[1:]:
        test = compare_systems(baseline, system, name)
        low, high = test.interval
        summary.add_row(
            name,
            f"{test.difference:+.4f}",
            f"[{low:+.4f}, {high:+.4f}]",
            f"{test.p_randomization:.4f}",
            f"{test.p_t:.4f}",
        )
    create_console().print(summary)


def _write_results(
    path: Path, rows: pa.Table, scores: np.ndarray, result: "EvaluationResult"
) -> None:
    write_run(path, rows, scores, relevance=result.relevance)
    dump = {"measures": result.measures, "per_question": result.per_question.to_pylist()}
    with atomic_file(path.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(dump, indent=2) + "\n")
