"""Building an index of the sentences of documents: whole or absent, in one shard or in several.

Knows documents, sentence splitters, BM25 and files. Must not know models or Ray: whoever has a
cluster hands in a `spread` that runs the shards there.

    INDEX/manifest.json    format, settings, counts, what was skipped, sizes of files, fingerprint
    INDEX/shard-00000/     sentences, paragraphs, documents (Arrow, mapped into memory), bm25s's

Each shard is read, split and counted alone; then each is weighed with the statistics of all.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError, IndexFolderError
from as2ray.records import Fingerprint
from as2ray.retrieval.bm25 import BM25
from as2ray.retrieval.documents import Columns, Piece, Skipped, pieces, read
from as2ray.retrieval.terms import Statistics, Terms, weighed
from as2ray.text.sentences import find, split, versioned

A = TypeVar("A")
B = TypeVar("B")

FORMAT: Final = 1
"""Of the folder; another one is not read."""

MANIFEST: Final = "manifest.json"

TABLES: Final = {
    "sentences": pa.schema([("text", pa.large_string()), ("paragraph", pa.int32())]),
    "paragraphs": pa.schema([("heading", pa.large_string()), ("document", pa.int32())]),
    "documents": pa.schema([("id", pa.string()), ("title", pa.string())]),
}
"""A shard's tables; numbers count from 0 in the shard."""


@dataclass(frozen=True)
class Settings:
    """What changes an index beside its documents."""

    bm25: BM25 = field(default_factory=BM25)
    """The keyword scores."""
    splitter: str = "syntok"
    """A sentence splitter."""
    columns: Columns = field(default_factory=Columns)
    """Names of a table's columns."""

    def identity(self) -> dict[str, Any]:
        """As plain values, the splitter with its version."""
        return {**asdict(self), "splitter": versioned(self.splitter)}


Spread = Callable[[Callable[[A], B], Sequence[A]], list[B]]
"""Calls a function on each argument, anywhere, and gives the results in their order."""


def here(work: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """One call after the other, in this process."""
    return [work(argument) for argument in arguments]


def build(
    source: str | Path,
    folder: str | Path,
    settings: Settings | None = None,
    *,
    shards: int = 1,
    replace: bool = False,
    spread: Spread[Any, Any] = here,
) -> dict[str, Any]:
    """Writes an index; it appears when it is whole.

    Args:
        source: A folder of documents, one document, or a table of them (JSON lines, Parquet).
        folder: Where the index goes.
        settings: How text is read and scored.
        shards: Parts that are built apart: at most as many as there are files and row groups.
        replace: Whether an older index there is replaced.
        spread: Runs the shards; by default here, one after the other.

    Returns:
        The manifest.

    Raises:
        CorpusError: Nothing readable under `source`.
        IndexFolderError: `folder` exists, or cannot be written.
    """
    told, out, root = settings or Settings(), Path(folder).resolve(), Path(source).resolve()
    find(told.splitter)
    if out.exists() and not (replace and (out / MANIFEST).is_file()):
        raise IndexFolderError(
            f"{out} exists",
            expected="a new folder, or an index and leave to replace it",
            mend="choose another, or pass replace",
        )
    groups = _groups(pieces(root), shards)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            manifest = _fill(partial_folder, groups, root, told, spread)
            partial_folder.chmod(0o755)
            _put(partial_folder, out)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    except OSError as error:
        raise IndexFolderError(
            f"{out}: {error}",
            expected="room for the index on a disk that can be written",
            mend="make room or choose another folder; nothing of it was left behind",
        ) from error
    return manifest


def _groups(parts: Sequence[Piece], shards: int) -> list[list[Piece]]:
    """The pieces in order, cut into runs of about equal number; none is empty."""
    if shards < 1:
        raise CorpusError(f"{shards} shards", expected="at least 1", mend="correct the number")
    cuts = np.linspace(0, len(parts), min(shards, len(parts)) + 1).round().astype(int).tolist()
    return [list(parts[a:b]) for a, b in pairwise(cuts)]


def _put(new: Path, out: Path) -> None:
    old = new.with_name(f"{new.name}-old")
    if out.exists():
        os.rename(out, old)
    os.rename(new, out)
    shutil.rmtree(old, ignore_errors=True)


def _fill(
    folder: Path,
    groups: Sequence[list[Piece]],
    root: Path,
    settings: Settings,
    spread: Spread[Any, Any],
) -> dict[str, Any]:
    shards = [folder / f"shard-{number:05d}" for number in range(len(groups))]
    read_one = partial(_read_shard, root=root, settings=settings)
    skipped = _sum(spread(read_one, list(zip(shards, groups))))
    statistics = Statistics.of(map(_load_terms, shards))
    if not statistics.length:
        raise CorpusError(
            f"{root}: {statistics.texts:,} sentences without a word; skipped: {skipped}",
            expected="at least one document with text",
            mend="give a folder of text, Markdown, HTML, JSON lines or Parquet",
        )
    spread(partial(_weigh_shard, corpus=statistics, bm25=settings.bm25), shards)
    manifest = {
        "format": FORMAT,
        "settings": settings.identity(),
        **_told(shards),
        "words": len(statistics.holders),
        "skipped": dict(skipped.counts),
        "examples": skipped.examples,
        "shards": [shard.name for shard in shards],
        "files": {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        "packages": {name: version(name) for name in ("as2ray", "bm25s", "pyarrow", "numpy")},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def _sum(parts: Sequence[Skipped]) -> Skipped:
    whole = Skipped()
    for part in parts:
        whole.counts.update(part.counts)
        whole.examples = {**part.examples, **whole.examples}
    return whole


def _read_shard(given: tuple[Path, list[Piece]], root: Path, settings: Settings) -> Skipped:
    """Reads, splits and counts the documents of some pieces."""
    folder, parts = given
    folder.mkdir()
    skipped = Skipped()
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
    for document in read(parts, root, settings.columns, skipped):
        for heading, text in document.blocks:
            # Lines are the matter of the splitter of that name alone.
            said = text if settings.splitter == "lines" else text.replace("\n", " ")
            for start, end in split(said, settings.splitter):
                rows["sentences"].append((said[start:end], len(rows["paragraphs"])))
            rows["paragraphs"].append((heading, len(rows["documents"])))
        rows["documents"].append((document.id, document.title))
    for name, schema in TABLES.items():
        columns = list(zip(*rows[name])) or [()] * len(schema)
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema)], schema=schema)
        with pa.ipc.new_file(str(folder / f"{name}.arrow"), schema) as file:
            file.write_table(table)
    terms = settings.bm25.terms([text for text, _ in rows["sentences"]])
    for name, values in _arrays(terms).items():
        np.save(folder / f"{name}.npy", values)
    (folder / "words.json").write_text(json.dumps(terms.words), encoding="utf-8")
    return skipped


