"""Which raw releases lie in the data root, and whether they count what was published.

Knows the registry and a root folder with one folder a corpus. Must not know how any is read.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from as2ray.corpora.corpus import Corpus, PublishedCounts
from as2ray.corpora.registry import CORPORA
from as2ray.errors import CorpusError
from as2ray.tables.filters import filter_table
from as2ray.tables.raw_files import RawFileNotFoundError, find_file
from as2ray.tables.schema import TableCounts, count_table

DATA_ROOT_VARIABLE: Final = "AS2RAY_DATA"
"""The environment variable that names the data root."""


class CorpusInfo(NamedTuple):
    """What a user can ask of a corpus."""

    name: str
    description: str
    license: str
    splits: tuple[str, ...]
    options: Mapping[str, Any]
    hub: str | None


class CountCheck(NamedTuple):
    """One published number beside the one that was counted."""

    corpus: str
    split: str
    name: str
    """The filter, with the options that the number depends on; or what was counted."""
    published: TableCounts | int
    actual: TableCounts | int | None
    """None where the file cannot be read."""
    error: str = ""
    """Why it cannot."""

    @property
    def is_ok(self) -> bool:
        """Whether the two agree."""
        return self.published == self.actual


def data_root() -> Path:
    """`AS2RAY_DATA`, or `../shared/data` beside the checkout (the current directory)."""
    return Path(os.environ.get(DATA_ROOT_VARIABLE) or Path("..") / "shared" / "data")


def list_corpora() -> list[CorpusInfo]:
    """Every corpus that as2ray reads."""
    return [
        CorpusInfo(c.name, c.description, c.license, c.splits, c.options, c.hub)
        for c in CORPORA.values()
    ]


def found(root: str | Path | None = None) -> dict[str, tuple[str, ...]]:
    """The corpora in a data root, each with those of its splits whose file is there."""
    base = data_root() if root is None else Path(root)
    splits = {
        c.name: tuple(s for s in c.splits if find_file(base / c.name, c.files[s]))
        for c in CORPORA.values()
    }
    return {name: those for name, those in splits.items() if those}


def verify_releases(root: str | Path | None = None) -> list[CountCheck]:
    """Every published number of every corpus in a data root, beside the counted one."""
    base = data_root() if root is None else Path(root)
    return [
        check
        for corpus in CORPORA.values()
        if (base / corpus.name).is_dir()
        for check in [*_check_release_counts(corpus, base), *_check_table_counts(corpus, base)]
    ]


def _check_release_counts(corpus: Corpus, root: Path) -> Iterator[CountCheck]:
    try:
        for item in corpus.count_release(root / corpus.name):
            yield CountCheck(corpus.name, *item)
    except CorpusError as error:
        yield CountCheck(corpus.name, "", "inventory", 0, None, error.problem)


def _check_table_counts(corpus: Corpus, root: Path) -> Iterator[CountCheck]:
    groups: dict[tuple[str, str], list[PublishedCounts]] = defaultdict(list)
    for entry in corpus.published_counts:
        groups[entry.split, repr(entry.options)].append(entry)
    for entries in groups.values():
        try:
            tallies = _count_tables(corpus, entries, root / corpus.name)
            problem = ""
        except RawFileNotFoundError:
            continue
        except CorpusError as error:
            tallies, problem = {}, error.problem
        for e in entries:
            what = " ".join([e.question_filter, *(f"{k}={v}" for k, v in e.options.items())])
            yield CountCheck(
                corpus.name, e.split, what, e.counts, tallies.get(e.question_filter), problem
            )


def _count_tables(
    corpus: Corpus, entries: list[PublishedCounts], source: Path
) -> dict[str, TableCounts]:
    # One pass over the source, however many filters are counted and however large it is.
    sums = {e.question_filter: TableCounts(0, 0, 0) for e in entries}
    for table in corpus.read_tables(entries[0].split, source, **entries[0].options):
        for name, so_far in sums.items():
            sums[name] = add_counts(so_far, count_table(filter_table(table, name)))
    return sums


def add_counts(a: TableCounts, b: TableCounts) -> TableCounts:
    """The counts of two pieces that share no question."""
    return TableCounts(
        a.num_questions + b.num_questions,
        a.num_pairs + b.num_pairs,
        a.num_positives + b.num_positives,
    )
