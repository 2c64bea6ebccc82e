"""Embeddings of an index's sentences: written in blocks, stored as int8, searched by similarity.

    INDEX/shard-00000/embeddings.npy         int8, [sentences, dimension], memory-mapped
    INDEX/shard-00000/embedding_scales.npy   float32, [sentences]; a row is codes times scale
    INDEX/embeddings.faiss                   approximate index, from `MIN_APPROXIMATE` sentences on

Blocks are files beside the index, named by a hash of the encoder and the texts, until the index is
complete. So a build that was interrupted encodes only the missing blocks.
"""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import SentenceIndexError
from as2ray.progress import task
from as2ray.tables.atomic import atomic_file

FORMAT_VERSION: Final = 3
"""Version of the stored embeddings; another version cannot be opened."""

FILES: Final = ("embeddings.npy", "embedding_scales.npy")
"""Codes and scales of a shard."""

APPROXIMATE_FILE: Final = "embeddings.faiss"

ENCODER_FOLDER: Final = "encoder"
"""Folder in an index with the encoder, if it was adapted to the documents."""

BLOCK_SIZE: Final = 8_192
"""Sentences of a block: what an actor encodes at a time, and at most is encoded again."""

MIN_APPROXIMATE: Final = 300_000
"""Number of sentences from which search is approximate. The exact one takes 0.1 ms per 1,000."""

NUM_PROBES: Final = 64
"""Lists of the approximate index that a query reads."""

NUM_NEIGHBORS: Final = 2
"""Sentences before and after a sentence, in its document, whose embeddings are added to its own."""

NEIGHBOR_WEIGHT: Final = 0.3
"""Length of the sum of the neighbors' embeddings, relative to that of the sentence. The questions
of the Python reference's train and dev parts, and those of SQuAD, find their sentence among the
first ten more often with it: 0.88 instead of 0.85, and 0.90 instead of 0.89 (docs/log.md)."""

SEARCH_BLOCK: Final = 1_024
"""Rows that are multiplied at a time; their float32 numbers fit the cache of a core."""


class SupportsEncode(Protocol):
    """The part of a sentence encoder that an index uses."""

    @property
    def name(self) -> str:
        """Folder, hub id or packaged name, from which it is loaded again to encode queries."""

    @property
    def dimension(self) -> int:
        """Number of elements of an embedding."""

    @property
    def fingerprint(self) -> str:
        """Hash of weights and settings."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Returns embeddings of queries, float32, shape [texts, dimension]."""

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns embeddings of sentences, whose product with a query's is the similarity."""


LoadEncoder = Callable[[str], SupportsEncode]
"""Loads a sentence encoder by its name."""


class Block(NamedTuple):
    """Sentences of a shard whose embeddings are one file."""

    shard: Path
    start: int
    end: int
    file: Path


MapBlocks = Callable[[Callable[[], Callable[[Block], None]], Sequence[Block]], Iterable[None]]
"""Calls what the first argument creates with each block, possibly in several processes."""


@dataclass(frozen=True)
class EncoderInfo:
    """The encoder of stored embeddings."""

    name: str
    dimension: int
    fingerprint: str

    def check(self, encoder: SupportsEncode) -> None:
        """Raises a `SentenceIndexError` if an encoder is not the one of the embeddings."""
        fix = "index the documents again with this encoder, or use the one of the index"
        if encoder.dimension != self.dimension:
            raise SentenceIndexError(
                f"the index has embeddings of {self.dimension} numbers by {self.name}, but "
                f"{encoder.name} gives {encoder.dimension}",
                fix,
            )
        if encoder.fingerprint != self.fingerprint:
            raise SentenceIndexError(
                f"the index has embeddings by {self.name} with the fingerprint "
                f"{self.fingerprint}, but {encoder.name} has {encoder.fingerprint}: it is another "
                "encoder, or has changed",
                fix,
            )


