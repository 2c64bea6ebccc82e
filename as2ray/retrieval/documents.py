"""Reads documents from a folder, a file or a table, as paragraphs of prose under their headings.

The files of a folder are read in the order of their names, without hidden files. Unreadable
documents are skipped and counted by reason, because a folder of real documents always contains a
picture or an empty page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as pq
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.errors import CorpusError
from as2ray.retrieval.text_extraction import (
    TextBlock,
    parse_html,
    parse_markdown,
    parse_plain_text,
    read_office_file,
    read_pdf,
)
from as2ray.tables import raw_files
from as2ray.text.input_checks import SURROGATE

PARSERS: Final[Mapping[str, Callable[[str], tuple[str, list[TextBlock]]]]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ""), parse_plain_text),
    **dict.fromkeys((".md", ".markdown"), parse_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), parse_html),
}
"""Parsers of files that hold one document, by the suffix of the file."""

READERS: Final[Mapping[str, Callable[[Path], tuple[str, list[TextBlock]]]]] = {
    ".pdf": read_pdf,
    **dict.fromkeys((".docx", ".pptx", ".xlsx"), read_office_file),
}
"""Readers of files that are no text, by the suffix of the file."""

TABLE_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of files that hold one document per row."""


class Document(NamedTuple):
    """A document."""

    id: str
    """Path relative to the folder, or the id of a table's row."""
    title: str
    blocks: tuple[TextBlock, ...]
    """Paragraphs in order, each with the heading above it."""


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DocumentColumns:
    """Names of a table's columns, or of the keys of a JSON line."""

    text: str = "text"
    """The document."""
    id: str = "id"
    """The id of the document; without such a column, the number of the row."""
    title: str = "title"
    """The title of the document, if there is such a column."""


class FilePart(NamedTuple):
    """A file or a row group of a file, which is read as a unit."""

    path: str
    name: str
    """Path relative to the folder, in valid Unicode: the name of a file may contain any bytes."""
    row_group: int | None = None
    """Index of the row group of a Parquet file."""


@dataclass
class SkippedDocuments:
    """Number of skipped documents by reason, with an example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        """Counts a skipped document."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, _to_valid_unicode(example))

    def __str__(self) -> str:
        parts = (
            f"{count:,} {reason} (such as {self.examples[reason]})"
            for reason, count in self.counts.items()
        )
        return ", ".join(parts) or "nothing skipped"


def list_parts(documents: str | Path) -> list[FilePart]:
    """Lists the files and row groups of a folder, or of a file, in order of names.

    Raises:
        CorpusError: There is nothing to read.
    """
    root = Path(documents)
    if not root.exists():
        raise CorpusError(f"{root}: no such folder or file")
    if root.is_file():
        return _list_file_parts(root, root.name)
    parts: list[FilePart] = []
    for path in sorted(root.rglob("*")):
        names = path.relative_to(root).parts
        if path.is_file() and not any(name.startswith(".") for name in names):
            parts += _list_file_parts(path, "/".join(names))
    if not parts:
        suffixes = ", ".join(filter(None, [*PARSERS, *READERS, *TABLE_SUFFIXES]))
        raise CorpusError(f"{root}: an empty folder", fix=f"put documents there: {suffixes}")
    return parts


def read_documents(
    parts: Iterable[FilePart], columns: DocumentColumns, skipped: SkippedDocuments
) -> Iterator[Document]:
    """Reads the documents of parts, in order.

    Args:
        parts: Parts that `list_parts` returned.
        columns: Names of a table's columns.
        skipped: Counts the documents that cannot be read.

    Raises:
        CorpusError: A table is damaged or has no texts.
    """
    for part in parts:
        is_table = part.path.lower().endswith(TABLE_SUFFIXES)
        documents = _read_table(part, columns) if is_table else _read_file(part, skipped)
        for document in documents:
            text = "".join(block.text for block in document.blocks)
            if not text:
                skipped.add("without text", document.id)
            elif SURROGATE.search(document.id + document.title + text):
                skipped.add("with broken characters", document.id)
            else:
                yield document


def _to_valid_unicode(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _list_file_parts(path: Path, name: str) -> list[FilePart]:
    name = _to_valid_unicode(name)
    if path.suffix.lower() != ".parquet":
        return [FilePart(str(path), name)]
    with raw_files.file_errors(path):
        num_row_groups = pq.read_metadata(path).num_row_groups
    return [FilePart(str(path), name, row_group) for row_group in range(num_row_groups)]


def _read_file(part: FilePart, skipped: SkippedDocuments) -> Iterator[Document]:
    path = Path(part.path)
    suffix = path.suffix.lower()
    parse = PARSERS.get(suffix)
    if suffix in READERS:
        try:
            title, blocks = READERS[suffix](path)
        except ImportError:
            skipped.add("that need `pip install 'as2ray[documents]'`", part.name)
        except Exception:  # The readers raise what they like on a damaged file.
            skipped.add("unreadable", part.name)
        else:
            yield Document(part.name, title or Path(part.name).stem, tuple(blocks))
        return
    if parse is None:
        skipped.add("of another kind", part.name)
        return
    try:
        # Bytes that are not UTF-8 become surrogates.
        text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except OSError:
        skipped.add("unreadable", part.name)
        return
    if "\0" in text or SURROGATE.search(text):
        skipped.add("binary or not UTF-8", part.name)
        return
    title, blocks = parse(text)
    yield Document(part.name, title or Path(part.name).stem, tuple(blocks))


_NAME_COLUMN = 'name the column that holds the text: columns {"text": "NAME"}'


def _read_table(part: FilePart, columns: DocumentColumns) -> Iterator[Document]:
    path = Path(part.path)
    if part.row_group is None:
        rows: Iterator[tuple[int, Any]] = raw_files.read_json_lines(path)
    else:
        with raw_files.file_errors(path), raw_files.value_errors(str(path)):
            file = pq.ParquetFile(path)
            row_counts = [file.metadata.row_group(g).num_rows for g in range(part.row_group)]
            names = set(file.schema_arrow.names)
            raw_files.require_keys(dict.fromkeys(names), [columns.text], str(path), _NAME_COLUMN)
            needed = sorted(names & {columns.text, columns.id, columns.title})
            table = file.read_row_group(part.row_group, columns=needed)
            rows = enumerate(table.to_pylist(), sum(row_counts) + 1)
    for number, row in rows:
        source = f"{path}, row {number:,}"
        (text,) = raw_files.require_keys(row, [columns.text], source, _NAME_COLUMN)
        if not isinstance(text, str | None):
            problem = f"{source}: {columns.text!r} is {type(text).__name__}, not text"
            raise CorpusError(problem, _NAME_COLUMN)
        _, blocks = parse_plain_text(text or "")
        id, title = row.get(columns.id), row.get(columns.title) or ""
        document_id = f"{part.name}#{number}" if id is None else str(id)
        yield Document(document_id, str(title), tuple(blocks))
