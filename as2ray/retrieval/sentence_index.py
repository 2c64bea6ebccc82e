"""Opens a sentence index, searches it, and returns sentences with their neighbors and documents.

Texts and scores are memory-mapped, so nothing is read before it is needed.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import (
    ConfigError,
    SentenceIndexError,
    lookup,
    validate_arguments,
)
from as2ray.retrieval.embeddings import Embeddings, LoadEncoder
from as2ray.retrieval.index_writer import FORMAT_VERSION, MANIFEST, SHARD_SCHEMAS, memory_map_table
from as2ray.text.bm25 import BM25, BM25Index, SearchHit, select_hits
from as2ray.text.input_checks import check_top_k

SIMILARITY_WEIGHT = 0.7
"""Weight of the similarity in the fused order of candidates; BM25 has the rest. Each is divided by
its maximum. On the 182 train and dev questions about the Python reference, 0.6 to 0.75 find the
answer of 177 or 178 among 100 candidates; reciprocal ranks find at most 177, the similarity alone
173, BM25 128 (docs/log.md)."""

MIN_SIMILARITY = "min_similarity"
"""Entry of the manifest; see `as2ray.retrieval.subject_bound`."""

RetrievalMethod = Literal["auto", "bm25", "dense", "hybrid"]
"""What finds candidates: BM25, the similarity of embeddings, or both. `auto` is `hybrid` if the
index has embeddings and was opened with an encoder, otherwise `bm25`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sentence that may answer a question."""

    index: int
    """Index of the sentence."""
    bm25: float
    """BM25 of the sentence; 0 if it shares no word with the question."""
    similarity: float | None
    """Similarity to the question; None if embeddings are not used."""


class IndexedSentence(NamedTuple):
    """A sentence and its source."""

    text: str
    heading: str
    """Heading above its paragraph."""
    document_id: str
    """Id of its document: a path, or the id of a table's row."""
    title: str
    """Title of its document."""


class IndexedDocument(NamedTuple):
    """The text of a document, as it was indexed."""

    title: str
    paragraphs: tuple[tuple[str, str], ...]
    """Heading and text of each paragraph, in order."""
    is_complete: bool
    """Whether this is all of its text."""


@dataclass(frozen=True)
class IndexShard:
    """A part of an index; sentence indices count from 0 in each shard."""

    bm25: BM25Index
    sentences: pa.Table
    paragraphs: pa.Table
    documents: pa.Table

    def sentence(self, index: int) -> IndexedSentence:
        """Returns a sentence with its source."""
        paragraph = self.sentences["paragraph"][index].as_py()
        document = self.paragraphs["document"][paragraph].as_py()
        return IndexedSentence(
            self.texts[index].as_py(),
            self.paragraphs["heading"][paragraph].as_py(),
            self.documents["id"][document].as_py(),
            self.documents["title"][document].as_py(),
        )

    def neighbors(self, index: int, num_neighbors: int) -> range:
        """Returns the sentence and up to `num_neighbors` on either side in its paragraph."""
        paragraphs, paragraph = self.paragraph_index, self.paragraph_index[index]
        # Only sentences this near are compared: searching the whole shard takes longer.
        lowest, highest = max(0, index - num_neighbors), index + num_neighbors + 1
        first = bisect_left(paragraphs, paragraph, lowest, index)
        end = bisect_right(paragraphs, paragraph, index, min(highest, len(paragraphs)))
        return range(first, end)

    @cached_property
    def texts(self) -> pa.ChunkedArray:
        """Texts of the sentences."""
        return self.sentences["text"]

    @cached_property
    def paragraph_index(self) -> np.ndarray:
        """Index of each sentence's paragraph, ascending, shape [sentences]; memory-mapped."""
        column = self.sentences["paragraph"]
        # A shard is written as one chunk. Several chunks would have to be copied.
        chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        return np.from_dlpack(chunk)  # pyarrow would import pandas for its own conversion


