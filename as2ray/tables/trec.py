"""Reads and writes TREC run and qrels files, and aligns a run to a candidates table."""

import gzip
import math
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import ir_measures
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.tables.ranking_order import (
    RelevanceColumn,
    TieBreaking,
    table_ranking_order,
    validate_scores,
)
from as2ray.tables.schema import from_rows

RUN_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("candidate_id", pa.string()), ("score", pa.float64())]
)
"""Columns of a run after reading."""

QRELS_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("candidate_id", pa.string()), ("relevance", pa.int64())]
)
"""Columns of qrels after reading."""

_MAX_SCORE = 1e38  # below the float32 maximum, so that there are lower and higher float32 values


def write_run(
    path: Path | str,
    table: pa.Table,
    scores: npt.ArrayLike,
    *,
    tag: str = "as2ray",
    ties: TieBreaking = "pessimistic",
    relevance: RelevanceColumn = "label",
) -> None:
    """Writes `question Q0 candidate rank score tag`, one candidate per line, best first.

    trec_eval ignores the rank, stores scores in float32 and breaks ties in its own way. Scores are
    therefore rounded to float32, and a score that is not below the previous one becomes the next
    lower float32. Every reader that sorts by score then reproduces this order. Distinct float32
    scores are written without loss.

    Args:
        path: The file to write.
        table: Candidates.
        scores: Higher is better, finite, shape [rows].
        tag: Name of the run.
        ties: Order of equal scores.
        relevance: Column with the relevance, which orders equal scores.

    Raises:
        EvaluationError: Scores that do not fit the table, or white space in an id or the tag.
    """
    values = validate_scores(scores, table.num_rows)
    order = table_ranking_order(table, values, ties, relevance)
    ids = table.select(["question_id", "candidate_id"]).take(pa.array(order))
    check_names(table, tag)
    questions, candidates = ids["question_id"].to_pylist(), ids["candidate_id"].to_pylist()
    rank, previous_question, written_score = 0, None, math.inf
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question, candidate, score in zip(questions, candidates, values[order]):
            if question != previous_question:
                rank, previous_question, written_score = 0, question, math.inf
            rank, written_score = rank + 1, _next_lower_score(written_score, score)
            file.write(f"{question} Q0 {candidate} {rank} {written_score!r} {tag}\n")


def read_run(path: Path | str) -> pa.Table:
    """Reads a run as a table with `RUN_SCHEMA`, rows in the file's order; `.gz` is decompressed.

    Raises:
        EvaluationError: A damaged file, a line without six columns or a finite score, or a pair
            that occurs twice.
    """
    columns = "question Q0 candidate rank score tag"
    rows = []
    for source, line in _read_lines(path, ir_measures.read_trec_run, columns):
        if not math.isfinite(line.score):
            raise EvaluationError(f"{source}: the score {line.score} is not finite")
        rows.append((line.query_id, line.doc_id, line.score))
    return from_rows(rows, RUN_SCHEMA)


def read_qrels(path: Path | str) -> pa.Table:
    """Reads qrels as a table with `QRELS_SCHEMA`, rows in the file's order; `.gz` is decompressed.

    Raises:
        EvaluationError: A damaged file, a line without four columns or an integer relevance, or a
            pair that occurs twice.
    """
    lines = _read_lines(path, ir_measures.read_trec_qrels, "question 0 candidate relevance")
    rows = [(line.query_id, line.doc_id, line.relevance) for _, line in lines]
    return from_rows(rows, QRELS_SCHEMA)


