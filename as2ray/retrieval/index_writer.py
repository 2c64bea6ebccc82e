"""Writes an index of the sentences of documents, atomically, in one or several shards.

    INDEX/manifest.json    format_version, settings, counts, skipped documents, file sizes,
                           fingerprint
    INDEX/shard-00000/     sentences, paragraphs, documents (Arrow, memory-mapped), bm25s's index,
                           embeddings (see `as2ray.retrieval.embeddings`)

The words of each shard are counted alone. Then each shard is weighted with the statistics of all.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from functools import partial
from glob import escape
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass
from scipy import sparse

from as2ray.errors import ConfigError, CorpusError, SentenceIndexError, validate_arguments
from as2ray.progress import task
from as2ray.retrieval.documents import (
    DocumentColumns,
    FilePart,
    SkippedDocuments,
    list_parts,
    read_documents,
)
from as2ray.retrieval.embeddings import (
    ENCODER_FOLDER,
    LoadEncoder,
    MapBlocks,
    write_embeddings,
)
from as2ray.tables.atomic import atomic_folder
from as2ray.tables.fingerprint import Fingerprint
from as2ray.tables.schema import from_rows
from as2ray.text.bm25 import BM25
from as2ray.text.sentences import get_splitter, split, versioned_name
from as2ray.text.term_counts import CollectionStatistics, TermCounts, build_bm25s

log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 2
"""Version of the index's folder; another version cannot be opened."""

MANIFEST: Final = "manifest.json"

SHARD_SCHEMAS: Final = {
    "sentences": pa.schema([("text", pa.large_string()), ("paragraph", pa.int32())]),
    "paragraphs": pa.schema([("heading", pa.large_string()), ("document", pa.int32())]),
    "documents": pa.schema([("id", pa.string()), ("title", pa.string())]),
}
"""Tables of a shard; `paragraph` and `document` are row indices within the shard."""

COUNT_FILES: Final = ("vocabulary.json", "counts.npz")
"""Temporary files of a shard with its `TermCounts`, until its scores are computed."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class IndexConfig:
    """Settings that change the content of an index."""

    bm25: BM25 = field(default_factory=BM25)
    """Settings of the scores."""
    sentence_splitter: str = "syntok"
    """Name of a sentence splitter; see `as2ray.text.sentences`."""
    columns: DocumentColumns = field(default_factory=DocumentColumns)
    """Names of a table's columns."""
    encoder: str | None = None
    """Sentence encoder of the embeddings: a folder, a hub id or a packaged name; None for none."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with the version of the splitter."""
        return {**asdict(self), "sentence_splitter": versioned_name(self.sentence_splitter)}


