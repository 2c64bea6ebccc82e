"""Stages of sentence encoders: adapted to documents, embeddings of an index, similarities."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.evaluation.measures import evaluate
from as2ray.experiments.bm25 import INDEX
from as2ray.experiments.rankers import StoredScores
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.tables import TABLE, filtered_table, read_table
from as2ray.retrieval.index_writer import add_embeddings
from as2ray.tables.filters import QuestionFilter
from as2ray.training.config import TrainingConfig

log = logging.getLogger(__name__)

ENCODER = "encoder"
"""Folder of the sentence encoder in a stage that trains one."""


@dataclass(frozen=True, eq=False)
class AdaptedEncoder(Stage):
    """A sentence encoder that is trained on the answers of tables, if that is better on dev."""

    RESOURCES = "device"

    encoder: str
    """Folder, hub id or packaged name of the encoder to start from."""
    train: tuple[Stage, ...]
    """Tables whose positives are the answers to their questions."""
    dev: Stage
    training: TrainingConfig

    def run(self, context: StageContext) -> Outputs:
        """Trains; keeps the encoder as it was if dev likes it better."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder, save_sentence_encoder
        from as2ray.training.encoder_training import train_encoder

        encoder = load_sentence_encoder(self.encoder)
        columns = ["question", "candidate", "label"]
        rows = pa.concat_tables(read_table(context.path(t)).select(columns) for t in self.train)
        positives = rows.filter(pc.equal(rows["label"], 1))
        dev = read_table(context.path(self.dev))
        untrained = _mean_ap(encoder, dev)
        questions, answers = positives["question"].to_pylist(), positives["candidate"].to_pylist()
        train_encoder(encoder, questions, answers, self.training)
        adapted = _mean_ap(encoder, dev)
        log.info("sentence encoder: dev MAP %.4f, untrained %.4f", adapted, untrained)
        if adapted < untrained:
            encoder = load_sentence_encoder(self.encoder)
        save_sentence_encoder(encoder, context.output / ENCODER)
        quality = {"untrained": untrained, "adapted": adapted}
        return {"dev": quality, "is_adapted": adapted >= untrained, "num_pairs": len(questions)}

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        return {"data": self.encoder, "source": f"sentence encoder {self.encoder}"}


@dataclass(frozen=True, eq=False)
class EmbeddedIndex(Stage):
    """An index with the embeddings of its sentences."""

    RESOURCES = "pool"

    index: Stage
    encoder: Stage

    def run(self, context: StageContext) -> Outputs:
        """Encodes the sentences, with actors if there are workers."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        map_blocks: Any = None
        if context.workers.num_workers and context.store.is_local:
            from as2ray.distributed.index import map_on_actors

            map_blocks = partial(map_on_actors, workers=context.workers)
        encoder = str(context.path(self.encoder) / ENCODER)
        source, folder = context.path(self.index) / INDEX, context.output / INDEX
        manifest = add_embeddings(source, folder, encoder, load_sentence_encoder, map_blocks)
        return {name: manifest[name] for name in ("documents", "sentences", "fingerprint")}


@dataclass(frozen=True, eq=False)
class SimilarityScores(StoredScores):
    """The similarity of each question and its candidates."""

    RESOURCES = "device"

    table: Stage
    encoder: Stage | str
    """A stage, or the name of an encoder that is used as it is."""
    question_filter: QuestionFilter = "raw"

    def run(self, context: StageContext) -> None:
        """Encodes the texts, and multiplies their embeddings."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        source = self.encoder
        path = context.path(source) / ENCODER if isinstance(source, Stage) else source
        encoder = load_sentence_encoder(path)
        rows = filtered_table(context.path(self.table), self.question_filter)
        scores = similarities(encoder, rows)
        pq.write_table(pa.table({"score": scores}), context.output / TABLE)


def similarities(encoder: Any, rows: pa.Table) -> np.ndarray:
    """Returns the similarity of the question and the candidate of each row, shape [rows]."""
    columns = [
        rows[name].combine_chunks().dictionary_encode() for name in ("question", "candidate")
    ]
    questions, candidates = (column.dictionary.to_pylist() for column in columns)
    queries, documents = encoder.encode_queries(questions), encoder.encode_documents(candidates)
    first, second = (column.indices.to_numpy() for column in columns)
    return np.asarray((queries[first] * documents[second]).sum(1), np.float64)


def _mean_ap(encoder: Any, rows: pa.Table) -> float:
    result = evaluate(rows, similarities(encoder, rows), ["AP"], question_filter="no_all_negative")
    return float(result.measures["AP"])
