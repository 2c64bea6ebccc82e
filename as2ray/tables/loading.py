"""Loads a candidates table from a file, folder, data frame or data set of the user's own."""

import csv
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import ConfigError, CorpusError, suggest
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import (
    find_delimiter,
    iter_arrow,
    open_text,
    read_hub,
    read_json_records,
)
from as2ray.tables.schema import (
    CANDIDATE_SCHEMA,
    MAX_TEXT_CHARS,
    OPTIONAL_COLUMNS,
    batched,
    validate_table,
)

log = logging.getLogger(__name__)

HUB_PREFIX = "hub:"
"""Start of the name of a data set on the Hugging Face hub: `hub:OWNER/NAME` or with `:SPLIT`."""

COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "question_id": ("question_id", "query_id", "qid"),
    "question": ("question", "query"),
    "candidate_id": ("candidate_id",),
    "candidate": ("candidate", "sentence", "answer", "passage", "text"),
    "label": ("label", "relevance"),
}
"""Names under which a column is recognized without `columns`, in order of preference. Capitals do
not matter, and a blank is an underscore."""

REQUIRED = ("question", "candidate", "label")

TRUTH_VALUES = {"true": 1, "false": 0, "yes": 1, "no": 0}

NEGATIVE_NAME = re.compile(
    r"(0|false|incorrect|irrelevant|negative|no|non|not|wrong)(?![^\W_])", re.I
)
"""Start of the name of a class that is no answer."""

NUM_SHOWN_ROWS = 5
"""Bad rows that an error or a warning shows."""

_FIELD = r'(?>"(?:[^"\t]|"")*+"|"(?:[^"\n]|"")*+"|[^"\t]*)'
_QUOTED_RECORD = re.compile(rf"{_FIELD}(?:\t{_FIELD})*\r?\n?")

_DELIMITED, _JSON = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson", ".json")


@dataclass
class _RawTable:
    """A table as it was read: its columns, the number of each row, and what could not be read."""

    columns: pa.Table
    numbers: list[int] | None = None
    unit: str = "row"
    """What the numbers count: `line`, `record` or `row`."""
    problems: list[tuple[int, str]] = field(default_factory=list)

    def number(self, row: int) -> int:
        return row + 1 if self.numbers is None else self.numbers[row]


