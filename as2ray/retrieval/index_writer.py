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

from as2ray.errors import CorpusError, SentenceIndexError
from as2ray.retrieval.documents import (
    DocumentColumns,
    FilePart,
    SkippedDocuments,
    list_parts,
    read_documents,
)
from as2ray.tables.fingerprint import Fingerprint
from as2ray.text.bm25 import BM25
from as2ray.text.sentences import get_splitter, split, versioned_name
from as2ray.text.term_counts import CollectionStatistics, TermCounts, build_bm25s

A = TypeVar("A")
B = TypeVar("B")

FORMAT_VERSION: Final = 1
"""Of the folder; another one is not read."""

MANIFEST: Final = "manifest.json"

SHARD_SCHEMAS: Final = {
    "sentences": pa.schema([("text", pa.large_string()), ("paragraph", pa.int32())]),
    "paragraphs": pa.schema([("heading", pa.large_string()), ("document", pa.int32())]),
    "documents": pa.schema([("id", pa.string()), ("title", pa.string())]),
}
"""A shard's tables; numbers count from 0 in the shard."""


@dataclass(frozen=True)
class IndexConfig:
    """What changes an index beside its documents."""

    bm25: BM25 = field(default_factory=BM25)
    """The keyword scores."""
    sentence_splitter: str = "syntok"
    """A sentence splitter."""
    columns: DocumentColumns = field(default_factory=DocumentColumns)
    """Names of a table's columns."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values, the splitter with its version."""
        return {**asdict(self), "splitter": versioned_name(self.sentence_splitter)}


MapFunction = Callable[[Callable[[A], B], Sequence[A]], list[B]]
"""Calls a function on each argument, anywhere, and gives the results in their order."""


def map_in_process(function: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """One call after the other, in this process."""
    return [function(argument) for argument in arguments]


def write_index(
    documents: str | Path,
    folder: str | Path,
    config: IndexConfig | None = None,
    *,
    num_shards: int = 1,
    overwrite: bool = False,
    map_function: MapFunction[Any, Any] = map_in_process,
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
    told, out, root = config or IndexConfig(), Path(folder).resolve(), Path(documents).resolve()
    get_splitter(told.sentence_splitter)
    if out.exists() and not (overwrite and (out / MANIFEST).is_file()):
        raise SentenceIndexError(
            f"{out} exists; expected a new folder, or an index and leave to replace it",
            fix="choose another, or pass replace",
        )
    groups = _split_parts(list_parts(root), num_shards)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            manifest = _write_contents(partial_folder, groups, root, told, map_function)
            partial_folder.chmod(0o755)
            _move_into_place(partial_folder, out)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    except OSError as error:
        raise SentenceIndexError(
            f"{out}: {error}; expected room for the index on a disk that can be written",
            fix="make room or choose another folder; nothing of it was left behind",
        ) from error
    return manifest


def _split_parts(parts: Sequence[FilePart], num_shards: int) -> list[list[FilePart]]:
    """The pieces in order, cut into runs of about equal number; none is empty."""
    if num_shards < 1:
        raise CorpusError(
            f"{num_shards} shards; expected at least 1",
        )
    cuts = np.linspace(0, len(parts), min(num_shards, len(parts)) + 1).round().astype(int).tolist()
    return [list(parts[a:b]) for a, b in pairwise(cuts)]


def _move_into_place(new_folder: Path, folder: Path) -> None:
    old = new_folder.with_name(f"{new_folder.name}-old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(new_folder, folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_contents(
    folder: Path,
    groups: Sequence[list[FilePart]],
    root: Path,
    config: IndexConfig,
    map_function: MapFunction[Any, Any],
) -> dict[str, Any]:
    shards = [folder / f"shard-{number:05d}" for number in range(len(groups))]
    read_one = partial(_write_shard_counts, root=root, config=config)
    skipped = _merge_skipped(map_function(read_one, list(zip(shards, groups))))
    statistics = CollectionStatistics.from_shards(map(_load_term_counts, shards))
    if not statistics.num_words:
        raise CorpusError(
            f"{root}: {statistics.num_texts:,} sentences without a word; skipped: {skipped}"
            "; expected at least one document with text",
            fix="give a folder of text, Markdown, HTML, JSON lines or Parquet",
        )
    map_function(partial(_write_shard_scores, statistics=statistics, bm25=config.bm25), shards)
    manifest = {
        "format": FORMAT_VERSION,
        "settings": config.to_dict(),
        **_summarize_shards(shards),
        "words": len(statistics.document_frequency),
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


def _merge_skipped(skipped: Sequence[SkippedDocuments]) -> SkippedDocuments:
    whole = SkippedDocuments()
    for part in skipped:
        whole.counts.update(part.counts)
        whole.examples = {**part.examples, **whole.examples}
    return whole


def _write_shard_counts(
    shard: tuple[Path, list[FilePart]], root: Path, config: IndexConfig
) -> SkippedDocuments:
    """Reads, splits and counts the documents of some pieces."""
    folder, parts = shard
    folder.mkdir()
    skipped = SkippedDocuments()
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in SHARD_SCHEMAS}
    for document in read_documents(parts, root, config.columns, skipped):
        for heading, text in document.blocks:
            # Lines are the matter of the splitter of that name alone.
            said = text if config.sentence_splitter == "lines" else text.replace("\n", " ")
            for start, end in split(said, config.sentence_splitter):
                rows["sentences"].append((said[start:end], len(rows["paragraphs"])))
            rows["paragraphs"].append((heading, len(rows["documents"])))
        rows["documents"].append((document.id, document.title))
    for name, schema in SHARD_SCHEMAS.items():
        columns = list(zip(*rows[name])) or [()] * len(schema)
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema)], schema=schema)
        with pa.ipc.new_file(str(folder / f"{name}.arrow"), schema) as file:
            file.write_table(table)
    terms = config.bm25.count_terms([text for text, _ in rows["sentences"]])
    for name, values in _count_arrays(terms).items():
        np.save(folder / f"{name}.npy", values)
    (folder / "words.json").write_text(json.dumps(terms.vocabulary), encoding="utf-8")
    return skipped