MapFunction = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Calls a function on each argument, possibly in parallel, and returns the results in order."""


def map_in_process(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """Calls a function on one argument after the other, in this process."""
    return [function(argument) for argument in arguments]


@validate_arguments
def write_index(
    documents: str | Path,
    folder: str | Path,
    config: IndexConfig | None = None,
    *,
    num_shards: PositiveInt = 1,
    overwrite: bool = False,
    map_function: MapFunction = map_in_process,
    load_encoder: LoadEncoder | None = None,
    map_blocks: MapBlocks | None = None,
    with_subject_bound: bool = False,
) -> dict[str, Any]:
    """Writes an index; the folder appears when it is complete.

    Embeddings of an interrupted build stay in a hidden folder beside it, and the next build of the
    same sentences goes on from there.

    Args:
        documents: A folder of documents, one document, or a table of them (JSON lines, Parquet).
        folder: Where the index is written.
        config: How documents are read, split and scored.
        num_shards: Maximum number of shards; there are no more than files and row groups.
        overwrite: Whether an existing index in `folder` is replaced.
        map_function: Runs the shards, for example on a cluster; by default one after the other.
        load_encoder: Loads `config.encoder`, such as `load_sentence_encoder`.
        map_blocks: Encodes the sentences, for example on a cluster; by default in this process.
        with_subject_bound: Whether an index with embeddings gets the similarity below which
            questions are on other subjects; see `store_min_similarity`.

    Returns:
        The manifest.

    Raises:
        ConfigError: There is no such sentence splitter, or `config.encoder` needs `load_encoder`.
        CorpusError: The documents contain no words, or two of them have the same id.
        SentenceIndexError: `folder` exists, or cannot be written; an embedding is not finite.
    """
    config = config or IndexConfig()
    output = Path(folder).resolve()
    get_splitter(config.sentence_splitter)
    if output.exists() and not (overwrite and (output / MANIFEST).is_file()):
        fix = "choose another folder, or pass overwrite, which replaces only an index"
        raise SentenceIndexError(f"{output} exists", fix)
    # Whether another process still builds there cannot be known on file systems of several nodes.
    for leftover in output.parent.glob(f".{escape(output.name)}-new-????????"):
        log.warning("%s is an unfinished index; if nothing builds it, remove it", leftover)
    if not str(documents):  # As a path it would be this folder.
        raise CorpusError("'' is no folder or file of documents")
    parts = list_parts(Path(documents).resolve())
    bounds = np.linspace(0, len(parts), min(num_shards, len(parts)) + 1).round().astype(int)
    groups = [parts[start:end] for start, end in pairwise(bounds)]
    staging = output.with_name(f".{output.name}-embeddings")
    embed = encoder = None
    if config.encoder is not None:
        if load_encoder is None:
            fix = "pass load_encoder=load_sentence_encoder"
            raise ConfigError(f"nothing loads the encoder {config.encoder}", fix)
        encoder = load_encoder(config.encoder)
        embed = partial(
            write_embeddings,
            staging=staging,
            encoder=encoder,
            load_encoder=load_encoder,
            map_blocks=map_blocks,
        )
    try:
        with atomic_folder(output, overwrite=overwrite) as new_folder:
            manifest = _write_contents(new_folder, groups, config, map_function, embed)
            if with_subject_bound and encoder is not None:
                from as2ray.retrieval.subject_bound import store_min_similarity  # It imports this.

                with task("bound of the similarity"):
                    manifest = store_min_similarity(new_folder, lambda _: encoder)
    except OSError as error:
        problem = f"{output}: the index cannot be written: {error}"
        fix = "free disk space or choose another folder; the incomplete index was removed"
        raise SentenceIndexError(problem, fix) from error
    shutil.rmtree(staging, ignore_errors=True)
    return manifest


def _write_contents(
    folder: Path,
    groups: Sequence[list[FilePart]],
    config: IndexConfig,
    map_function: MapFunction,
    embed: Callable[[Sequence[Path]], dict[str, Any]] | None,
) -> dict[str, Any]:
    shards = [folder / f"shard-{number:05d}" for number in range(len(groups))]
    skipped = SkippedDocuments()
    write_counts = partial(_write_shard_counts, config=config)
    with task("sentences of the documents"):
        for shard_skipped in map_function(write_counts, list(zip(shards, groups))):
            skipped.counts.update(shard_skipped.counts)
            skipped.examples = {**shard_skipped.examples, **skipped.examples}
    statistics = CollectionStatistics.from_shards(map(_load_term_counts, shards))
    if not statistics.num_words:
        raise CorpusError(
            f"{statistics.num_texts:,} sentences without a word; skipped: {skipped}",
            fix="give a folder of text, Markdown, HTML, JSON lines or Parquet",
        )
    map_function(partial(_write_shard_scores, statistics=statistics, bm25=config.bm25), shards)
    summary = _summarize_shards(shards)
    embeddings = embed(shards) if embed else None
    manifest = {
        "format_version": FORMAT_VERSION,
        "settings": config.to_dict(),
        **summary,
        "words": len(statistics.document_frequency),
        "skipped": dict(skipped.counts),
        "examples": skipped.examples,
        "embeddings": embeddings,
        "shards": [shard.name for shard in shards],
        "packages": {name: version(name) for name in ("as2ray", "bm25s", "pyarrow", "numpy")},
    }
    return _write_manifest(folder, manifest)


def _write_manifest(folder: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Writes the manifest, to which the sizes of all files are added; returns it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    manifest = {**entries, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def add_embeddings(
    index: str | Path,
    folder: str | Path,
    encoder: str,
    load_encoder: LoadEncoder,
    map_blocks: MapBlocks | None = None,
) -> dict[str, Any]:
    """Writes an index with the sentences of another one and embeddings of them.

    Args:
        index: An index; embeddings that it has are not used.
        folder: A new folder. Its other files are links to those of the index where possible.
        encoder: Name of the sentence encoder. A folder is copied into the index.
        load_encoder: Loads the encoder.
        map_blocks: Encodes the sentences, for example on a cluster; by default in this process.

    Returns:
        The manifest.

    Raises:
        SentenceIndexError: An embedding is not finite.
    """
    index, output = Path(index), Path(folder).resolve()
    manifest = json.loads((index / MANIFEST).read_text(encoding="utf-8"))
    staging = output.with_name(f".{output.name}-embeddings")
    with atomic_folder(output) as new:
        ignored = shutil.ignore_patterns(MANIFEST, "embedding*", ENCODER_FOLDER)
        shutil.copytree(index, new, dirs_exist_ok=True, ignore=ignored, copy_function=_link)
        shards = [new / name for name in manifest["shards"]]
        loaded = load_encoder(encoder)
        entry = write_embeddings(shards, staging, loaded, load_encoder, map_blocks)
        if Path(encoder).is_dir():
            shutil.copytree(encoder, new / ENCODER_FOLDER, copy_function=_link)
            entry["name"] = ENCODER_FOLDER
        settings = {**manifest["settings"], "encoder": entry["name"]}
        manifest = _write_manifest(new, {**manifest, "settings": settings, "embeddings": entry})
    shutil.rmtree(staging, ignore_errors=True)
    return manifest


def _link(source: str, target: str) -> None:
    """Links a file, or copies it where that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _write_shard_counts(
    shard: tuple[Path, list[FilePart]], config: IndexConfig
) -> SkippedDocuments:
    """Reads and splits the documents of some parts, and counts their words."""
    folder, parts = shard
    folder.mkdir()
    skipped = SkippedDocuments()
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in SHARD_SCHEMAS}
    for document in read_documents(parts, config.columns, skipped):
        for heading, block_text in document.blocks:
            # Only the splitter `lines` looks at line ends.
            is_by_line = config.sentence_splitter == "lines"
            text = block_text if is_by_line else block_text.replace("\n", " ")
            for start, end in split(text, config.sentence_splitter):
                rows["sentences"].append((text[start:end], len(rows["paragraphs"])))
            rows["paragraphs"].append((heading, len(rows["documents"])))
        rows["documents"].append((document.id, document.title))
    for name, schema in SHARD_SCHEMAS.items():
        with pa.ipc.new_file(str(folder / f"{name}.arrow"), schema) as file:
            file.write_table(from_rows(rows[name], schema))
    term_counts = config.bm25.count_terms([text for text, _ in rows["sentences"]])
    vocabulary_file, matrix_file = (folder / name for name in COUNT_FILES)
    vocabulary_file.write_text(json.dumps(term_counts.vocabulary), encoding="utf-8")
    sparse.save_npz(matrix_file, term_counts.matrix, compressed=False)
    return skipped