@dataclass(frozen=True)
class SentenceIndex:
    """A searchable index of the sentences of documents; sentence indices count over all shards."""

    shards: tuple[IndexShard, ...]
    manifest: dict[str, Any]
    folder: Path
    stored_embeddings: Embeddings | None = None
    """Embeddings of the sentences, if the index has them."""

    def __repr__(self) -> str:
        counts = {name: self.manifest.get(name) for name in ("documents", "sentences")}
        return f"SentenceIndex({str(self.folder)!r}, {counts})"

    @classmethod
    @validate_arguments
    def open(cls, folder: str | Path, load_encoder: LoadEncoder | None = None) -> Self:
        """Opens an index that `write_index` wrote.

        Args:
            folder: The index.
            load_encoder: Loads the encoder of an index with embeddings, when the first question
                comes; such as `load_sentence_encoder`. Without it, only BM25 finds candidates.

        Raises:
            SentenceIndexError: The folder is not an index, was written in another format, or is
                damaged.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            try:
                bm25 = BM25(**manifest["settings"]["bm25"])
            except ConfigError as error:
                raise _damaged_index_error(folder, f"settings.bm25: {error.problem}") from error
            paths = [folder / name for name in manifest["shards"]]
            shards = tuple(_open_shard(path, bm25) for path in paths)
            embeddings = manifest.get("embeddings")
            if embeddings is not None:
                bounds = list(accumulate((len(shard.sentences) for shard in shards), initial=0))
                embeddings = Embeddings.open(folder, embeddings, paths, bounds, load_encoder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged_index_error(folder, f"{type(error).__name__}: {error}") from error
        return cls(shards, manifest, folder, embeddings)

    def __len__(self) -> int:
        return self.shard_bounds[-1]

    @cached_property
    def shard_bounds(self) -> list[int]:
        """Index of the first sentence of each shard, and the number of all sentences."""
        return list(accumulate((len(shard.sentences) for shard in self.shards), initial=0))

    def search(self, question: str, k: int = 100) -> list[SearchHit]:
        """Returns the k sentences with the highest BM25, best first.

        Of sentences with equal scores, the earlier one comes first.

        Raises:
            ConfigError: k is below 1, or no integer.
        """
        check_top_k(k, "k")
        return select_hits(self.score_sentences(question), k)

    def score_sentences(self, question: str) -> np.ndarray:
        """Returns BM25 of every sentence; float32, shape [sentences]."""
        return np.concatenate([shard.bm25.get_scores(question) for shard in self.shards])

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings of the sentences.

        Raises:
            SentenceIndexError: The index has none.
        """
        if self.stored_embeddings is None:
            raise SentenceIndexError(
                f"{self.folder} has no embeddings",
                fix="index the documents again with an encoder: as2ray index --encoder MODEL",
            )
        return self.stored_embeddings

    def search_candidates(
        self,
        question: str,
        k: int = 100,
        num_neighbors: int = 0,
        method: RetrievalMethod = "auto",
    ) -> list[Candidate]:
        """Returns sentences that may answer a question, for a ranker, best first.

        Args:
            question: Any text.
            k: Maximum number of candidates.
            num_neighbors: Neighbors of the same paragraph, on either side, that come with each
                sentence: an answer need not repeat the words of the question.
            method: What finds them.

        Raises:
            ConfigError: k is below 1 or no integer, or the method is unknown.
            SentenceIndexError: `dense` or `hybrid` without embeddings, or with another encoder.
        """
        check_top_k(k, "k")
        lookup(dict.fromkeys(get_args(RetrievalMethod)), method, "retrieval method")
        if method == "auto":
            embeddings = self.stored_embeddings
            method = "hybrid" if embeddings and embeddings.load_encoder else "bm25"
        bm25 = self.score_sentences(question)
        query = None if method == "bm25" else self.embeddings.encode_query(question)
        found = [] if method == "dense" else [hit.index for hit in select_hits(bm25, k)]
        if query is not None:
            found += self.embeddings.search(query, k).tolist()
        indices = np.unique(np.array(found, np.int64))
        order = bm25[indices]
        if query is not None:
            similarities = self.embeddings.similarities(query, indices)
            fused = SIMILARITY_WEIGHT * _scale(similarities)
            fused += (1 - SIMILARITY_WEIGHT) * _scale(order)
            order = similarities if method == "dense" else fused
        selected: dict[int, None] = {}
        for index in indices[np.argsort(-order, kind="stable")].tolist():
            selected |= dict.fromkeys([index, *self.neighbors(index, num_neighbors)])
            if len(selected) >= k:
                break
        rows = np.array(list(selected)[:k], np.int64)
        values: list[Any] = [None] * len(rows)
        if query is not None:
            values = self.embeddings.similarities(query, rows).tolist()
        return list(map(Candidate, rows.tolist(), bm25[rows].tolist(), values))

    def sentence(self, index: int) -> IndexedSentence:
        """Returns a sentence with its source.

        Raises:
            ConfigError: The index has no such sentence.
        """
        shard, position = self._locate(index)
        return shard.sentence(position)

    def texts(self, indices: Sequence[int]) -> list[str]:
        """Returns the texts of sentences.

        Raises:
            ConfigError: The index has no such sentence.
        """
        positions = map(self._locate, indices)
        return [shard.texts[position].as_py() for shard, position in positions]

    def neighbors(self, index: int, num_neighbors: int) -> range:
        """Returns the sentence and up to `num_neighbors` on either side in its paragraph.

        Raises:
            ConfigError: The index has no such sentence.
        """
        shard, position = self._locate(index)
        neighbors, offset = shard.neighbors(position, num_neighbors), index - position
        return range(neighbors.start + offset, neighbors.stop + offset)

    def context(self, index: int, num_neighbors: int = 1) -> str:
        """Returns the text of a sentence and its neighbors.

        Raises:
            ConfigError: The index has no such sentence.
        """
        return " ".join(self.texts(self.neighbors(index, num_neighbors)))

    def document(
        self, document_id: str, max_paragraphs: int, max_chars: int
    ) -> IndexedDocument | None:
        """Returns the text of a document; None if the index has none of this id.

        Args:
            document_id: Its id; see `IndexedSentence`.
            max_paragraphs: Maximum number of paragraphs, the first of the document.
            max_chars: Maximum number of characters of their text; the last paragraph may be cut.
        """
        for shard in self.shards:
            number = pc.index(shard.documents["id"], document_id).as_py()
            if number < 0:
                continue
            is_own = pc.equal(shard.paragraphs["document"], number)
            paragraphs = pc.indices_nonzero(is_own).to_pylist()
            # Values of another type would let numpy copy the whole column.
            shown = np.array(paragraphs[:max_paragraphs], shard.paragraph_index.dtype)
            starts, ends = (
                np.searchsorted(shard.paragraph_index, shown, side).tolist()
                for side in ("left", "right")
            )
            texts, is_complete = [], len(shown) == len(paragraphs)
            for paragraph, start, end in zip(shown.tolist(), starts, ends):
                text = " ".join(shard.sentences["text"][start:end].to_pylist())
                texts.append((shard.paragraphs["heading"][paragraph].as_py(), text[:max_chars]))
                max_chars -= len(text)
                if max_chars < 0:
                    is_complete = False
                    break
            title = shard.documents["title"][number].as_py()
            return IndexedDocument(title, tuple(texts), is_complete)
        return None

    def paragraphs(self) -> Iterator[tuple[IndexedSentence, list[int]]]:
        """Yields each paragraph's first sentence, and the indices of all of its sentences."""
        for offset, shard in zip(self.shard_bounds, self.shards):
            starts = np.flatnonzero(np.diff(shard.paragraph_index, prepend=-1)).tolist()
            for start, end in pairwise([*starts, len(shard.sentences)]):
                yield shard.sentence(start), list(range(offset + start, offset + end))

    def _locate(self, index: int) -> tuple[IndexShard, int]:
        """Returns the shard of a sentence, and the index of the sentence in the shard."""
        number = bisect_right(self.shard_bounds, index) - 1
        if not 0 <= number < len(self.shards):
            problem = f"the index has no sentence {index}: its sentences are 0 to {len(self) - 1}"
            raise ConfigError(problem)
        return self.shards[number], index - self.shard_bounds[number]


