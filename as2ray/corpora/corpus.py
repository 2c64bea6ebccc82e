"""A corpus: its splits and files, its reader, its options and its published counts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from as2ray.corpora.reader_utils import whole_questions
from as2ray.errors import (
    ConfigError,
    CorpusError,
    CountMismatchError,
    from_validation_error,
    lookup,
)
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import TableCounts, check_candidate_ids, validate_table

HUB = "hub"
"""The source that means the Hugging Face hub instead of a folder."""

Source = Path | str
"""A folder that holds the raw release, one file of it, or `HUB`."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CorpusOptions:
    """Options of every corpus; a corpus with other options derives its own."""

    hub_revision: str | None = None
    """Commit, branch or ref of the copy on the hub, by default its newest one. A commit pins the
    data; `refs/convert/parquet` is the hub's own conversion of a copy that needs a script."""


Reader = Callable[[str, Source, Any], Iterator[pa.Table]]
"""`reader(split, source, options)` yields the tables of a split in order.

`options` is an instance of the corpus' `options_type`. A table may end inside a question.
"""


@dataclass(frozen=True)
class PublishedCounts:
    """Published size of a split under one question filter."""

    split: str
    question_filter: str
    counts: TableCounts
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the numbers depend on; the other options do not change them."""
    is_private: bool = False
    """Of a release that is not public; `verify_releases` does not expect it."""


class Record(NamedTuple):
    """One record of a raw release as text, not parsed yet."""

    source: str
    """Its file and line or number, for error texts."""
    text: str


class RecordConversion(NamedTuple):
    """Converts a release of pages with marked answers into candidates, record by record.

    The `options_type` of its corpus derives from `as2ray.corpora.page_grades.PageOptions`.
    """

    find_files: Callable[[str, Source], list[Path]]
    """`find_files(split, source)`: the files of a split, in order."""
    read_records: Callable[[Path], Iterator[Record]]
    """`read_records(path)`: the records of a file."""
    convert: Callable[[str, str, Any], pa.Table | None]
    """`convert(text, source, options)`: the candidates of a record with their ids, or None if the
    record has none. `source` is for error texts."""


CollectionReader = Callable[[str, Path], Iterator[pa.Array]]
"""`reader(name, source)` yields the texts of a collection in chunks of large strings."""


class ReleaseCount(NamedTuple):
    """A count of a raw release that its candidates tables do not show, such as its articles."""

    split: str
    name: str
    published: int
    actual: int


def no_collection(name: str, source: Path) -> Iterator[pa.Array]:
    """Yields nothing: the texts of a corpus without collections."""
    yield from ()


def no_release_counts(source: Path) -> Iterator[ReleaseCount]:
    """Yields nothing: the release counts of a corpus that has none."""
    yield from ()


ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tar.bz2")
"""Ends of the names of archives that can be downloaded and unpacked."""


@dataclass(frozen=True)
class Corpus:
    """One data set: its files, how they are read, and the counts that they must have."""

    name: str
    """Also the name of its folder in the data root."""
    description: str
    license: str
    files: Mapping[str, tuple[str, ...]]
    """Possible file names of each split, in order of preference; `.gz` may follow."""
    joined_files: Mapping[str, tuple[tuple[str, ...], ...]] = field(
        default_factory=dict, kw_only=True
    )
    """Possible names of each further file that a split is joined from."""
    reader: Reader
    options_type: type[CorpusOptions] = CorpusOptions
    published_counts: tuple[PublishedCounts, ...] = ()
    count_release: Callable[[Path], Iterator[ReleaseCount]] = no_release_counts
    hub: str | None = None
    """Its name on the Hugging Face hub, if the reader can read that copy."""
    hub_splits: tuple[str, ...] = ()
    """Splits that this copy has; empty if it has all of them."""
    urls: tuple[str, ...] = ()
    """Addresses of the files of the release."""
    homepage: str = ""
    """Page of the files that have no address: it asks to accept a license."""
    conversion: RecordConversion | None = None
    """Record conversion of a release of pages with marked answers."""
    version: str = ""
    """Version of the content, for a corpus that has no files: it tells when tables are outdated."""
    collections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Possible file names of each collection that candidates are retrieved from."""
    collection_reader: CollectionReader = no_collection
    collection_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Published number of texts of a collection, and half of the unit it is rounded to."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.files)

    def is_on_hub(self, split: str) -> bool:
        """Whether the reader can read a split from the hub."""
        return self.hub is not None and (not self.hub_splits or split in self.hub_splits)

    def split_urls(self, name: str) -> tuple[str, ...]:
        """Returns the addresses to download for a split or a collection.

        They are those of its own files, or else of the archives, in which these may be.

        Args:
            name: One of `splits` or of `collections`.
        """
        names = {each for alternatives in self.needed_files(name) for each in alternatives}
        file_urls = tuple(
            u for u in self.urls if PurePosixPath(u).name.removesuffix(".gz") in names
        )
        return file_urls or tuple(url for url in self.urls if url.endswith(ARCHIVES))

    def needed_files(self, name: str) -> list[tuple[str, ...]]:
        """Returns the possible names of each file of a split or a collection.

        Raises:
            ConfigError: There is no such split or collection.
        """
        files = {**self.files, **self.collections}
        return [lookup(files, name, f"{self.name} split"), *self.joined_files.get(name, ())]

    def parse_options(self, options: Mapping[str, Any]) -> CorpusOptions:
        """Validates options by name; an option that is not given has its default.

        Raises:
            ConfigError: The corpus has no such option, or does not accept the value.
        """
        names = [option.name for option in fields(self.options_type)]
        if unknown := sorted(set(options) - set(names)):
            raise ConfigError(f"unknown options {unknown}; corpus {self.name!r} has {names}")
        try:
            return self.options_type(**options)
        except ValidationError as error:
            problem = from_validation_error(error).problem
            raise ConfigError(f"options of corpus {self.name!r}: {problem}") from error

    def read_tables(
        self, split: str, source: Source, options: CorpusOptions | None = None
    ) -> Iterator[pa.Table]:
        """Reads a split as a stream of valid tables, each of which holds whole questions.

        Args:
            split: One of `splits`.
            source: The folder of the release, one file of it, or `HUB`.
            options: An instance of `options_type`; None for the defaults.

        Raises:
            ConfigError: Unknown split.
            CorpusError: A missing or damaged file, or rows that are not a candidates table.
        """
        lookup(self.files, split, f"{self.name} split")
        if source == HUB and self.hub is None:
            problem = f"corpus {self.name!r} is not on the hub"
            raise CorpusError(problem, fix="download the release and give its folder")
        if source == HUB and not self.is_on_hub(split):
            problem = f"{self.hub} on the hub has no split {split!r} of corpus {self.name!r}"
            fix = f"download the release and give its folder, or name one of {self.hub_splits}"
            raise CorpusError(problem, fix)
        source = source if source == HUB else Path(source)
        name = f"{self.name}/{split} from {source}"
        with self._missing_file_named(split, source):
            tables = self.reader(split, source, options or self.options_type())
        return self._whole_questions(_validate_tables(tables, name), split, source)

    def _whole_questions(
        self, tables: Iterable[pa.Table], split: str, source: Source
    ) -> Iterator[pa.Table]:
        with self._missing_file_named(split, source):  # readers may open files when they are read
            name = f"{self.name}/{split} from {source}"
            for table in whole_questions(tables, name):
                check_candidate_ids(table, name)  # a repeated record may be in two of `tables`
                yield table

    def fetch_command(self, split: str, folder: Source) -> str:
        """Returns the command that gets the release of a split, or says where to ask for it.

        Args:
            split: One of `splits`.
            folder: Where the release shall be.
        """
        splits = f"'[\"{split}\"]'"
        if self.is_on_hub(split):
            return (
                f"as2ray corpora fetch --corpus {self.name} --splits {splits}, "
                f"then --data_dir {HUB} (recipes: --data_dirs.{self.name} {HUB})"
            )
        if self.split_urls(split):
            return (
                f"as2ray corpora fetch --corpus {self.name} --splits {splits} --data_dir {folder}"
            )
        return f"see {self.homepage}" if self.homepage else "put the file there"

    @contextmanager
    def _missing_file_named(self, split: str, source: Source) -> Iterator[None]:
        """Adds the corpus and the command that gets it to the error of a missing file."""
        try:
            yield
        except RawFileNotFoundError as error:
            raise RawFileNotFoundError(
                f"corpus {self.name!r}, split {split!r}: {error.problem}",
                fix=f"{self.fetch_command(split, source)}\n  or: {error.fix}",
            ) from error

    def read_collection(self, name: str, source: Source) -> Iterator[list[str]]:
        """Reads the texts of a collection in chunks, each text on one line.

        Args:
            name: One of `collections`.
            source: The folder of the release, or the file.

        Raises:
            ConfigError: Unknown collection.
            CorpusError: A missing or damaged file.
        """
        lookup(self.collections, name, f"{self.name} collection")
        for texts in self.collection_reader(name, Path(source)):
            lines = (" ".join(text.split()) for text in texts.to_pylist())
            yield [line for line in lines if line]

    def check_collection_size(self, name: str, num_texts: int) -> bool:
        """Compares a collection's number of texts with the published one; returns if there is one.

        Raises:
            CountMismatchError: The numbers differ by more than the rounding.
        """
        published, tolerance = self.collection_sizes.get(name, (num_texts, 0))
        if abs(num_texts - published) > tolerance:
            problem = f"{self.name}/{name} has {num_texts:,} texts; published are {published:,}"
            raise CountMismatchError(problem, fix="use the published file, or set verify: false")
        return name in self.collection_sizes

    def published_count(
        self, split: str, question_filter: str, options: CorpusOptions
    ) -> TableCounts | None:
        """Returns the published counts for these options, or None if nothing was published."""
        for entry in self.published_counts:
            has_options = all(getattr(options, k) == v for k, v in entry.options.items())
            if (entry.split, entry.question_filter) == (split, question_filter) and has_options:
                return entry.counts
        return None

    def check_counts(
        self, split: str, question_filter: str, actual: TableCounts, options: CorpusOptions
    ) -> bool:
        """Compares counts with the published ones; returns whether there are published ones.

        Raises:
            CountMismatchError: The counts differ; the message has both.
        """
        published = self.published_count(split, question_filter, options)
        if published is not None and published != actual:
            table = f"{self.name}/{split} ({question_filter}, {options})"
            problem = f"{table} has {actual}; published are {published}"
            raise CountMismatchError(problem, fix="use the published file, or set verify: false")
        return published is not None


def _validate_tables(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    num_rows = 0
    for table in tables:
        # Errors count rows from the start of the table, so the source says where it starts.
        yield validate_table(table, f"{source}, after {num_rows:,} rows" if num_rows else source)
        num_rows += table.num_rows