def load_table(
    source: Any,
    *,
    columns: Mapping[str, str] | None = None,
    min_positive_grade: float | None = None,
    max_bad_records: int = 0,
) -> pa.Table:
    """Loads a candidates table.

    Ids that are missing are hashes of the texts, so they stay the same when rows are added. The
    rows of a question become adjacent.

    Args:
        source: A file (`.csv`, `.tsv`, `.txt`, `.jsonl`, `.json`, `.parquet`; text files also with
            `.gz`), a folder of Parquet files or of `datasets`' `save_to_disk`, `hub:OWNER/NAME`
            or `hub:OWNER/NAME:SPLIT`, an Arrow table, a data frame (pandas, polars), a
            `datasets.Dataset`, or a list of dictionaries.
        columns: Name in the source of `question`, `candidate`, `label`, `question_id` or
            `candidate_id`, by default as in `COLUMN_NAMES`.
        min_positive_grade: Lowest grade that counts as an answer; the grades are kept if they are
            whole numbers. By default labels are 0 or 1, true or false, yes or no, in any capitals.
        max_bad_records: Number of rows that may be left out because they cannot be used; a warning
            shows the first five.

    Returns:
        A table of `CANDIDATE_SCHEMA`. Optional columns are kept if the source has all of its
        columns under their own names; others are left out.

    Raises:
        CorpusError: There is no such source or column, too many rows are bad, or no row is left;
            or a class of `datasets` that would be the answers has a name such as `no`.
        ConfigError: Another argument is of another type.
    """
    is_names = isinstance(columns, Mapping) and all(isinstance(x, str) for x in columns.values())
    if columns is not None and not is_names:
        problem = f'columns {columns!r} must be a dictionary of names, such as {{"question": "q"}}'
        raise ConfigError(problem)
    is_count = isinstance(max_bad_records, Integral) and max_bad_records >= 0
    if not isinstance(min_positive_grade, Real | None) or not is_count:
        raise ConfigError(
            f"{min_positive_grade=!r} must be a number or None, and {max_bad_records=!r} an "
            "integer of at least 0"
        )
    name = str(source) if isinstance(source, str | Path) else f"the {type(source).__name__}"
    raw = _read(source, name)
    names = _resolve_columns(raw.columns.column_names, columns or {}, name)
    is_candidates_table = set(CANDIDATE_SCHEMA.names) <= set(raw.columns.column_names)
    if not isinstance(source, pa.Table):  # whose labels may have changed since
        _check_class_names(raw.columns.schema, names["label"], min_positive_grade or 1, name)
    texts = {role: _as_text(raw.columns[column], name) for role, column in names.items()}
    grades = _parse_grades(texts["label"])
    problems = _find_problems(texts, grades, min_positive_grade)
    rows = np.array([row for row in range(len(grades)) if row not in problems], np.int64)
    bad = sorted([*raw.problems, *((raw.number(row), text) for row, text in problems.items())])
    _report_bad_rows(bad, len(rows), name, raw.unit, max_bad_records)

    texts = {role: column.take(pa.array(rows)) for role, column in texts.items()}
    grades = grades[rows]
    labels = grades >= (1 if min_positive_grade is None else min_positive_grade)
    table = pa.table({**_with_ids(texts), "label": labels.astype(np.int8)})
    if is_candidates_table and not columns:
        optional = (name for name in raw.columns.column_names if name in OPTIONAL_COLUMNS.names)
        for column in optional:
            table = table.append_column(column, raw.columns[column].take(pa.array(rows)))
    has_grades = min_positive_grade is not None and (grades == grades.astype(np.int8)).all()
    if has_grades and "grade" not in table.column_names:
        table = table.append_column("grade", pa.array(grades.astype(np.int8)))
    _warn_of_two_labels(table, name)
    question = np.asarray(table["question_id"].combine_chunks().dictionary_encode().indices)
    return validate_table(table.take(pa.array(np.argsort(question, kind="stable"))), name)


def _read(source: Any, name: str) -> _RawTable:
    if isinstance(source, str | Path):
        return _read_path(str(source))
    if isinstance(source, Mapping):
        raise CorpusError(f"{name} has the splits {sorted(source)}", fix="give one of them")
    if isinstance(source, pa.Table):
        return _RawTable(source)
    if isinstance(source, list):
        return _collect_records(enumerate(source, 1), "row")
    if hasattr(source, "with_format"):  # datasets.Dataset
        return _RawTable(pa.concat_tables(iter_arrow(source)))
    try:
        return _RawTable(pa.table(source))
    except (TypeError, ValueError, pa.ArrowInvalid) as error:
        problem = f"{name} is no table: {' '.join(str(error).split())[:200]}"
        raise CorpusError(problem, fix="give a path, a data frame or a data set") from error


