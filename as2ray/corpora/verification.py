"""Compares the raw releases in the data root with their published counts."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Final, NamedTuple

from as2ray.corpora.corpus import Corpus, PublishedCounts
from as2ray.corpora.registry import all_corpora
from as2ray.errors import CorpusError
from as2ray.tables.filters import filter_table
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import TableCounts, count_table

DATA_ROOT_VARIABLE: Final = "AS2RAY_DATA"
"""Environment variable with the path of the data root."""


class CorpusInfo(NamedTuple):
    """What `as2ray corpora list` prints of a corpus."""

    name: str
    description: str
    license: str
    splits: tuple[str, ...]
    options: Mapping[str, Any]
    """Default of each option."""
    hub: str | None


class CountCheck(NamedTuple):
    """A published count and the actual one."""

    corpus: str
    split: str
    name: str
    """The question filter with the options that the count depends on, or what was counted."""
    published: TableCounts | int
    actual: TableCounts | int | None
    """None if the file cannot be read."""
    error: str = ""
    """Why it cannot be read."""

    @property
    def is_ok(self) -> bool:
        """Whether the two counts are equal."""
        return self.published == self.actual


def data_root() -> Path:
    """Returns `AS2RAY_DATA`, by default `../shared/data`, relative to the current directory."""
    return Path(os.environ.get(DATA_ROOT_VARIABLE) or Path("..") / "shared" / "data")


def list_corpora() -> list[CorpusInfo]:
    """Returns all corpora with their splits and options."""
    return [
        CorpusInfo(c.name, c.description, c.license, c.splits, asdict(c.options_type()), c.hub)
        for c in all_corpora().values()
    ]


def verify_releases(root: str | Path | None = None) -> list[CountCheck]:
    """Compares every published count of every corpus in a data root with the actual one.

    Args:
        root: The data root; by default `data_root()`.
    """
    checks: list[CountCheck] = []
    for corpus in all_corpora().values():
        source = (data_root() if root is None else Path(root)) / corpus.name
        if source.is_dir():
            checks += _check_release_counts(corpus, source)
            checks += _check_table_counts(corpus, source)
    return checks


def _check_release_counts(corpus: Corpus, source: Path) -> Iterator[CountCheck]:
    try:
        for release_count in corpus.count_release(source):
            yield CountCheck(corpus.name, *release_count)
    except CorpusError as error:
        yield CountCheck(corpus.name, "", "release counts", 0, None, error.problem)


def _check_table_counts(corpus: Corpus, source: Path) -> Iterator[CountCheck]:
    groups: dict[tuple[str, str], list[PublishedCounts]] = defaultdict(list)
    for entry in corpus.published_counts:
        if entry.is_private:
            continue
        groups[entry.split, repr(entry.options)].append(entry)
    for entries in groups.values():
        try:
            counts, problem = _count_tables(corpus, entries, source), ""
        except RawFileNotFoundError:
            continue
        except CorpusError as error:
            counts, problem = {}, error.problem
        for entry in entries:
            options = (f"{name}={value}" for name, value in entry.options.items())
            name = " ".join([entry.question_filter, *options])
            actual = counts.get(entry.question_filter)
            yield CountCheck(corpus.name, entry.split, name, entry.counts, actual, problem)


def _count_tables(
    corpus: Corpus, entries: list[PublishedCounts], source: Path
) -> dict[str, TableCounts]:
    """Counts a split under the question filters of all entries in one pass over the source."""
    counts = {entry.question_filter: TableCounts(0, 0, 0) for entry in entries}
    options = corpus.parse_options(entries[0].options)
    for table in corpus.read_tables(entries[0].split, source, options):
        for question_filter, total in counts.items():
            counts_of_table = count_table(filter_table(table, question_filter))
            counts[question_filter] = add_counts(total, counts_of_table)
    return counts


def add_counts(a: TableCounts, b: TableCounts) -> TableCounts:
    """Adds the counts of two tables that have no question in common."""
    sums = (x + y for x, y in zip(astuple(a), astuple(b)))
    return TableCounts(*sums)
