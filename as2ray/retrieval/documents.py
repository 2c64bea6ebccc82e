"""Documents read from a folder, a file or a table: paragraphs of prose under their headings.

Knows files and their formats. Must not know sentences, indexes or models.

A folder's files are read in the order of their names; hidden ones are left alone. What cannot be
read is skipped, counted by its reason and told at the end: a folder of real documents always holds
a picture or an empty page.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError
from as2ray.retrieval.text_extraction import TextBlock, parse_html, parse_markdown, parse_plain_text
from as2ray.tables import raw_files

log = logging.getLogger(__name__)

PARSERS: Final[Mapping[str, Callable[[str], tuple[str, list[TextBlock]]]]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ""), parse_plain_text),
    **dict.fromkeys((".md", ".markdown"), parse_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), parse_html),
}
"""How a file that is one document is read, by its suffix."""

TABLE_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
"""Endings of files that hold one document a row."""


class Document(NamedTuple):
    """A text with its place."""

    id: str
    """Path inside the folder, or the row's own id."""
    title: str
    blocks: tuple[TextBlock, ...]
    """Paragraphs in order, each under the heading above it."""


@dataclass(frozen=True)
class DocumentColumns:
    """What the columns of a table (or the keys of a JSON line) are called."""

    text: str = "text"
    """The document."""
    id: str = "id"
    """Its name; without such a column the row's number."""
    title: str = "title"
    """Its heading, where there is one."""


class FilePart(NamedTuple):
    """What one reader takes: a file, or a row group of one."""

    path: str
    row_group: int | None = None
    """Number of the row group of a Parquet file."""


@dataclass
class SkippedDocuments:
    """What was not read, by reason, with an example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        """One more."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def __str__(self) -> str:
        parts = (f"{n:,} {why} (such as {self.examples[why]})" for why, n in self.counts.items())
        return ", ".join(parts) or "nothing skipped"


def list_parts(documents: str | Path) -> list[FilePart]:
    """What there is to read under a folder, or in a file, in order of names.

    Raises:
        CorpusError: Nothing is there.
    """
    root = Path(documents)
    if not root.exists():
        raise CorpusError(
            f"{root}: no such folder or file; expected a folder of documents, or a table of them",
        )
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    seen = [p for p in paths if p == root or not _is_hidden(p.relative_to(root))]
    if not seen:
        raise CorpusError(
            f"{root}: an empty folder"
            f"; expected documents: {sorted(s for s in PARSERS if s)}, {list(TABLE_SUFFIXES)}",
            fix="put documents there, or give another folder",
        )
    return [piece for path in seen for piece in _list_file_parts(path)]


def read_documents(
    parts: Iterable[FilePart], root: str | Path, columns: DocumentColumns, skipped: SkippedDocuments
) -> Iterator[Document]:
    """The documents of some pieces in order; what cannot be read goes into `skipped`.

    Args:
        parts: Of `pieces`.
        root: The folder or file that they were found under, which ids leave out.
        columns: Names of a table's columns.
        skipped: Counts what is left out.
    """
    for piece in parts:
        path, base = Path(piece.path), Path(root)
        name = _to_valid_unicode(path.name if path == base else path.relative_to(base).as_posix())
        table = path.name.lower().endswith(TABLE_SUFFIXES)
        found = _read_table(piece, name, columns) if table else _read_file(path, name, skipped)
        for document in found:
            said = "".join(block.text for block in document.blocks)
            if not said:
                skipped.add("without text", _to_valid_unicode(document.id))
            elif _has_lone_surrogates(document.id + document.title + said):
                skipped.add("with broken characters", _to_valid_unicode(document.id))
            else:
                yield document


def _to_valid_unicode(text: str) -> str:
    """A name in Unicode: one of a file may hold any bytes."""
    return text.encode(errors="backslashreplace").decode()


def _has_lone_surrogates(text: str) -> bool:
    """Whether a text is no Unicode: half a surrogate pair, as JSON can bring, is none."""
    return text != _to_valid_unicode(text)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _list_file_parts(path: Path) -> list[FilePart]:
    if path.suffix.lower() != ".parquet":
        return [FilePart(str(path))]
    with raw_files.file_errors(path):
        return [FilePart(str(path), g) for g in range(pq.read_metadata(path).num_row_groups)]


def _read_file(path: Path, name: str, skipped: SkippedDocuments) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix not in PARSERS:
        skipped.add("of another kind", name)
        return
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped.add("binary or not UTF-8", name)
        return
    except OSError:
        skipped.add("unreadable", name)
        return
    if b"\0" in content:
        skipped.add("binary or not UTF-8", name)
        return
    title, blocks = PARSERS[suffix](text)
    yield Document(name, title or Path(name).stem, tuple(blocks))


def _read_table(part: FilePart, name: str, columns: DocumentColumns) -> Iterator[Document]:
    path = Path(part.path)
    if part.row_group is None:
        rows: Iterator[tuple[int, Any]] = raw_files.read_json_lines(path)
    else:
        with raw_files.file_errors(path), raw_files.value_errors(str(path)):
            file = pq.ParquetFile(path)
            before = sum(file.metadata.row_group(g).num_rows for g in range(part.row_group))
            names = set(file.schema_arrow.names)
            raw_files.require_keys(dict.fromkeys(names), [columns.text], str(path))
            wanted = sorted(names & {columns.text, columns.id, columns.title})
            table: pa.Table = file.read_row_group(part.row_group, columns=wanted)
            rows = enumerate(table.to_pylist(), before + 1)
    for number, row in rows:
        (text,) = raw_files.require_keys(row, [columns.text], f"{path}, row {number:,}")
        if not isinstance(text, str | None):
            raise CorpusError(
                f"{path}, row {number:,}: {columns.text!r} is {type(text).__name__}; expected text",
                fix="name the column that holds the text",
            )
        _, blocks = parse_plain_text(text or "")
        id = row.get(columns.id)
        title = row.get(columns.title) or ""
        yield Document(f"{name}#{number}" if id is None else str(id), str(title), tuple(blocks))