def _read_path(name: str) -> _RawTable:
    if name.startswith(HUB_PREFIX):
        dataset, _, split = name.removeprefix(HUB_PREFIX).partition(":")
        return _RawTable(pa.concat_tables(read_hub(dataset, split or "train")))
    check_source(name)
    path = Path(name)
    if path.is_dir():
        return _read_folder(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".parquet":
        return _RawTable(ParquetTable.open(path).to_table())
    try:
        if suffix in _DELIMITED:
            return _read_delimited(path)
        if suffix in _JSON:
            return _read_json(path)
    except CorpusError as error:
        raise CorpusError(error.problem, fix="save it as UTF-8 text, and whole") from error
    accepted = ", ".join((*_DELIMITED, *_JSON, ".parquet"))
    raise CorpusError(f"{name} is none of {accepted}, and no folder", fix="rename or convert it")


def check_source(path: str) -> None:
    """Checks that there is something at a path, which may be the name of a data set on the hub.

    Raises:
        CorpusError: There is nothing; names what is there under a similar name.
    """
    place = Path(path)
    if path.startswith(HUB_PREFIX) or (path and place.exists()):  # "" would be this folder
        return
    siblings = [each.name for each in place.parent.iterdir()] if place.parent.is_dir() else []
    problem = f"there is no table {path or repr(path)} (sought at {place.absolute()})"
    raise CorpusError(problem, fix=suggest(place.name, siblings))


def _read_folder(path: Path) -> _RawTable:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise CorpusError(f"{path} has the splits {splits}", fix=f"give {path / splits[0]}")
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        return _RawTable(pa.concat_tables(iter_arrow(load_from_disk(str(path)))))
    files = sorted(each.name for each in path.iterdir() if each.suffix in (*_DELIMITED, *_JSON))
    if files and not any(path.glob("**/*.parquet")):
        raise CorpusError(f"{path} has no Parquet files", fix=f"give a file: {path / files[0]}")
    return _RawTable(ParquetTable.open(path).to_table())


def _read_delimited(path: Path) -> _RawTable:
    """Reads a file whose first line names its columns, with `,`, `;` or tabs between them."""
    with open_text(path) as text:
        delimiter = find_delimiter(text)
        is_plain = delimiter == "\t" and not _is_quoted(text)
        text.seek(0)
        reader = csv.reader(
            text,
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL,
            strict=True,
        )
        try:
            header = next(reader, [])
        except csv.Error as error:
            fix = "end lines as on Linux, and close quotation marks"
            raise CorpusError(f"{path}, line 1: {error}", fix=fix) from error
        if len(set(header)) < len(header):
            raise CorpusError(f"{path}: two columns of {header} have one name")
        raw = _RawTable(pa.table({}), [], "line")
        chunks = batched(_read_rows(reader, raw, header), 50_000)
        schema = pa.schema([(name, pa.string()) for name in header])
        tables = [pa.table(list(map(list, zip(*rows))), schema=schema) for rows in chunks]
    raw.columns = pa.concat_tables(tables) if tables else schema.empty_table()
    return raw


def _is_quoted(lines: Iterable[str]) -> bool:
    """Returns whether quotation marks enclose fields of a tab-separated file, as pandas writes it.

    Writers of quoted fields double the marks inside them and leave none in other fields. In other
    files, such as WikiQA's, marks are plain characters. What has a tab and a line feed between two
    marks is no field, but the end of one line and the start of another.
    """
    record: list[str] = []
    is_open = False
    for line in lines:
        is_open ^= line.count('"') % 2 == 1
        record.append(line)
        if not is_open:
            if not _QUOTED_RECORD.fullmatch("".join(record)):
                return False
            record.clear()
    return not is_open


def _read_rows(reader: Any, raw: _RawTable, header: list[str]) -> Iterator[list[str]]:
    """Yields rows as long as the header; notes the line where each begins, and other rows."""
    assert raw.numbers is not None
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
            problem = f"{len(row)} fields, and the header has {len(header)}" if row else ""
        except StopIteration:
            return
        except csv.Error as error:
            row, problem = [], str(error)
            if reader.line_num > line or "unexpected end" in problem:
                problem = f"a quotation mark is not closed ({error})"
        if len(row) == len(header):
            raw.numbers.append(line)
            yield row
        elif problem:
            raw.problems.append((line, problem))
            lost = range(line + 1, reader.line_num + 1)  # perhaps good rows, after an open mark
            raw.problems += ((each, f"read as part of line {line:,}") for each in lost)


def _read_json(path: Path) -> _RawTable:
    """Reads a file of one JSON object a line, or of one list of objects."""
    with open_text(path) as text:
        if text.read(1) == "[":
            return _collect_records(enumerate(read_json_records(path), 1), "record")
    with open_text(path) as lines:
        return _collect_records(_parse_lines(lines), "line")


def _parse_lines(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, error


def _collect_records(records: Iterable[tuple[int, Any]], unit: str) -> _RawTable:
    """Makes a table of the values of numbered records, as text; notes what is no object."""
    rows: list[dict[str, str | None]] = []
    numbers: list[int] = []
    problems: list[tuple[int, str]] = []
    for number, record in records:
        if not isinstance(record, Mapping):
            problems.append((number, f"no JSON object: {str(record)[:80]}"))
            continue
        row = {str(name): _plain_text(value) for name, value in record.items()}
        try:
            "".join([*row, *filter(None, row.values())]).encode()
        except UnicodeEncodeError as error:
            problems.append((number, f"broken characters: {error}"))
            continue
        numbers.append(number)
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pa.table(columns, schema=pa.schema([(name, pa.string()) for name in names]))
    return _RawTable(table, numbers, unit, problems)


def _plain_text(value: Any) -> str | None:
    """Returns a text, number or truth value as text, and None for all else, such as NaN."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return json.dumps(value) if is_number else None


def _resolve_columns(
    available: list[str], columns: Mapping[str, str], source: str
) -> dict[str, str]:
    """Returns the name in the source of each column that it has."""
    if unknown := sorted(columns.keys() - COLUMN_NAMES.keys()):
        problem = f"columns {dict(columns)}: {unknown[0]!r} is none of {list(COLUMN_NAMES)}"
        raise CorpusError(problem, fix=suggest(unknown[0], COLUMN_NAMES))
    plain_names = {each.strip().lower().replace(" ", "_"): each for each in reversed(available)}
    names = {}
    for role, aliases in COLUMN_NAMES.items():
        accepted = [columns[role]] if role in columns else aliases
        known = {**({} if role in columns else plain_names), **dict(zip(available, available))}
        if name := next((known[each] for each in accepted if each in known), None):
            names[role] = name
        elif role in REQUIRED or role in columns:
            hint = suggest(accepted[0], available)
            raise CorpusError(
                f"{source} has the columns {available}, and none of {list(accepted)} for {role!r}",
                fix=f'{f"{hint} " if hint else ""}say which it is: columns {{"{role}": "NAME"}}',
            )
    return names


def _check_class_names(schema: pa.Schema, column: str, min_grade: float, source: str) -> None:
    """Refuses labels of `datasets` if a class that counts as answers is named as none."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", "{}"))
    feature = metadata.get("info", {}).get("features", {}).get(column)
    names = feature.get("names") if isinstance(feature, dict) else None
    for label, name in enumerate(names or []):
        if label >= min_grade and NEGATIVE_NAME.match(name):
            raise CorpusError(
                f"{source}: label {label} of {column!r} would be an answer, and is named {name!r}",
                fix="change the labels to 1 for an answer and 0 for none, and cast them to int64",
            )