def write_embeddings(
    shards: Sequence[Path],
    staging: Path,
    encoder: SupportsEncode,
    load_encoder: LoadEncoder,
    map_blocks: MapBlocks | None = None,
) -> dict[str, Any]:
    """Writes the embeddings of the sentences of all shards.

    Args:
        shards: Folders with `sentences.arrow`, all in one folder.
        staging: Folder of the blocks. It may hold blocks of an earlier, interrupted build.
        encoder: The encoder.
        load_encoder: Loads it by its name where `map_blocks` encodes.
        map_blocks: Encodes blocks on a cluster; by default this process does.

    Returns:
        The entry of the manifest.

    Raises:
        SentenceIndexError: An embedding is not finite, or a block is damaged.
    """
    info = EncoderInfo(encoder.name, encoder.dimension, encoder.fingerprint)
    staging.mkdir(exist_ok=True)
    blocks = {shard: list(_list_blocks(shard, staging, info)) for shard in shards}
    missing = [b for bs in blocks.values() for b in bs if not b.file.exists()]
    sizes = [block.end - block.start for block in missing]
    with task("embeddings", sum(sizes), "sentences", counts_rows=map_blocks is None) as advance:
        if map_blocks is None:
            for block in missing:
                _encode_block(encoder, block)
        elif missing:
            create = partial(_create_block_encoder, info, load_encoder)
            for size, _ in zip(sizes, map_blocks(create, missing)):
                advance(size)
    for shard, shard_blocks in blocks.items():
        _join_blocks(shard, shard_blocks, info.dimension)
    num_sentences = sum(bs[-1].end for bs in blocks.values() if bs)
    is_approximate = num_sentences >= MIN_APPROXIMATE
    if is_approximate:
        _write_approximate(shards, info.dimension)
    return {"format_version": FORMAT_VERSION, "approximate": is_approximate, **asdict(info)}


def add_heading(heading: str, text: str) -> str:
    """Returns the text of a sentence that is encoded: it follows the heading above it."""
    if not heading:
        return text
    return f"{heading} {text}" if heading.endswith((".", ":", "?", "!")) else f"{heading}. {text}"


def _read_texts(shard: Path, start: int, end: int) -> list[str]:
    """Returns the texts of sentences of a shard that are encoded."""
    sentences, paragraphs = (
        pa.ipc.open_file(pa.memory_map(str(shard / name))).read_all()
        for name in ("sentences.arrow", "paragraphs.arrow")
    )
    rows = sentences.slice(start, end - start)
    headings = paragraphs["heading"].take(rows["paragraph"]).to_pylist()
    return list(map(add_heading, headings, rows["text"].to_pylist()))


def _list_blocks(shard: Path, staging: Path, info: EncoderInfo) -> Iterator[Block]:
    num_sentences = len(_read_column(shard, "sentences.arrow", "text"))
    for start in range(0, num_sentences, BLOCK_SIZE):
        block = _read_texts(shard, start, min(start + BLOCK_SIZE, num_sentences))
        digest = hashlib.sha256(f"{FORMAT_VERSION} {info.fingerprint}\n".encode())
        digest.update("\n".join(block).encode())
        file = staging / f"{digest.hexdigest()[:24]}.npz"
        yield Block(shard, start, start + len(block), file)


def _read_column(shard: Path, file: str, column: str) -> pa.ChunkedArray:
    return pa.ipc.open_file(pa.memory_map(str(shard / file))).read_all()[column]


def _create_block_encoder(info: EncoderInfo, load_encoder: LoadEncoder) -> Callable[[Block], None]:
    encoder = load_encoder(info.name)
    info.check(encoder)
    return partial(_encode_block, encoder)


def _encode_block(encoder: SupportsEncode, block: Block) -> None:
    texts = _read_texts(block.shard, block.start, block.end)
    embeddings = encoder.encode_documents(texts)
    wrong = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(wrong):
        raise SentenceIndexError(
            f"{encoder.name} gives {len(wrong)} embeddings that are not finite, the first for "
            f"{texts[wrong[0]]!r:.100}",
            fix="load the encoder in fp32, or choose another",
        )
    codes, scales = _quantize(embeddings)
    with atomic_file(block.file) as path, path.open("wb") as file:
        np.savez(file, codes=codes, scales=scales)


def _quantize(embeddings: np.ndarray) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    scales = np.abs(embeddings).max(axis=1) / np.float32(127)
    codes = np.rint(embeddings / np.maximum(scales, np.finfo(np.float32).tiny)[:, None])
    return codes.astype(np.int8), scales


