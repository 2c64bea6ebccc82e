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

from as2ray.corpora import files
from as2ray.corpora.base import Building, Corpus, Record, Source
from as2ray.errors import CorpusError
from as2ray.records import validate

RECORDS = 64
"""Records that are made together: a page of Natural Questions has some 355 sentences."""

SHOWN = 3
"""Bad records that an error names."""


class Bad(NamedTuple):
    """A record that cannot be read."""

    where: str
    """Its file and line."""
    came: str
    """What is wrong with it."""


Made = tuple[pa.Table | None, list[Bad]]
"""The candidates of some records, where there are any, and those that are bad."""

Spread = Callable[[Building, list[Path], Mapping[str, Any]], Iterator[Made]]
"""Makes all records of some files, in their order."""


@dataclass
class Quarantine:
    """Bad records that were left out, up to a limit."""

    limit: int = 0
    """Most of them; one more ends the build."""
    bad: list[Bad] = field(default_factory=list)
    """Those so far."""

    def take(self, bad: Iterable[Bad]) -> None:
        """Sets records aside.

        Raises:
            CorpusError: They are more than the limit.
        """
        self.bad += bad
        if len(self.bad) > self.limit:
            shown = "; ".join(f"{one.where}: {one.came}" for one in self.bad[:SHOWN])
            raise CorpusError(
                f"{len(self.bad):,} bad records, such as {shown}",
                expected=f"at most {self.limit:,}",
                mend="give the publisher's own files, or allow more bad records to be left out",
            )

    def write(self, path: Path) -> None:
        """Writes them as JSON lines."""
        path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in self.bad))


def here(building: Building, paths: list[Path], options: Mapping[str, Any]) -> Iterator[Made]:
    """A `Spread` in this process."""
    for path in paths:
        records = building.records(path)
        while batch := list(islice(records, RECORDS)):
            yield make(building, batch, options)


def make(building: Building, records: Iterable[Record], options: Mapping[str, Any]) -> Made:
    """The candidates of some records, checked one record at a time."""
    tables, bad = [], []
    for where, text in records:
        try:
            with files.sound(where):
                table = building.make(text, where, **options)
            if table is not None:
                tables.append(validate(table, where))
        except CorpusError as error:
            bad.append(Bad(where, error.came))
    return pa.concat_tables(tables) if tables else None, bad


def strict(
    building: Building, split: str, source: Source, options: Mapping[str, Any]
) -> Iterator[pa.Table]:
    """All tables of a split, made in this process; the first bad record is an error."""
    building.check(**options)
    for path in building.paths(split, source):
        for where, text in building.records(path):
            with files.sound(where):
                table = building.make(text, where, **options)
            if table is not None:
                yield table


def built(corpus: Corpus, quarantine: Quarantine, spread: Spread = here) -> Corpus:
    """The same corpus, its records made by `spread` and its bad ones set aside.

    Raises:
        CorpusError: The corpus has no records to build from.
    """
    building = corpus.building
    if building is None:
        raise CorpusError(
            f"corpus {corpus.name!r}, which is candidates already",
            expected="a corpus of pages with marked answers",
            mend="prepare it as it is: as2ray corpora prepare",
        )

    @wraps(corpus.reader)
    def reader(split: str, source: Source, **options: Any) -> Iterator[pa.Table]:
        building.check(**options)
        paths = [path.resolve() for path in building.paths(split, source)]
        for table, bad in spread(building, paths, options):
            quarantine.take(bad)
            if table is not None:
                yield table

    return replace(corpus, reader=reader)