def _count_arrays(term_counts: TermCounts) -> Mapping[str, np.ndarray]:
    names = ("ends", "text", "times", "lengths")
    return {name: getattr(term_counts, name) for name in names}


def _load_term_counts(folder: Path) -> TermCounts:
    words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    arrays = [np.load(folder / f"{name}.npy") for name in ("ends", "text", "times", "lengths")]
    return TermCounts(words, *arrays)


def _write_shard_scores(folder: Path, statistics: CollectionStatistics, bm25: BM25) -> None:
    """Puts the scores of a shard in place of its counts."""
    build_bm25s(_load_term_counts(folder), statistics, bm25.k1, bm25.b).save(
        folder / "bm25", show_progress=False
    )
    for name in ("words.json", "ends.npy", "text.npy", "times.npy", "lengths.npy"):
        (folder / name).unlink()


def _summarize_shards(shards: Sequence[Path]) -> dict[str, Any]:
    """Counts and the fingerprint, which do not depend on the shards."""
    digests = {name: Fingerprint() for name in ("sentences", "documents")}
    counts: Counter[str] = Counter()
    ids: list[pa.ChunkedArray] = []
    for shard in shards:
        for name, digest in digests.items():
            table = memory_map_table(shard / f"{name}.arrow")
            columns = ["text"] if name == "sentences" else table.column_names
            for batch in table.select(columns).to_batches(65_536):
                digest.update(_cast_to_string(batch))
            counts[name] += table.num_rows
        ids.append(memory_map_table(shard / "documents.arrow")["id"])
    names = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string())
    if (distinct := pc.count_distinct(names).as_py()) != len(names):
        raise CorpusError(
            f"{len(names):,} documents with {distinct:,} distinct ids"
            "; expected an id of its own for every document",
            fix="name the column with the ids, or one that no row has: then rows are numbered",
        )
    fingerprint = "-".join(digests[name].hexdigest() for name in ("documents", "sentences"))
    return {**counts, "fingerprint": fingerprint}


def _cast_to_string(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A piece of a shard as plain strings: all of its text can be more than these hold."""
    # A slice alone still counts its characters from the start of the shard; a copy does not.
    rows = batch.take(pa.array(np.arange(batch.num_rows)))
    return rows.cast(pa.schema([(name, pa.string()) for name in batch.schema.names]))


def memory_map_table(path: Path) -> pa.Table:
    """An Arrow file as a table that lies in the file."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