def _scale(scores: np.ndarray) -> np.ndarray:
    """Divides scores by their maximum, so that the best one is 1."""
    return scores / max(float(scores.max(initial=0.0)), 1e-9)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        format_version, files = manifest.get("format_version"), manifest.get("files")
    except (OSError, ValueError, AttributeError) as error:
        _refuse_parent(folder)
        raise SentenceIndexError(
            f"{folder} is not an index: {error}",
            fix="index the documents first: as2ray index FOLDER --output INDEX",
        ) from error
    if "settings" not in manifest:  # that of a stage, in which an index lies
        _refuse_parent(folder)
    if format_version != FORMAT_VERSION:
        raise SentenceIndexError(
            f"{folder} has format_version {format_version!r}; as2ray reads only {FORMAT_VERSION}",
            fix="index the documents again",
        )
    if not isinstance(files, dict):
        raise _damaged_index_error(folder, f"{MANIFEST} lists no files")
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise _damaged_index_error(folder, f"{name} has changed, or is missing")
    return dict(manifest)


def _refuse_parent(folder: Path) -> None:
    """Raises an error that names the index in a folder, if there is one."""
    if (nested := next(iter(folder.glob(f"*/{MANIFEST}")), None)) is not None:
        raise SentenceIndexError(
            f"{folder} is not an index", fix=f"did you mean {nested.parent}?"
        ) from None


def _open_shard(folder: Path, bm25: BM25) -> IndexShard:
    retriever = bm25s.BM25.load(folder / "bm25", mmap=True)
    tables = {name: memory_map_table(folder / f"{name}.arrow") for name in SHARD_SCHEMAS}
    return IndexShard(BM25Index(bm25, retriever), **tables)


def _damaged_index_error(folder: Path, problem: str) -> SentenceIndexError:
    return SentenceIndexError(
        f"{folder} is a damaged index: {problem}", fix="index the documents again"
    )
