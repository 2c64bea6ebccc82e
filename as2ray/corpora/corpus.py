"""What a corpus is: a name, its splits and files, one reader, and the numbers it must have.

Knows the candidates table. Must not know any particular corpus, nor where prepared files go.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from jsonargparse import ArgumentError, ArgumentParser

from as2ray.errors import CorpusError, CountMismatchError
from as2ray.tables.schema import TableCounts, question_offsets, split_by_question, validate_table

HUB = "hub"
"""The source that stands for the Hugging Face hub instead of a folder."""

Source = Path | str
"""A folder that holds the raw release, one file of it, or `HUB`."""

Reader = Callable[..., Iterator[pa.Table]]
"""`reader(split, source, *, option=default, ...)` yields the tables of a split in order.

Its keyword-only arguments are the corpus' options. A table may end inside a question.
"""


@dataclass(frozen=True)
class PublishedCounts:
    """The size that a split has under one filter, as it was published."""

    split: str
    question_filter: str
    counts: TableCounts
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options the numbers depend on; they hold for any value of the others."""


class Record(NamedTuple):
    """One record of a raw release, not read yet."""

    source: str
    """Its file and line or number, for errors."""
    text: str


class RecordConversion(NamedTuple):
    """How a release of pages with marked answers becomes candidates, a record at a time."""

    find_files: Callable[[str, Source], list[Path]]
    """The files of a split, in order."""
    read_records: Callable[[Path], Iterator[Record]]
    """The records of a file."""
    convert: Callable[..., pa.Table | None]
    """`make(text, where, **options)`: the candidates of a record, ids included; None of one that
    has nothing to give. Takes the reader's options, all of them."""
    check: Callable[..., None]
    """`check(**options)`: refuses options before anything is read."""


class ReleaseCount(NamedTuple):
    """Something a raw release holds that no candidates table shows, such as its articles."""

    split: str
    name: str
    published: int
    actual: int


def no_release_counts(source: Path) -> Iterator[ReleaseCount]:
    """The inventory of a corpus that has nothing to count beyond its candidates."""
    yield from ()


@dataclass(frozen=True)
class Corpus:
    """One dataset: where its files are called what, how they are read, what they must count."""

    name: str
    """Also the name of its folder under the data root."""
    description: str
    license: str
    files: Mapping[str, tuple[str, ...]]
    """For each split the file names it may have, looked for in this order (also with `.gz`)."""
    reader: Reader
    published_counts: tuple[PublishedCounts, ...] = ()
    count_release: Callable[[Path], Iterator[ReleaseCount]] = no_release_counts
    hub: str | None = None
    """Its name on the Hugging Face hub, where the reader knows that copy."""
    conversion: RecordConversion | None = None
    """How its records become candidates, where it is a release of pages with marked answers."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self.files)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the reader with their defaults."""
        parameters = inspect.signature(self.reader).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options: those given, the defaults for the rest.

        Raises:
            CorpusError: An option that the reader does not have, or of another type.
        """
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            raise CorpusError(
                f"unknown options {unknown} for corpus {self.name!r}"
                f"; expected some of {sorted(self.options) or 'none at all'}",
                fix="correct the spelling or leave the option out",
            )
        parser = ArgumentParser(exit_on_error=False)
        parser.add_function_arguments(self.reader, as_group=False, skip={"split", "source"})
        try:
            if unset := [k for k, v in options.items() if v is None is not self.options[k]]:
                raise ArgumentError(None, f"no value for {unset}")
            found = vars(parser.parse_object(dict(options)))
        except ArgumentError as error:
            raise CorpusError(
                f"options {dict(options)} for corpus {self.name!r}: {error}"
                f"; expected values like the defaults {self.options}",
            ) from error
        # A recipe in YAML knows lists alone; options compare as tuples.
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}

    def read_tables(self, split: str, source: Source, **options: Any) -> Iterator[pa.Table]:
        """The candidates of a split as a stream of valid tables; no question is in two of them.

        Raises:
            CorpusError: An unknown split or option, a missing or damaged file, or rows that
                `as2ray.tables.schema.validate` refuses.
        """
        if split not in self.files:
            raise CorpusError(
                f"unknown split {split!r} of corpus {self.name!r}"
                f"; expected one of {list(self.splits)}",
            )
        resolved = self.resolve(options)
        if source == HUB and self.hub is None:
            raise CorpusError(
                f"corpus {self.name!r} from the hub; expected a folder with the raw release",
                fix="fetch the release and give its folder",
            )
        where = source if source == HUB else Path(source)
        named = f"{self.name}/{split} from {source}"
        return _require_whole_questions(
            _validate_tables(self.reader(split, where, **resolved), named), named
        )

    def published_count(
        self, split: str, question_filter: str, options: Mapping[str, Any]
    ) -> TableCounts | None:
        """The published counts that hold for these options, where there are any."""
        resolved = self.resolve(options)
        for entry in self.published_counts:
            depends = all(resolved[k] == v for k, v in entry.options.items())
            if (entry.split, entry.question_filter) == (split, question_filter) and depends:
                return entry.counts
        return None

    def check_counts(
        self, split: str, question_filter: str, actual: TableCounts, options: Mapping[str, Any]
    ) -> bool:
        """Whether there are published counts, which then agree.

        Raises:
            CountMismatchError: They do not; both stand in the message.
        """
        published = self.published_count(split, question_filter, options)
        if published is not None and published != actual:
            raise CountMismatchError(
                f"{self.name}/{split} ({question_filter}, {dict(options)}): {actual}"
                f"; expected {published}, as published",
                fix="give the publisher's own file; to read another version, pass verify=False",
            )
        return published is not None


def _validate_tables(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    first = 0
    for table in tables:
        # Rows are told from the start of the piece, so the error says where the piece starts.
        yield validate_table(table, f"{source}, after {first:,} rows" if first else source)
        first += table.num_rows


def _require_whole_questions(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    seen: set[str] = set()
    for table in split_by_question(tables):
        ids = table["question_id"].take(pa.array(question_offsets(table["question_id"])))
        new = set(ids.to_pylist())
        if again := new & seen or len(new) < len(ids):
            raise CorpusError(
                f"{source}: rows of one question stand apart ({again or 'inside one piece'})"
                "; expected all rows of a question one after the other",
                fix="group the rows of the source by question",
            )
        seen |= new
        yield table
