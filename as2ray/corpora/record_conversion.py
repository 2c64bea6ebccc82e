"""Converts a corpus record by record, in parallel if wanted, and sets bad records aside."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, Record, RecordConversion, Source
from as2ray.corpora.page_grades import PageOptions
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import batched, validate_table

RECORDS_PER_BATCH = 64
"""Records that are converted together. A page of Natural Questions has about 355 sentences."""

MAX_REPORTED_RECORDS = 3
"""Bad records that an error text names."""


class RejectedRecord(NamedTuple):
    """A record that cannot be converted."""

    source: str
    """Its file and line."""
    problem: str
    """What is wrong with it."""


ConversionResult = tuple[pa.Table | None, list[RejectedRecord]]
"""The candidates of some records (None if there are none) and the records that are bad."""

ConvertAll = Callable[[RecordConversion, list[Path], PageOptions], Iterator[ConversionResult]]
"""Converts all records of some files, in order."""


@dataclass
class Quarantine:
    """Bad records that were left out, up to a limit."""

    max_rejected: int = 0
    """Maximum number of bad records; one more stops the conversion."""
    rejected: list[RejectedRecord] = field(default_factory=list)

    def add(self, records: Iterable[RejectedRecord]) -> None:
        """Adds bad records.

        Raises:
            CorpusError: There are now more than `max_rejected`.
        """
        self.rejected += records
        if len(self.rejected) > self.max_rejected:
            examples = "; ".join(map(": ".join, self.rejected[:MAX_REPORTED_RECORDS]))
            problem = f"{len(self.rejected):,} bad records, such as {examples}"
            fix = f"use the published files, or allow more than {self.max_rejected:,} bad records"
            raise CorpusError(problem, fix)

    def write(self, path: Path) -> None:
        """Writes the bad records as JSON lines."""
        path.write_text("".join(json.dumps(record._asdict()) + "\n" for record in self.rejected))


def convert_in_process(
    conversion: RecordConversion, paths: list[Path], options: PageOptions
) -> Iterator[ConversionResult]:
    """Converts all records of some files in this process."""
    for path in paths:
        for batch in batched(conversion.read_records(path), RECORDS_PER_BATCH):
            yield convert_records(conversion, batch, options)


def convert_records(
    conversion: RecordConversion, records: Iterable[Record], options: PageOptions
) -> ConversionResult:
    """Converts some records; each is validated alone, so that a bad one does not stop the rest."""
    tables, rejected = [], []
    for record in records:
        try:
            if (table := _convert(conversion, record, options)) is not None:
                tables.append(validate_table(table, record.source))
        except CorpusError as error:
            rejected.append(RejectedRecord(record.source, error.problem))
    return pa.concat_tables(tables) if tables else None, rejected


def convert_strictly(
    conversion: RecordConversion, split: str, source: Source, options: PageOptions
) -> Iterator[pa.Table]:
    """Converts all records of a split in this process; the first bad record is an error."""
    for path in conversion.find_files(split, source):
        for record in conversion.read_records(path):
            if (table := _convert(conversion, record, options)) is not None:
                yield table


def _convert(conversion: RecordConversion, record: Record, options: PageOptions) -> pa.Table | None:
    with raw_files.value_errors(record.source):
        return conversion.convert(record.text, record.source, options)


def with_quarantine(
    corpus: Corpus, quarantine: Quarantine, convert_all: ConvertAll = convert_in_process
) -> Corpus:
    """Returns the corpus with a reader that collects bad records instead of stopping at one.

    Args:
        corpus: A corpus with a `conversion`.
        quarantine: Where the bad records go.
        convert_all: Converts the records, in this process or elsewhere.

    Raises:
        CorpusError: The corpus has no `conversion`.
    """
    conversion = corpus.conversion
    if conversion is None:
        problem = f"corpus {corpus.name!r} is candidates already, not pages with marked answers"
        raise CorpusError(problem, fix="prepare it as it is: as2ray corpora prepare")

    def reader(split: str, source: Source, options: PageOptions) -> Iterator[pa.Table]:
        paths = [path.resolve() for path in conversion.find_files(split, source)]
        for table, rejected in convert_all(conversion, paths, options):
            quarantine.add(rejected)
            if table is not None:
                yield table

    return replace(corpus, reader=reader)