def _join_blocks(shard: Path, blocks: Sequence[Block], dimension: int) -> None:
    """Writes the codes and scales of a shard from its blocks, and adds those of neighbors."""
    num_rows = blocks[-1].end if blocks else 0
    paths = [str(shard / name) for name in FILES]
    # An empty array cannot be memory-mapped.
    codes = np.lib.format.open_memmap(paths[0], "w+", np.int8, (num_rows, dimension))
    scales = np.zeros(num_rows, np.float32)
    for _, start, end, file in blocks:
        try:
            with np.load(file) as block:
                codes[start:end], scales[start:end] = block["codes"], block["scales"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise SentenceIndexError(
                f"{file}, embeddings of an interrupted build, is damaged: {error}",
                fix=f"remove {file.parent} and index the documents again",
            ) from error
    paragraphs, documents = (
        np.asarray(_read_column(shard, *column))
        for column in (("sentences.arrow", "paragraph"), ("paragraphs.arrow", "document"))
    )
    add_neighbors(codes, scales, documents[paragraphs])
    codes.flush()
    np.save(paths[1], scales)


def add_neighbors(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], documents: npt.NDArray[np.int64]
) -> None:
    """Adds to each embedding those of its neighbors, in place; its length stays.

    Args:
        codes: Shape [sentences, dimension].
        scales: Factor of each row of codes, shape [sentences].
        documents: Document of each sentence, shape [sentences].
    """
    tiny, previous = np.finfo(np.float32).tiny, np.empty((0, codes.shape[1]), np.float32)
    for start in range(0, len(codes), BLOCK_SIZE):
        end = min(start + BLOCK_SIZE, len(codes))
        rest = slice(start, end + NUM_NEIGHBORS)
        rows = np.concatenate([previous, codes[rest] * scales[rest, None]])
        document = documents[start - len(previous) : end + NUM_NEIGHBORS]
        sums = np.zeros_like(rows)
        for distance in range(1, NUM_NEIGHBORS + 1):
            is_same = (document[distance:] == document[:-distance])[:, None]
            sums[distance:] += rows[:-distance] * is_same
            sums[:-distance] += rows[distance:] * is_same
        block = slice(len(previous), len(previous) + end - start)
        embeddings, sums = rows[block], sums[block]
        lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
        # Where neighbors cancel out, a length divided by their norm would be infinite.
        sums /= np.linalg.norm(sums, axis=1, keepdims=True).clip(tiny)
        sums *= NEIGHBOR_WEIGHT * lengths
        sums += embeddings
        sums *= lengths / np.linalg.norm(sums, axis=1, keepdims=True).clip(tiny)
        codes[start:end], scales[start:end] = _quantize(sums)
        previous = rows[: block.stop][-NUM_NEIGHBORS:]


