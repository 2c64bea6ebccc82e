"""Which raw releases lie in the data root, and whether they count what was published.

Knows the registry and a root folder with one folder a corpus. Must not know how any is read.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from as2ray.corpora.base import Corpus, Published
from as2ray.corpora.files import SourceMissingError, present
from as2ray.corpora.registry import CORPORA
from as2ray.errors import CorpusError
from as2ray.filters import apply_filter
from as2ray.records import Counts, count

VARIABLE: Final = "AS2RAY_DATA"
"""The environment variable that names the data root."""


class Listing(NamedTuple):
    """What a user can ask of a corpus."""

    name: str
    about: str
    licence: str
    splits: tuple[str, ...]
    options: Mapping[str, Any]
    hub: str | None


class Check(NamedTuple):
    """One published number beside the one that was counted."""

    corpus: str
    split: str
    what: str
    """The filter, with the options that the number depends on; or what was counted."""
    published: Counts | int
    found: Counts | int | None
    """None where the file cannot be read."""
    problem: str = ""
    """Why it cannot."""

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return self.published == self.found


def data_root() -> Path:
    """`AS2RAY_DATA`, or `../shared/data` beside the checkout (the current directory)."""
    return Path(os.environ.get(VARIABLE) or Path("..") / "shared" / "data")


def list_corpora() -> list[Listing]:
    """Every corpus that as2ray reads."""
    return [
        Listing(c.name, c.about, c.licence, c.splits, c.options, c.hub) for c in CORPORA.values()
    ]


def found(root: str | Path | None = None) -> dict[str, tuple[str, ...]]:
    """The corpora in a data root, each with those of its splits whose file is there."""
    base = data_root() if root is None else Path(root)
    splits = {
        c.name: tuple(s for s in c.splits if present(base / c.name, c.files[s]))
        for c in CORPORA.values()
    }
    return {name: those for name, those in splits.items() if those}


def verify_all(root: str | Path | None = None) -> list[Check]:
    """Every published number of every corpus in a data root, beside the counted one."""
    base = data_root() if root is None else Path(root)
    return [
        check
        for corpus in CORPORA.values()
        if (base / corpus.name).is_dir()
        for check in [*_items(corpus, base), *_counts(corpus, base)]
    ]


def _items(corpus: Corpus, root: Path) -> Iterator[Check]:
    try:
        for item in corpus.inventory(root / corpus.name):
            yield Check(corpus.name, *item)
    except CorpusError as error:
        yield Check(corpus.name, "", "inventory", 0, None, error.came)


def _counts(corpus: Corpus, root: Path) -> Iterator[Check]:
    groups: dict[tuple[str, str], list[Published]] = defaultdict(list)
    for entry in corpus.published:
        groups[entry.split, repr(entry.options)].append(entry)
    for entries in groups.values():
        try:
            tallies = _tallies(corpus, entries, root / corpus.name)
            problem = ""
        except SourceMissingError:
            continue
        except CorpusError as error:
            tallies, problem = {}, error.came
        for e in entries:
            what = " ".join([e.filter, *(f"{k}={v}" for k, v in e.options.items())])
            yield Check(corpus.name, e.split, what, e.counts, tallies.get(e.filter), problem)


def _tallies(corpus: Corpus, entries: list[Published], source: Path) -> dict[str, Counts]:
    # One pass over the source, however many filters are counted and however large it is.
    sums = {e.filter: Counts(0, 0, 0) for e in entries}
    for table in corpus.pieces(entries[0].split, source, **entries[0].options):
        for name, so_far in sums.items():
            sums[name] = added(so_far, count(apply_filter(table, name)))
    return sums


def added(a: Counts, b: Counts) -> Counts:
    """The counts of two pieces that share no question."""
    return Counts(a.questions + b.questions, a.pairs + b.pairs, a.positives + b.positives)
