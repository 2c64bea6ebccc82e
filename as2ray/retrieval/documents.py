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

from as2ray.corpora import files
from as2ray.errors import CorpusError
from as2ray.retrieval.markup import Block, html, markdown, plain

log = logging.getLogger(__name__)

MARKUP: Final[Mapping[str, Callable[[str], tuple[str, list[Block]]]]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ""), plain),
    **dict.fromkeys((".md", ".markdown"), markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), html),
}
"""How a file that is one document is read, by its suffix."""

TABLES: Final = (".jsonl", ".jsonl.gz", ".parquet")
"""Endings of files that hold one document a row."""


class Document(NamedTuple):
    """A text with its place."""

    id: str
    """Path inside the folder, or the row's own id."""
    title: str
    blocks: tuple[Block, ...]
    """Paragraphs in order, each under the heading above it."""


@dataclass(frozen=True)
class Columns:
    """What the columns of a table (or the keys of a JSON line) are called."""

    text: str = "text"
    """The document."""
    id: str = "id"
    """Its name; without such a column the row's number."""
    title: str = "title"
    """Its heading, where there is one."""


class Piece(NamedTuple):
    """What one reader takes: a file, or a row group of one."""

    path: str
    group: int | None = None
    """Number of the row group of a Parquet file."""


@dataclass
class Skipped:
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


def pieces(source: str | Path) -> list[Piece]:
    """What there is to read under a folder, or in a file, in order of names.

    Raises:
        CorpusError: Nothing is there.
    """
    root = Path(source)
    if not root.exists():
        raise CorpusError(
            f"{root}: no such folder or file",
            expected="a folder of documents, or a table of them",
            mend="correct the path",
        )
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    seen = [p for p in paths if p == root or not _hidden(p.relative_to(root))]
    if not seen:
        raise CorpusError(
            f"{root}: an empty folder",
            expected=f"documents: {sorted(s for s in MARKUP if s)}, {list(TABLES)}",
            mend="put documents there, or give another folder",
        )
    return [piece for path in seen for piece in _pieces(path)]


def read(
    parts: Iterable[Piece], root: str | Path, columns: Columns, skipped: Skipped
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
        name = _readable(path.name if path == base else path.relative_to(base).as_posix())
        table = path.name.lower().endswith(TABLES)
        found = _rows(piece, name, columns) if table else _one(path, name, skipped)
        for document in found:
            said = "".join(block.text for block in document.blocks)
            if not said:
                skipped.add("without text", _readable(document.id))
            elif _broken(document.id + document.title + said):
                skipped.add("with broken characters", _readable(document.id))
            else:
                yield document


def _readable(name: str) -> str:
    """A name in Unicode: one of a file may hold any bytes."""
    return name.encode(errors="backslashreplace").decode()


def _broken(text: str) -> bool:
    """Whether a text is no Unicode: half a surrogate pair, as JSON can bring, is none."""
    return text != _readable(text)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _pieces(path: Path) -> list[Piece]:
    if path.suffix.lower() != ".parquet":
        return [Piece(str(path))]
    with files.damage(path):
        return [Piece(str(path), g) for g in range(pq.read_metadata(path).num_row_groups)]


def _one(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix not in MARKUP:
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
    title, blocks = MARKUP[suffix](text)
    yield Document(name, title or Path(name).stem, tuple(blocks))


def _rows(piece: Piece, name: str, columns: Columns) -> Iterator[Document]:
    path = Path(piece.path)
    if piece.group is None:
        rows: Iterator[tuple[int, Any]] = files.json_lines(path)
    else:
        with files.damage(path), files.sound(str(path)):
            file = pq.ParquetFile(path)
            before = sum(file.metadata.row_group(g).num_rows for g in range(piece.group))
            names = set(file.schema_arrow.names)
            files.need(dict.fromkeys(names), [columns.text], str(path))
            wanted = sorted(names & {columns.text, columns.id, columns.title})
            table: pa.Table = file.read_row_group(piece.group, columns=wanted)
            rows = enumerate(table.to_pylist(), before + 1)
    for number, row in rows:
        (text,) = files.need(row, [columns.text], f"{path}, row {number:,}")
        if not isinstance(text, str | None):
            raise CorpusError(
                f"{path}, row {number:,}: {columns.text!r} is {type(text).__name__}",
                expected="text",
                mend="name the column that holds the text",
            )
        _, blocks = plain(text or "")
        id = row.get(columns.id)
        title = row.get(columns.title) or ""
        yield Document(f"{name}#{number}" if id is None else str(id), str(title), tuple(blocks))