def _write_approximate(shards: Sequence[Path], dimension: int) -> None:
    """Writes an inverted file of 8-bit codes over all shards (faiss)."""
    import faiss

    parts = [ShardEmbeddings.open(shard) for shard in shards]
    num_rows = sum(len(part.codes) for part in parts)
    num_lists = 2 ** round(np.log2(2 * np.sqrt(num_rows)))
    index = faiss.index_factory(dimension, f"IVF{num_lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    share = min(1.0, 64 * num_lists / num_rows)
    random = np.random.default_rng(0)
    samples = [
        part.rows(np.sort(random.permutation(len(part.codes))[: int(share * len(part.codes))]))
        for part in parts
    ]
    index.train(np.concatenate(samples))
    for part in parts:
        for start in range(0, len(part.codes), BLOCK_SIZE):
            index.add(part.rows(slice(start, start + BLOCK_SIZE)))
    faiss.write_index(index, str(shards[0].parent / APPROXIMATE_FILE))


@dataclass(frozen=True)
class ShardEmbeddings:
    """The embeddings of a shard."""

    codes: npt.NDArray[np.int8]
    """Shape [sentences, dimension]."""
    scales: npt.NDArray[np.float32]
    """Factor of each row of codes, shape [sentences]."""

    @classmethod
    def open(cls, shard: Path) -> "ShardEmbeddings":
        """Opens the embeddings of a shard, memory-mapped."""
        codes, scales = (np.load(shard / name, mmap_mode="r") for name in FILES)
        return cls(codes, scales)

    def rows(self, selection: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.float32]:
        """Returns embeddings in float32, shape [selected, dimension]."""
        codes = self.codes[selection].astype(np.float32)
        codes *= self.scales[selection][:, None]
        return codes

    def similarities(self, query: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Returns the similarity of every sentence to a query, shape [sentences].

        Beside the result it takes the memory of one block in float32.
        """
        products = np.empty(len(self.codes), np.float32)
        buffer = np.empty((SEARCH_BLOCK, len(query)), np.float32)
        for start in range(0, len(products), SEARCH_BLOCK):
            codes = self.codes[start : start + SEARCH_BLOCK]
            np.copyto(buffer[: len(codes)], codes)
            np.matmul(buffer[: len(codes)], query, out=products[start : start + len(codes)])
        products *= self.scales
        return products


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of an index; sentence indices count over all shards."""

    folder: Path
    info: EncoderInfo
    is_approximate: bool
    shards: tuple[ShardEmbeddings, ...]
    shard_bounds: Sequence[int]
    """Index of the first sentence of each shard, and the number of all sentences."""
    load_encoder: LoadEncoder | None

    @classmethod
    def open(
        cls,
        folder: Path,
        entry: dict[str, Any],
        shards: Sequence[Path],
        shard_bounds: Sequence[int],
        load_encoder: LoadEncoder | None,
    ) -> "Embeddings":
        """Opens the embeddings of an index.

        Args:
            folder: The index.
            entry: Their entry in the manifest.
            shards: Folders of the shards.
            shard_bounds: See the field.
            load_encoder: Loads the encoder for queries, when the first one comes.

        Raises:
            ValueError: The embeddings are damaged or of another version.
        """
        entry = dict(entry)
        if (version := entry.pop("format_version")) != FORMAT_VERSION:
            raise ValueError(f"embeddings of format {version}; as2ray reads only {FORMAT_VERSION}")
        is_approximate = entry.pop("approximate")
        info, parts = EncoderInfo(**entry), tuple(map(ShardEmbeddings.open, shards))
        for shard, part, start, end in zip(shards, parts, shard_bounds, shard_bounds[1:]):
            expected = (end - start, info.dimension)
            if part.codes.shape != expected or part.scales.shape != expected[:1]:
                raise ValueError(f"{shard.name} has not one embedding per sentence")
            if not np.isfinite(part.scales).all():
                raise ValueError(f"{shard.name} has embeddings that are not finite")
        return cls(folder, info, is_approximate, parts, shard_bounds, load_encoder)

    @cached_property
    def encoder(self) -> SupportsEncode:
        """The encoder of queries; it is loaded and checked at the first access.

        Raises:
            SentenceIndexError: No encoder was given, or it is not that of the embeddings.
        """
        load_encoder, stored_encoder = self.require_load_encoder(), self.folder / self.info.name
        encoder = load_encoder(str(stored_encoder) if stored_encoder.is_dir() else self.info.name)
        self.info.check(encoder)
        return encoder

    def require_load_encoder(self) -> LoadEncoder:
        """Returns what loads the encoder of queries.

        Raises:
            SentenceIndexError: The index was opened without it.
        """
        if self.load_encoder is None:
            raise SentenceIndexError(
                f"{self.folder} was opened without an encoder of queries",
                fix="open it with SentenceIndex.open(folder, load_sentence_encoder), with the "
                "function of as2ray.checkpoints.sentence_encoder",
            )
        return self.load_encoder

    def encode_query(self, question: str) -> npt.NDArray[np.float32]:
        """Returns the embedding of a question, shape [dimension].

        Raises:
            SentenceIndexError: It is not finite; see also `encoder`.
        """
        query: npt.NDArray[np.float32] = self.encode_queries([question])[0]
        return query

    def encode_queries(self, questions: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns the embeddings of questions together, shape [questions, dimension].

        Raises:
            SentenceIndexError: One is not finite; see also `encoder`.
        """
        queries: npt.NDArray[np.float32] = self.encoder.encode_queries(questions)
        for question, query in zip(questions, queries):
            if not np.isfinite(query).all():
                problem = f"{self.encoder.name} gives an embedding that is not finite for "
                raise SentenceIndexError(
                    f"{problem}{question!r:.100}",
                    fix="load the encoder in fp32, or choose another",
                )
        return queries

    def search(
        self, query: npt.NDArray[np.float32], k: int, exact: bool = False
    ) -> npt.NDArray[np.int64]:
        """Returns the indices of the k most similar sentences, best first.

        Args:
            query: Embedding of a question, shape [dimension].
            k: Maximum number of sentences.
            exact: Whether all sentences are compared even if there is an approximate index. They
                are, too, if it finds fewer than k.
        """
        if self.is_approximate and not exact:
            indices: npt.NDArray[np.int64] = self._approximate.search(query[None], k)[1][0]
            if (indices := indices[indices >= 0]).size == min(k, self.shard_bounds[-1]):
                return indices
        best_indices, best_scores = [], []
        for start, shard in zip(self.shard_bounds, self.shards):
            scores = shard.similarities(query)
            rows = np.arange(len(scores)) if k >= len(scores) else np.argpartition(-scores, k)[:k]
            best_indices.append(start + rows)
            best_scores.append(scores[rows])
        indices, scores = np.concatenate(best_indices), np.concatenate(best_scores)
        return indices[np.lexsort((indices, -scores))[:k]]

    def similarities(
        self, query: npt.NDArray[np.float32], indices: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Returns the similarity of some sentences to a query, shape [indices]."""
        result = np.empty(len(indices), np.float32)
        numbers = np.searchsorted(self.shard_bounds, indices, side="right") - 1
        for number in np.unique(numbers):
            is_here = numbers == number
            rows = indices[is_here] - self.shard_bounds[number]
            result[is_here] = self.shards[number].rows(rows) @ query
        return result

    def nearest_similarities(self, questions: Sequence[str]) -> list[float]:
        """Returns the similarity of the nearest sentence to each question."""
        queries = self.encode_queries(questions)
        return [float(self.similarities(query, self.search(query, 1))[0]) for query in queries]

    @cached_property
    def _approximate(self) -> Any:
        import faiss

        index: Any = faiss.read_index(str(self.folder / APPROXIMATE_FILE), faiss.IO_FLAG_MMAP)
        index.nprobe = NUM_PROBES
        return index