def _as_text(column: pa.ChunkedArray, source: str) -> pa.Array:
    try:
        texts = column.cast(pa.string()).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CorpusError(f"{source}: a column of {column.type} is no text: {error}") from error
    return pc.utf8_trim_whitespace(texts)


def _parse_grades(labels: pa.Array) -> np.ndarray:
    """Returns the label of each row as a number, shape [rows]; NaN where it is none."""
    encoded = labels.dictionary_encode()
    values = [_parse_grade(text) for text in encoded.dictionary.to_pylist()]
    indices = encoded.indices.fill_null(len(values)).to_numpy()
    grades: np.ndarray = np.array([*values, math.nan])[indices]
    return grades


def _parse_grade(text: str) -> float:
    try:
        grade = float(TRUTH_VALUES.get(text.lower(), text))
    except ValueError:
        return math.nan
    return grade if math.isfinite(grade) else math.nan


def _find_problems(
    texts: Mapping[str, pa.Array], grades: np.ndarray, min_positive_grade: float | None
) -> dict[int, str]:
    """Returns what is wrong with each row that cannot be used."""
    problems: dict[int, str] = {}
    for role in texts.keys() - {"label"}:
        lengths = pc.utf8_length(texts[role]).fill_null(0).to_numpy(zero_copy_only=False)
        problems |= dict.fromkeys(np.flatnonzero(lengths == 0).tolist(), f"no text as {role}")
        is_long = np.flatnonzero(lengths > MAX_TEXT_CHARS).tolist()
        problems |= dict.fromkeys(is_long, f"a {role} of over {MAX_TEXT_CHARS:,} characters")
    is_unknown = np.isnan(grades)
    if min_positive_grade is None:
        is_unknown |= (grades != 0) & (grades != 1)
    for row in np.flatnonzero(is_unknown).tolist():
        problems[row] = f"label {texts['label'][row].as_py()!r}"
        if not np.isnan(grades[row]):
            problems[row] += " without min_positive_grade"
        elif texts["label"][row].as_py():
            problems[row] += " is neither a number nor " + ", ".join(TRUTH_VALUES)
    if "question_id" in texts:
        ids = np.asarray(texts["question_id"].dictionary_encode().indices.fill_null(-1))
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        is_other = pc.not_equal(texts["question"], texts["question"].take(pa.array(first[inverse])))
        is_bad = is_other.fill_null(False).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(is_bad).tolist():
            problems.setdefault(row, "another question than before with this question_id")
    return problems


