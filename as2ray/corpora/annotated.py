"""Lists of candidates that people have labeled; `as2ray annotate` writes the lists."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, CorpusOptions, Source
from as2ray.corpora.reader_utils import candidate_schema
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import from_rows

FILES: Final = {split: (f"{split}.csv",) for split in ("train", "dev", "test")}
SCHEMA: Final = candidate_schema("document_id")
LABELS: Final = {"0": 0, "1": 1}


def read_tables(split: str, source: Source, options: CorpusOptions) -> Iterator[pa.Table]:
    """Reads a split as one table; candidates without a label are left out.

    Args:
        split: One of `FILES`. Fields may also have `;` or tabs between them, as spreadsheets save.
        source: The folder or one file.
        options: The corpus has none.

    Raises:
        CorpusError: A row or the header is damaged, or no row has a label.
    """
    path = raw_files.require_file(Path(source), FILES[split])
    with raw_files.open_text(path) as text:
        records = csv.DictReader(text, delimiter=raw_files.find_delimiter(text), strict=True)
        if missing := [name for name in SCHEMA.names if name not in (records.fieldnames or ())]:
            problem = f"{path} has no column {', '.join(missing)}"
            raise CorpusError(problem, fix="keep the first line that `as2ray annotate` wrote")
        try:
            table = from_rows(_read_rows(records, path), SCHEMA)
        except csv.Error as error:
            place = f"{path}, line {records.line_num + 1:,}"  # the number is of the row before it
            fix = "correct its quotation marks"
            raise CorpusError(f"{place}: {error}", fix=fix) from error
    if not table.num_rows:
        raise CorpusError(f"{path}: no row has a label", fix="write 0 or 1 into the column label")
    yield table


def _read_rows(records: "csv.DictReader[str]", path: Path) -> Iterator[tuple[object, ...]]:
    for record in records:
        place = f"{path}, line {records.line_num:,}"
        if any(record.pop(None, ())):  # type: ignore[call-overload]
            raise CorpusError(f"{place}: more fields than the header has", fix="correct the row")
        label = (record["label"] or "").strip()
        if label and label not in LABELS:
            raise CorpusError(f"{place}: label {label!r}; expected 0, 1 or nothing")
        if label:
            yield tuple(LABELS[label] if name == "label" else record[name] for name in SCHEMA.names)


CORPUS: Final = Corpus(
    name="annotated",
    description="Lists of `as2ray annotate` that people have labeled",
    license="yours",
    files=FILES,
    reader=read_tables,
)