def _load_term_counts(folder: Path) -> TermCounts:
    vocabulary_file, matrix_file = (folder / name for name in COUNT_FILES)
    vocabulary = json.loads(vocabulary_file.read_text(encoding="utf-8"))
    return TermCounts(vocabulary, sparse.load_npz(matrix_file))


def _write_shard_scores(folder: Path, statistics: CollectionStatistics, bm25: BM25) -> None:
    """Writes the scores of a shard and deletes its counts."""
    retriever = build_bm25s(_load_term_counts(folder), statistics, bm25.k1, bm25.b)
    retriever.save(folder / "bm25", show_progress=False)
    for name in COUNT_FILES:
        (folder / name).unlink()


def _summarize_shards(shards: Sequence[Path]) -> dict[str, Any]:
    """Returns counts and the fingerprint, which do not depend on the number of shards."""
    sentences, documents = (
        pa.concat_tables([memory_map_table(shard / f"{name}.arrow") for shard in shards])
        for name in ("sentences", "documents")
    )
    counts_by_id = pc.value_counts(documents["id"])
    if (num_distinct := len(counts_by_id)) != len(documents):
        repeated = counts_by_id.filter(pc.greater(counts_by_id.field("counts"), 1))[0]["values"]
        raise CorpusError(
            f"{len(documents):,} documents with {num_distinct:,} distinct ids; several are called "
            f"{repeated.as_py()!r}",
            fix="name the column with the ids, or a column that does not exist to number the rows",
        )
    digests = []
    for table in (documents, sentences.select(["text"])):
        fingerprint = Fingerprint()
        for batch in table.to_batches(65_536):
            fingerprint.update(_copy_rows(batch))
        digests.append(fingerprint.hexdigest())
    counts = {"sentences": len(sentences), "documents": len(documents)}
    return {**counts, "fingerprint": "-".join(digests)}


def _copy_rows(batch: pa.RecordBatch) -> pa.Table:
    """Copies rows of a shard, whose text may be longer than the 32-bit offsets of strings.

    The offsets of a slice count from the start of the shard; those of a copy do not.
    """
    return pa.Table.from_batches([batch.take(pa.array(np.arange(batch.num_rows)))])


def memory_map_table(path: Path) -> pa.Table:
    """Opens an Arrow file as a memory-mapped table."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
