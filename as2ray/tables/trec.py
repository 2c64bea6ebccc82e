"""TREC run and qrels files, in and out, and a run joined to a candidates table.

Knows text files and candidates tables. Must not know measures or models.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.tables.ranking_order import (
    RelevanceColumn,
    TieBreaking,
    read_relevance,
    table_ranking_order,
    validate_scores,
)

RUN_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("candidate_id", pa.string()), ("score", pa.float64())]
)
"""Columns of a run that was read."""

QRELS_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("candidate_id", pa.string()), ("relevance", pa.int64())]
)
"""Columns of qrels that were read."""

_MAX_SCORE = 1e38  # inside float32, with room for steps below


def write_run(
    path: Path | str,
    table: pa.Table,
    scores: npt.ArrayLike,
    *,
    tag: str = "as2ray",
    ties: TieBreaking = "pessimistic",
) -> None:
    """Writes `question Q0 candidate rank score tag`, one candidate a line, best first.

    trec_eval ignores the rank, holds scores in float32 and breaks ties its own way. Scores are
    therefore rounded to float32, and one that is not below the score before it becomes the next
    float32 below that: every reader's sort gives this order again. Distinct float32 scores come
    back bit for bit.

    Raises:
        EvaluationError: Scores that do not fit the table, or white space in an id or the tag.
    """
    values = validate_scores(scores, table.num_rows)
    order = table_ranking_order(table, values, ties)
    questions, candidates = _read_ids(table, order)
    _check_no_white_space([tag, *questions, *candidates])
    rank, before, written = 0, None, math.inf
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question, candidate, score in zip(questions, candidates, values[order]):
            rank, written = (rank + 1, written) if question == before else (1, math.inf)
            written, before = _next_lower_score(written, score), question
            file.write(f"{question} Q0 {candidate} {rank} {written!r} {tag}\n")


def write_qrels(path: Path | str, table: pa.Table, relevance: RelevanceColumn = "label") -> None:
    """Writes `question 0 candidate relevance`, one candidate a line, in the table's order.

    Raises:
        EvaluationError: White space in an id, or no such relevance.
    """
    questions, candidates = _read_ids(table, np.arange(table.num_rows))
    _check_no_white_space([*questions, *candidates])
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for row in zip(questions, candidates, read_relevance(table, relevance).tolist()):
            file.write("{} 0 {} {}\n".format(*row))


def read_run(path: Path | str) -> pa.Table:
    """A run as a table of schema `RUN`, rows in the file's order.

    Raises:
        EvaluationError: The line that has not six columns, no finite score, or a pair again.
    """
    rows = []
    for place, (question, _, candidate, _, score, _) in _read_lines(path, 6):
        rows.append((question, candidate, _parse_number(score, place)))
    return _build_table(rows, RUN_SCHEMA)


def read_qrels(path: Path | str) -> pa.Table:
    """Qrels as a table of schema `QRELS`, rows in the file's order.

    Raises:
        EvaluationError: The line that has not four columns, no whole number, or a pair again.
    """
    rows = []
    for place, (question, _, candidate, relevance) in _read_lines(path, 4):
        value = _parse_number(relevance, place)
        if value != int(value):
            _raise_line_error(place, f"relevance {relevance!r}", "a whole number")
        rows.append((question, candidate, int(value)))
    return _build_table(rows, QRELS_SCHEMA)


def align_run(run: pa.Table, table: pa.Table) -> npt.NDArray[np.float64]:
    """The run's scores aligned to a candidates table, shape [rows].

    Raises:
        EvaluationError: Candidates without a score, scores of unknown candidates, a pair twice.
    """
    pairs = list(zip(run["question_id"].to_pylist(), run["candidate_id"].to_pylist()))
    scored = dict(zip(pairs, run["score"].to_pylist()))
    wanted = list(zip(table["question_id"].to_pylist(), table["candidate_id"].to_pylist()))
    missing, unknown = [p for p in wanted if p not in scored], scored.keys() - set(wanted)
    if missing or unknown or len(scored) < len(pairs):
        raise EvaluationError(
            f"a run of {len(pairs):,} lines for {len(wanted):,} candidates: {len(missing):,} "
            f"without a score {missing[:2]}, {len(unknown):,} unknown {sorted(unknown)[:2]}, "
            f"{len(pairs) - len(scored):,} twice"
            "; expected one score for every candidate of the table",
            fix="score the same table, or filter it to the questions and candidates of the run",
        )
    return np.array([scored[pair] for pair in wanted], np.float64)


def _next_lower_score(previous: float, score: float) -> float:
    # The score in float32, or the next float32 below `before` where it is not below.
    rounded = np.float32(np.clip(score, -_MAX_SCORE, _MAX_SCORE))
    return float(min(rounded, np.nextafter(np.float32(previous), np.float32(-np.inf))))


def _read_ids(table: pa.Table, order: npt.NDArray[np.int64]) -> tuple[list[str], list[str]]:
    rows = table.select(["question_id", "candidate_id"]).take(pa.array(order))
    return rows["question_id"].to_pylist(), rows["candidate_id"].to_pylist()


def _check_no_white_space(names: Sequence[str]) -> None:
    wrong = [name for name in names if len(name.split()) != 1 or name.strip() != name]
    if wrong:
        raise EvaluationError(
            f"{len(wrong):,} names that are empty or hold white space, first {wrong[0]!r}"
            "; expected ids and a tag without white space: it separates the columns",
            fix="replace the white space, for example with '_'",
        )


def _read_lines(path: Path | str, num_columns: int) -> Iterator[tuple[str, list[str]]]:
    # Each line that is not blank with its place; refuses another number of columns.
    first: dict[tuple[str, str], int] = {}
    with Path(path).open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            place, parts = f"{path}:{number}", line.split()
            if line != line.encode(errors="replace").decode():
                _raise_line_error(place, f"bytes that are no UTF-8: {line[:80]!r}", "text in UTF-8")
            if parts and len(parts) != num_columns:
                _raise_line_error(
                    place, f"{len(parts)} columns: {line[:80]!r}", f"{num_columns} columns"
                )
            if parts:
                if (seen := first.setdefault((parts[0], parts[2]), number)) != number:
                    _raise_line_error(
                        place, f"{parts[0]} {parts[2]} again, as in line {seen}", "once"
                    )
                yield place, parts


def _parse_number(text: str, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        _raise_line_error(source, f"{text!r}", "a finite number")
    return value


def _raise_line_error(source: str, problem: str, expected: str) -> None:
    raise EvaluationError(
        f"{source}: {problem}; expected {expected}",
        fix="runs have the columns question Q0 candidate rank score tag, "
        "qrels question 0 candidate relevance",
    )


def _build_table(rows: Sequence[tuple[str, str, float]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows)) or [()] * len(schema)
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema)], schema=schema
    )