def align_run(run: pa.Table, table: pa.Table) -> npt.NDArray[np.float64]:
    """Returns the run's scores in the order of a candidates table, shape [rows].

    Raises:
        EvaluationError: Candidates without a score, scores of unknown candidates, or a pair that
            occurs twice.
    """
    run_pairs = list(zip(run["question_id"].to_pylist(), run["candidate_id"].to_pylist()))
    score_of_pair = dict(zip(run_pairs, run["score"].to_pylist()))
    pairs = list(zip(table["question_id"].to_pylist(), table["candidate_id"].to_pylist()))
    missing = [pair for pair in pairs if pair not in score_of_pair]
    unknown = score_of_pair.keys() - set(pairs)
    num_duplicates = len(run_pairs) - len(score_of_pair)
    if missing or unknown or num_duplicates:
        raise EvaluationError(
            f"a run of {len(run_pairs):,} lines for {len(pairs):,} candidates: {len(missing):,} "
            f"without a score {missing[:2]}, {len(unknown):,} unknown {sorted(unknown)[:2]}, "
            f"{num_duplicates:,} twice",
            fix="score the same table, or filter it to the questions and candidates of the run",
        )
    return np.array([score_of_pair[pair] for pair in pairs], np.float64)


def _next_lower_score(previous: float, score: float) -> float:
    """Returns the score in float32, or the next float32 below `previous` if it is not lower."""
    rounded = np.float32(np.clip(score, -_MAX_SCORE, _MAX_SCORE))
    return float(min(rounded, np.nextafter(np.float32(previous), np.float32(-np.inf))))


def check_names(table: pa.Table, tag: str = "as2ray") -> None:
    """Checks that a run can hold the ids of a table.

    Raises:
        EvaluationError: An id or the tag is empty or contains white space.
    """
    if invalid := _invalid_names([tag, *_ids(table)]):
        raise EvaluationError(
            f"{len(invalid):,} names that are empty or contain white space, first {invalid[0]!r}",
            fix="replace white space, which separates the columns of TREC files, by '_'",
        )


def quote_names(table: pa.Table) -> pa.Table:
    """Returns a table whose ids a run can hold: the same, unless one has white space.

    Then white space and `%` are written as in URLs, so that `urllib.parse.unquote` returns the ids
    of the table. An empty id becomes `%`.
    """
    if not _invalid_names(_ids(table)):
        return table
    for column in ("question_id", "candidate_id"):
        names = (re.sub(r"[%\s]", lambda c: quote(c[0]), n) for n in table[column].to_pylist())
        quoted = pa.array((name or "%" for name in names), pa.string())
        table = table.set_column(table.column_names.index(column), column, quoted)
    return table


def _ids(table: pa.Table) -> Iterator[str]:
    return chain(table["question_id"].to_pylist(), table["candidate_id"].to_pylist())


def _invalid_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.split() != [name]]


def _open_lines(path: Path) -> Generator[str, None, None]:
    """Yields the lines of a file, which may be compressed by gzip; bytes that are no UTF-8 stay."""
    open_file: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
        try:
            yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise EvaluationError(f"{path} is damaged: {error}") from error


def _read_lines(
    path: Path | str, parse: Callable[[str], Iterator[Any]], columns: str
) -> Iterator[tuple[str, Any]]:
    """Yields path and line number, and what `parse` returns, of each line that is not blank."""
    line_of_pair: dict[tuple[str, str], int] = {}
    with closing(_open_lines(Path(path))) as lines:
        for number, line in enumerate(lines, 1):
            source = f"{path}:{number}"
            if line != line.encode(errors="replace").decode():
                raise EvaluationError(f"{source}: bytes that are not UTF-8: {line[:80]!r}")
            try:
                # A string is read as the name of a file, unless it contains a line break.
                parsed = list(parse(line.rstrip("\n") + "\n"))
            except ValueError as error:
                problem = (
                    f"{source}: {line[:80].strip()!r} has not the columns `{columns}`: {error}"
                )
                raise EvaluationError(problem) from error
            for record in parsed:
                pair = record.query_id, record.doc_id
                first = line_of_pair.setdefault(pair, number)
                if first != number:
                    raise EvaluationError(f"{source}: {' '.join(pair)} again, as in line {first}")
                yield source, record
