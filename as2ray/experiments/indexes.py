"""Stages that index candidates, collections and documents."""

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.corpora.registry import get_corpus
from as2ray.errors import CorpusError
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.queries import distinct_texts
from as2ray.experiments.stage import NOT_IDENTITY, Outputs, Result, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import TABLE, check_release, release_files
from as2ray.retrieval.documents import DocumentColumns, list_parts
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables import raw_files
from as2ray.tables.atomic import replace_folder
from as2ray.tables.source_files import describe_files

log = logging.getLogger(__name__)

INDEX = "index"
"""Folder of the index in a stage that makes one."""


@dataclass(frozen=True, eq=False)
class CandidateIndex(Stage):
    """An index of the distinct candidates of tables; each text is a sentence."""

    tables: tuple[Stage, ...]
    bm25: BM25Grid

    def run(self, context: StageContext) -> Outputs:
        """Collects the texts, and indexes them in one shard."""
        texts = distinct_texts(context, self.tables)
        context.scratch.mkdir(parents=True, exist_ok=True)
        source = context.scratch / "texts.parquet"
        pq.write_table(pa.table({"text": texts}), source)
        config = IndexConfig(self.bm25.chosen(context), sentence_splitter="lines")
        return write_stage_index(context, source, config)


@dataclass(frozen=True, eq=False)
class CollectionTexts(Stage):
    """The texts of a whole collection of a corpus, each on one line, as a Parquet file."""

    corpus: str
    name: str
    """One of the corpus' `collections`."""
    data_dir: str = field(metadata=NOT_IDENTITY)
    """Absolute folder of the release."""
    check_size: bool = True
    """Whether the number of texts must be the published one, as far as that is not rounded."""

    def run(self, context: StageContext) -> Outputs:
        """Writes the texts as they are read; a row group is the unit of the index's shards."""
        num_texts, schema = 0, pa.schema([("candidate", pa.large_string())])
        corpus = get_corpus(self.corpus)
        with pq.ParquetWriter(context.output / TABLE, schema, compression="zstd") as writer:
            for texts in corpus.read_collection(self.name, self.data_dir):
                writer.write_table(pa.table({"candidate": texts}, schema=schema))
                num_texts += len(texts)
        if not num_texts:
            problem = f"{self.corpus}/{self.name} in {self.data_dir} has no texts"
            raise CorpusError(problem, fix="use the published file")
        is_verified = self.check_size and corpus.check_collection_size(self.name, num_texts)
        files = describe_files(self._files())
        return {"num_texts": num_texts, "verified": is_verified, "source": files}

    def verify(self, result: Result) -> None:
        """Refuses texts whose release has changed; those of one that is gone are kept."""
        check_release(result, self._files(), f"the collection {self.corpus}/{self.name}")

    def _files(self) -> dict[str, Path]:
        return release_files(self.corpus, self.name, self.data_dir)

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        corpus = get_corpus(self.corpus)
        file = raw_files.find_file(Path(self.data_dir), corpus.collections[self.name])
        state = "" if file else f"missing ({' or '.join(corpus.collections[self.name])}): "
        source = f"{state}{self.corpus} ({corpus.license}): {self.data_dir}"
        return {"data": f"{self.corpus}/{self.name}", "source": source}


@dataclass(frozen=True, eq=False)
class CollectionIndex(CandidateIndex):
    """An index of one `CollectionTexts`, whose texts need not fit into memory.

    A text that the collection has twice is found twice, and is then one candidate.
    """

    RESOURCES = "pool"

    def run(self, context: StageContext) -> Outputs:
        """Indexes the texts, with one task of Ray per shard if there are workers."""
        columns = DocumentColumns(text="candidate")
        config = IndexConfig(self.bm25.chosen(context), "lines", columns)
        num_shards = max(1, context.workers.num_workers)
        return write_stage_index(context, context.path(self.tables[0]) / TABLE, config, num_shards)


@dataclass(frozen=True, eq=False)
class DocumentIndex(Stage):
    """An index of the sentences of a user's documents."""

    VERSION = 3
    RESOURCES = "pool"

    source: str = field(metadata=NOT_IDENTITY)
    """Absolute path of a folder of documents, or of a table of them."""
    content_hash: str
    config: IndexConfig
    num_shards: int | None = field(default=None, metadata=NOT_IDENTITY)
    """Maximum number of shards, by default as many as workers; they change no result."""

    @classmethod
    def from_documents(
        cls, source: str | Path, config: IndexConfig, num_shards: int | None = None
    ) -> "DocumentIndex":
        """Returns the stage for the documents as they are now.

        Raises:
            CorpusError: There is nothing to read.
        """
        source = Path(source).resolve()
        return cls(str(source), hash_documents(source), config, num_shards)

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Adds the version of the sentence splitter."""
        return {**super().identity(fingerprints), "config": self.config.to_dict()}

    def run(self, context: StageContext) -> Outputs:
        """Indexes the documents, with one task of Ray per shard if there are workers."""
        num_shards = self.num_shards or max(1, context.workers.num_workers)
        return write_stage_index(context, Path(self.source), self.config, num_shards)

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        return {"data": self.source, "source": f"documents {self.source}"}


def hash_documents(source: Path) -> str:
    """Returns a hash of the names and contents of all files below a path.

    Raises:
        CorpusError: There is nothing to read.
    """
    digest = hashlib.sha256()
    for path in sorted({part.path for part in list_parts(source)}):
        # Names may be invalid Unicode, and files unreadable: the index reports them.
        digest.update(os.fsencode(path.removeprefix(str(source))) + b"\0")
        with suppress(OSError), open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, hashlib.sha256).digest())
    return digest.hexdigest()[:16]


def write_stage_index(
    context: StageContext, source: Path, config: IndexConfig, num_shards: int = 0
) -> Outputs:
    """Writes an index into the folder of a stage; 0 shards are one that this process writes."""
    new = context.scratch / INDEX
    options: dict[str, Any] = {"overwrite": True}
    if config.encoder is not None:
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        options["load_encoder"] = load_sentence_encoder
    # Shards are files of one folder, which all nodes must see.
    if num_shards and context.workers.num_workers and context.store.is_local:
        from as2ray.distributed.index import build_sharded

        options["workers"] = context.workers
        manifest = build_sharded(source, new, config, num_shards=num_shards, **options)
    else:
        num_shards = max(1, num_shards)
        manifest = write_index(source, new, config, num_shards=num_shards, **options)
    replace_folder(new, context.output / INDEX)
    outputs = {n: manifest[n] for n in ("documents", "sentences", "skipped", "fingerprint")}
    counts = outputs["sentences"], outputs["documents"], outputs["skipped"] or "nothing"
    log.info("index: %d sentences of %d documents, skipped %s", *counts)
    return outputs


def open_index(store: Store, folder: Path) -> SentenceIndex:
    """Opens the index of a stage on any node."""
    store.fetch_paths([folder])
    return SentenceIndex.open(folder / INDEX)
