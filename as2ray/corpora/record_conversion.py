"""Building candidates record by record, so that many records can be made at once, and bad ones
set aside.

Knows records as text and corpora that say how one becomes a table. Must not know any particular
corpus, nor what does the work: this process, or the tasks of a cluster.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, Record, RecordConversion, Source
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import validate_table

RECORDS_PER_BATCH = 64
"""Records that are made together: a page of Natural Questions has some 355 sentences."""

MAX_REPORTED_RECORDS = 3
"""Bad records that an error names."""


class RejectedRecord(NamedTuple):
    """A record that cannot be read."""

    source: str
    """Its file and line."""
    problem: str
    """What is wrong with it."""


ConversionResult = tuple[pa.Table | None, list[RejectedRecord]]
"""The candidates of some records, where there are any, and those that are bad."""

ConvertAll = Callable[[RecordConversion, list[Path], Mapping[str, Any]], Iterator[ConversionResult]]
"""Makes all records of some files, in their order."""


@dataclass
class Quarantine:
    """Bad records that were left out, up to a limit."""

    max_rejected: int = 0
    """Most of them; one more ends the build."""
    rejected: list[RejectedRecord] = field(default_factory=list)
    """Those so far."""

    def add(self, records: Iterable[RejectedRecord]) -> None:
        """Sets records aside.

        Raises:
            CorpusError: They are more than the limit.
        """
        self.rejected += records
        if len(self.rejected) > self.max_rejected:
            shown = "; ".join(
                f"{one.source}: {one.problem}" for one in self.rejected[:MAX_REPORTED_RECORDS]
            )
            raise CorpusError(
                f"{len(self.rejected):,} bad records, such as {shown}"
                f"; expected at most {self.max_rejected:,}",
                fix="give the publisher's own files, or allow more bad records to be left out",
            )

    def write(self, path: Path) -> None:
        """Writes them as JSON lines."""
        path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in self.rejected))


def convert_in_process(
    conversion: RecordConversion, paths: list[Path], options: Mapping[str, Any]
) -> Iterator[ConversionResult]:
    """A `Spread` in this process."""
    for path in paths:
        records = conversion.read_records(path)
        while batch := list(islice(records, RECORDS_PER_BATCH)):
            yield convert_records(conversion, batch, options)


def convert_records(
    conversion: RecordConversion, records: Iterable[Record], options: Mapping[str, Any]
) -> ConversionResult:
    """The candidates of some records, checked one record at a time."""
    tables, bad = [], []
    for where, text in records:
        try:
            with raw_files.value_errors(where):
                table = conversion.convert(text, where, **options)
            if table is not None:
                tables.append(validate_table(table, where))
        except CorpusError as error:
            bad.append(RejectedRecord(where, error.problem))
    return pa.concat_tables(tables) if tables else None, bad


def convert_strictly(
    conversion: RecordConversion, split: str, source: Source, options: Mapping[str, Any]
) -> Iterator[pa.Table]:
    """All tables of a split, made in this process; the first bad record is an error."""
    conversion.check(**options)
    for path in conversion.find_files(split, source):
        for where, text in conversion.read_records(path):
            with raw_files.value_errors(where):
                table = conversion.convert(text, where, **options)
            if table is not None:
                yield table


def with_quarantine(
    corpus: Corpus, quarantine: Quarantine, convert_all: ConvertAll = convert_in_process
) -> Corpus:
    """The same corpus, its records made by `spread` and its bad ones set aside.

    Raises:
        CorpusError: The corpus has no records to build from.
    """
    building = corpus.conversion
    if building is None:
        raise CorpusError(
            f"corpus {corpus.name!r}, which is candidates already"
            "; expected a corpus of pages with marked answers",
            fix="prepare it as it is: as2ray corpora prepare",
        )

    @wraps(corpus.reader)
    def reader(split: str, source: Source, **options: Any) -> Iterator[pa.Table]:
        building.check(**options)
        paths = [path.resolve() for path in building.find_files(split, source)]
        for table, bad in convert_all(building, paths, options):
            quarantine.add(bad)
            if table is not None:
                yield table

    return replace(corpus, reader=reader)