def _arrays(terms: Terms) -> Mapping[str, np.ndarray]:
    names = ("ends", "text", "times", "lengths")
    return {name: getattr(terms, name) for name in names}


def _load_terms(folder: Path) -> Terms:
    words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    arrays = [np.load(folder / f"{name}.npy") for name in ("ends", "text", "times", "lengths")]
    return Terms(words, *arrays)


def _weigh_shard(folder: Path, corpus: Statistics, bm25: BM25) -> None:
    """Puts the scores of a shard in place of its counts."""
    weighed(_load_terms(folder), corpus, bm25.k1, bm25.b).save(folder / "bm25", show_progress=False)
    for name in ("words.json", "ends.npy", "text.npy", "times.npy", "lengths.npy"):
        (folder / name).unlink()


def _told(shards: Sequence[Path]) -> dict[str, Any]:
    """Counts and the fingerprint, which do not depend on the shards."""
    digests = {name: Fingerprint() for name in ("sentences", "documents")}
    counts: Counter[str] = Counter()
    ids: list[pa.ChunkedArray] = []
    for shard in shards:
        for name, digest in digests.items():
            table = mapped(shard / f"{name}.arrow")
            columns = ["text"] if name == "sentences" else table.column_names
            for batch in table.select(columns).to_batches(65_536):
                digest.update(_plain(batch))
            counts[name] += table.num_rows
        ids.append(mapped(shard / "documents.arrow")["id"])
    names = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string())
    if (distinct := pc.count_distinct(names).as_py()) != len(names):
        raise CorpusError(
            f"{len(names):,} documents with {distinct:,} distinct ids",
            expected="an id of its own for every document",
            mend="name the column with the ids, or one that no row has: then rows are numbered",
        )
    fingerprint = "-".join(digests[name].hexdigest() for name in ("documents", "sentences"))
    return {**counts, "fingerprint": fingerprint}


def _plain(piece: pa.RecordBatch) -> pa.RecordBatch:
    """A piece of a shard as plain strings: all of its text can be more than these hold."""
    # A slice alone still counts its characters from the start of the shard; a copy does not.
    rows = piece.take(pa.array(np.arange(piece.num_rows)))
    return rows.cast(pa.schema([(name, pa.string()) for name in piece.schema.names]))


def mapped(path: Path) -> pa.Table:
    """An Arrow file as a table that lies in the file."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