def _report_bad_rows(
    bad: list[tuple[int, str]], num_rows: int, source: str, unit: str, max_bad_records: int
) -> None:
    if not bad and not num_rows:
        raise CorpusError(f"{source} has no {unit}s but its columns' names")
    shown = [f"  {unit} {number:,}: {problem}" for number, problem in bad[:NUM_SHOWN_ROWS]]
    text = f"{source}: {len(bad):,} of {len(bad) + num_rows:,} {unit}s cannot be used"
    if len(bad) > max_bad_records and num_rows:
        text += f"; correct them, or allow them with max_bad_records {len(bad)}"
    if len(bad) > max_bad_records or not num_rows:
        raise CorpusError("\n".join([text, *shown]))
    if bad:
        log.warning("%s and are left out\n%s", text, "\n".join(shown))


def _with_ids(texts: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Returns the columns of text of a candidates table."""
    question, candidate = texts["question"], texts["candidate"]
    question_ids = texts.get("question_id", _hashes(question))
    if "candidate_id" not in texts:
        keys = pc.binary_join_element_wise(question_ids, _hashes(candidate), "-").to_pylist()
        counters = {key: count(2) for key, times in Counter(keys).items() if times > 1}
        seen: set[str] = set()
        candidate_ids = []
        for key in keys:
            candidate_ids.append(f"{key}-{next(counters[key])}" if key in seen else key)
            seen.add(key)
        ids = pa.array(candidate_ids, pa.string())
    else:
        ids = texts["candidate_id"]
        if pc.count_distinct(ids).as_py() < len(ids):  # the id of a document that is shared
            ids = pc.binary_join_element_wise(question_ids, ids, "/")
    return {
        "question_id": question_ids,
        "question": question,
        "candidate_id": ids,
        "candidate": candidate,
    }


def _warn_of_two_labels(table: pa.Table, source: str) -> None:
    """Warns of candidates that are an answer to a question and none to the same question."""
    labels = table.group_by(["question_id", "candidate"]).aggregate(
        [("label", "min"), ("label", "max"), ("question", "min")]
    )
    both = labels.filter(pc.less(labels["label_min"], labels["label_max"]))
    if both.num_rows:
        log.warning(
            "%s: %s candidates have both labels, such as %r of the question %r",
            *(source, f"{both.num_rows:,}"),
            *(both[column][0].as_py()[:80] for column in ("candidate", "question_min")),
        )


def _hashes(texts: pa.Array) -> pa.Array:
    encoded = texts.dictionary_encode()
    values = [
        blake2b(t.encode(), digest_size=8).hexdigest() for t in encoded.dictionary.to_pylist()
    ]
    return pa.array(values, pa.string()).take(encoded.indices)
