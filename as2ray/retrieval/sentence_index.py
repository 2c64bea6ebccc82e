"""A saved index of sentences: found by their words, shown with their document and their neighbours.

Knows the folder that `retrieval.build` writes. Must not know models or Ray. Nothing of it is read
before it is asked for: texts and scores are mapped into memory.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import bm25s
import numpy as np
import pyarrow as pa

from as2ray.errors import SentenceIndexError
from as2ray.retrieval.index_writer import FORMAT_VERSION, MANIFEST, SHARD_SCHEMAS, memory_map_table
from as2ray.text.bm25 import BM25, BM25Index, SearchHit


class IndexedSentence(NamedTuple):
    """A sentence and where it stands."""

    text: str
    heading: str
    """Above its paragraph."""
    document_id: str
    """Id of its document: a path, or a row's own."""
    title: str
    """Of the document."""


@dataclass(frozen=True)
class IndexShard:
    """A part of an index; its numbers count from 0."""

    bm25: BM25Index
    sentences: pa.Table
    paragraphs: pa.Table
    documents: pa.Table

    def sentence(self, number: int) -> IndexedSentence:
        """A sentence by its number."""
        paragraph = self.sentences["paragraph"][number].as_py()
        document = self.paragraphs["document"][paragraph].as_py()
        return IndexedSentence(
            self.sentences["text"][number].as_py(),
            self.paragraphs["heading"][paragraph].as_py(),
            self.documents["id"][document].as_py(),
            self.documents["title"][document].as_py(),
        )

    def neighbors(self, number: int, num_neighbors: int) -> range:
        """Numbers of the sentences of the same paragraph that are at most `reach` away."""
        first, last = (
            max(0, number - num_neighbors),
            min(len(self.sentences), number + num_neighbors + 1),
        )
        own = self.paragraph_index[number]
        near = np.flatnonzero(self.paragraph_index[first:last] == own) + first
        return range(int(near[0]), int(near[-1]) + 1)

    @cached_property
    def paragraph_index(self) -> np.ndarray:
        """Number of each sentence's paragraph, shape [sentences]; lies in the file."""
        column = self.sentences["paragraph"]
        # Chunks put together would be copied; a shard is written as one.
        numbers: np.ndarray = (column.chunk(0) if column.num_chunks == 1 else column).to_numpy()
        return numbers


@dataclass(frozen=True)
class SentenceIndex:
    """Sentences of documents; their numbers run through all shards."""

    shards: tuple[IndexShard, ...]
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> "SentenceIndex":
        """Maps an index into memory.

        Raises:
            IndexFolderError: No index, one of another format, or a broken one.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            bm25 = BM25(**manifest["settings"]["bm25"])
            shards = tuple(_open_shard(folder / name, bm25) for name in manifest["shards"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _corrupt_index_error(folder, f"{type(error).__name__}: {error}") from error
        return cls(shards, manifest)

    def __len__(self) -> int:
        return int(self.shard_ends[-1])

    @cached_property
    def shard_ends(self) -> np.ndarray:
        """Number after the last sentence of each shard, shape [shards]."""
        return np.cumsum([len(shard.sentences) for shard in self.shards])

    def search(self, question: str, k: int = 100) -> list[SearchHit]:
        """The k sentences with the highest BM25, best first, earlier sentences first."""
        firsts = [0, *self.shard_ends[:-1].tolist()]
        of_each = (
            [SearchHit(first + hit.index, hit.score) for hit in shard.bm25.search(question, k)]
            for first, shard in zip(firsts, self.shards)
        )
        # Merging keeps the shards' order where scores are equal, and so the sentences'.
        return list(islice(merge(*of_each, key=lambda hit: -hit.score), k))

    def search_candidates(self, question: str, k: int = 100, num_neighbors: int = 0) -> list[int]:
        """Numbers of sentences that may answer: those found by their words, with their neighbours.

        Args:
            question: Any text.
            k: Most candidates.
            around: Neighbours on either side, of the same paragraph, that come with each sentence:
                an answer need not repeat the question's words.
        """
        chosen: dict[int, None] = {}
        for hit in self.search(question, k):
            chosen.setdefault(hit.index)
            if num_neighbors:
                chosen |= dict.fromkeys(self.neighbors(hit.index, num_neighbors))
            if len(chosen) >= k:
                break
        return list(chosen)[:k]

    def sentence(self, number: int) -> IndexedSentence:
        """A sentence by its number."""
        shard, place = self._locate(number)
        return self.shards[shard].sentence(place)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """The texts of sentences."""
        return [
            self.shards[shard].sentences["text"][place].as_py()
            for shard, place in map(self._locate, numbers)
        ]

    def neighbors(self, number: int, num_neighbors: int) -> range:
        """Numbers of the sentences of the same paragraph that are at most `reach` away."""
        shard, place = self._locate(number)
        near = self.shards[shard].neighbors(place, num_neighbors)
        return range(near.start + number - place, near.stop + number - place)

    def context(self, number: int, num_neighbors: int = 1) -> str:
        """The sentence between its neighbours."""
        return " ".join(self.texts(self.neighbors(number, num_neighbors)))

    def paragraphs(self) -> Iterator[tuple[IndexedSentence, list[int]]]:
        """Each paragraph's first sentence, and the numbers of all of its sentences."""
        first = 0
        for shard in self.shards:
            starts = np.flatnonzero(np.diff(shard.paragraph_index, prepend=-1))
            for start, end in zip(starts, [*starts[1:], len(shard.paragraph_index)]):
                numbers = range(first + int(start), first + int(end))
                yield shard.sentence(int(start)), list(numbers)
            first += len(shard.sentences)

    def _locate(self, number: int) -> tuple[int, int]:
        """Shard and number inside it."""
        shard = int(np.searchsorted(self.shard_ends, number, side="right"))
        return shard, number - (int(self.shard_ends[shard - 1]) if shard else 0)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written, files = manifest["format"], manifest.get("files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SentenceIndexError(
            f"{folder}: no index ({error}); expected a folder that `as2ray index` has written",
            fix="index the documents first: as2ray index FOLDER --output INDEX",
        ) from error
    if written != FORMAT_VERSION:
        raise SentenceIndexError(
            f"{folder}: an index of format {written!r}; expected format {FORMAT_VERSION}",
            fix="index the documents again, with this version of as2ray",
        )
    if not isinstance(files, dict):
        raise _corrupt_index_error(folder, f"{MANIFEST} names no files")
    sizes = {n: _file_size(folder / n) for n in files}
    if differ := [n for n, size in files.items() if sizes[n] != size]:
        told = f"{differ[0]} has {sizes[differ[0]]} bytes of {files[differ[0]]}"
        raise _corrupt_index_error(folder, f"{len(differ)} files differ, {told}")
    return manifest


def _file_size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _open_shard(folder: Path, bm25: BM25) -> IndexShard:
    retriever = bm25s.BM25.load(folder / "bm25", mmap=True)
    tables = {name: memory_map_table(folder / f"{name}.arrow") for name in SHARD_SCHEMAS}
    return IndexShard(BM25Index(bm25, retriever), **tables)


def _corrupt_index_error(folder: Path, problem: str) -> SentenceIndexError:
    return SentenceIndexError(
        f"{folder}: a broken index: {problem}; expected the files as they were written",
        fix="index the documents again",
    )
