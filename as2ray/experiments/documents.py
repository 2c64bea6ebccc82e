"""Stages of a user's own documents: questions, labeled tables, a calibrated ranker."""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.corpora.leaks import check_leaks
from as2ray.errors import CorpusError, StaleStageError
from as2ray.experiments.indexes import INDEX, hash_documents
from as2ray.experiments.pseudo_labels import too_few_questions
from as2ray.experiments.queries import write_queries
from as2ray.experiments.rankers import RANKER, copy_ranker
from as2ray.experiments.stage import NOT_IDENTITY, Outputs, Result, Stage, StageContext
from as2ray.experiments.tables import read_table, write_table
from as2ray.retrieval.answer_fitting import (
    fit_answer_scoring,
    fit_min_similarity,
    fit_similarity_gap,
)
from as2ray.retrieval.answer_scoring import FILE, AnswerScoring, Parts, default_scoring, logits_of
from as2ray.retrieval.pseudo_labels import Query
from as2ray.retrieval.query_generation import QuerySource, generate_queries
from as2ray.retrieval.query_generator import QuestionGenerator
from as2ray.retrieval.question_answering import find_candidates
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.loading import load_table
from as2ray.tables.reliability import FEW_QUESTIONS
from as2ray.tables.schema import count_table

log = logging.getLogger(__name__)

MAX_UNLABELED = 200
"""Questions without labels from which the similarity of answerable questions is measured."""


@dataclass(frozen=True, eq=False)
class GivenQueries(Stage):
    """Questions of a user."""

    queries: tuple[Query, ...] = field(metadata=NOT_IDENTITY)
    content_hash: str

    @classmethod
    def from_queries(cls, queries: list[Query]) -> "GivenQueries":
        """Returns the stage of these questions."""
        lines = "\n".join(f"{query.id} {query.text}" for query in queries)
        return cls(tuple(queries), hashlib.sha256(lines.encode()).hexdigest()[:16])

    def run(self, context: StageContext) -> Outputs:
        """Stores them."""
        return write_queries(self.queries, context.output)


@dataclass(frozen=True, eq=False)
class GeneratedQueries(Stage):
    """Questions that are made from the sentences of an index."""

    RESOURCES = "pool"

    index: Stage
    query_sources: tuple[QuerySource, ...]
    max_questions: int | None
    query_generator: str | None = None
    """Absolute folder or hub id of a sequence-to-sequence model for the source `generator`."""
    prompt: str = ""
    """Text before each sentence that the generator reads."""

    def run(self, context: StageContext) -> Outputs:
        """Generates them; with workers, the generator runs in actors.

        Raises:
            ConfigError: Fewer than two questions were made.
        """
        generator: Any = None
        map_function: Any = map
        if self.query_generator is not None:
            generator = partial(QuestionGenerator, self.query_generator, self.prompt)
        if generator is not None and context.workers.num_workers:
            from as2ray.distributed.index import map_on_actors

            map_function = partial(map_on_actors, workers=context.workers)
        elif generator is not None:
            generator = generator()
        queries = generate_queries(
            SentenceIndex.open(context.path(self.index) / INDEX),
            self.query_sources,
            self.max_questions,
            query_generator=generator,
            map_function=map_function,
        )
        if len(queries) < 2:
            sources = list(self.query_sources)
            raise too_few_questions(f"only {len(queries)} questions were made from {sources}")
        return {**write_queries(queries, context.output), "generator": self._generator_hash()}

    def verify(self, result: Result) -> None:
        """Refuses questions of a generator whose folder has changed; one that is gone is kept."""
        stored, current = result.outputs.get("generator"), self._generator_hash()
        if stored and current and stored != current:
            raise StaleStageError(
                f"{self.query_generator} has changed since it generated questions",
                fix="give the changed model another path, or choose another --store",
            )

    def _generator_hash(self) -> str | None:
        folder = Path(self.query_generator or "")
        return hash_documents(folder) if self.query_generator and folder.is_dir() else None

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        generator = self.query_generator
        source = generator and f"model {generator}"
        return {"data": generator or "+".join(self.query_sources), "source": source}


@dataclass(frozen=True, eq=False)
class LabeledTable(Stage):
    """A user's candidates table."""

    source: str = field(metadata=NOT_IDENTITY)
    """Absolute path of a file or folder; see `load_table`."""
    content_hash: str

    def run(self, context: StageContext) -> Outputs:
        """Copies it."""
        return write_table(load_table(self.source), context.output)


def labeled_tables(sources: Mapping[Any, str]) -> dict[str, Stage]:
    """Returns the stages of a user's candidates tables, by name.

    Args:
        sources: Files or folders; see `load_table`.

    Raises:
        CorpusError: A source has no candidates table, or its table has one label only.
        LeakError: Two tables share questions.
    """
    tables = {name: load_table(source) for name, source in sources.items()}
    for name, rows in tables.items():
        if not 0 < count_table(rows).num_positives < rows.num_rows:
            raise CorpusError(
                f"{sources[name]} has {count_table(rows)}; it needs both labels: answers, and "
                "candidates that are none"
            )
    check_leaks(tables)
    return {
        name: LabeledTable(str(Path(sources[name]).absolute()), fingerprint(rows))
        for name, rows in tables.items()
    }


@dataclass(frozen=True, eq=False)
class FittedScoring(Stage):
    """How the parts of the score of a retrieved candidate are combined."""

    RESOURCES = "device"
    VERSION = 5

    index: Stage
    """Index with embeddings."""
    dev: Stage
    """Questions about the documents."""
    is_labeled: bool
    """Whether people labeled dev. BM25's labels would make BM25 the best part, so they are not
    used: the weights are `DEFAULT_WEIGHTS` then, and the ranker is not asked."""
    ranker: Stage | None
    min_precision: float
    off_topic: tuple[str, ...]
    """Questions on other subjects."""
    high_confidence: bool = False

    def run(self, context: StageContext) -> Outputs:
        """Retrieves candidates of each question, ranks them, and fits."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        index = SentenceIndex.open(context.path(self.index) / INDEX, load_sentence_encoder)
        encoder = index.embeddings.info.fingerprint
        positives = positives_by_question(read_table(context.path(self.dev)))
        questions = [*positives] if self.is_labeled else [*positives][:MAX_UNLABELED]
        # A ranker that learned from BM25's labels alone makes answers worse (docs/log.md).
        scoring = default_scoring(encoder, has_ranker=self.is_labeled and self.ranker is not None)
        ranker, stage_zero, labeled = None, scoring, []
        if self.is_labeled:
            found = retrieve_parts(index, questions, scoring)
            gap = fit_similarity_gap(label_parts(questions, found, positives))
            stage_zero = replace(scoring, max_similarity_gap=gap)
            if self.ranker is not None:
                ranker = load(context.path(self.ranker) / RANKER)
            found = retrieve_parts(index, questions, stage_zero, ranker)
            labeled = label_parts(questions, found, positives)
            if len(labeled) < FEW_QUESTIONS:
                log.warning(
                    "%d labeled dev questions are few: the weights and the threshold are rough",
                    len(labeled),
                )
            scoring = fit_answer_scoring(labeled, self.min_precision, (), encoder, gap)
        # A ranker that is not asked need not rank what is found for questions on other subjects.
        ranker = ranker if scoring.uses_ranker else None
        off_topic = retrieve_parts(index, self.off_topic, stage_zero, ranker)
        others = [parts for parts, texts in off_topic if texts]
        if self.is_labeled:
            scoring = fit_answer_scoring(
                labeled,
                self.min_precision,
                others,
                encoder,
                gap,
                high_confidence=self.high_confidence,
            )
        else:
            found = retrieve_parts(index, questions, stage_zero)
            scoring = fit_min_similarity(
                scoring, [parts for parts, texts in found if texts], others
            )
        scoring.write(context.output)
        log.debug("answers by %s", scoring.describe().replace("\n", "; "))
        return {"weights": scoring.weights, "dev": scoring.dev_quality}


def positives_by_question(rows: pa.Table) -> dict[str, set[str]]:
    """Returns the texts of the answers to each question, with single spaces."""
    positives: dict[str, set[str]] = {}
    columns = (rows[name].to_pylist() for name in ("question", "candidate", "label"))
    for question, text, label in zip(*columns):
        answers = positives.setdefault(question, set())
        if label:
            answers.add(" ".join(text.split()))
    return positives


def retrieve_parts(
    index: SentenceIndex,
    questions: Sequence[str],
    stage_zero: AnswerScoring,
    ranker: Any = None,
    num_candidates: int = 100,
) -> Sequence[tuple[Parts, list[str]]]:
    """Returns the parts of the score of the candidates that reach the ranker, and their texts."""
    results: list[tuple[dict[str, np.ndarray], list[str]]] = []
    for question in questions:
        found = find_candidates(index, stage_zero, question, num_candidates, num_neighbors=1)
        parts = {name: values[found.kept] for name, values in found.parts.items()}
        results.append((parts, index.texts(found.sentences)))
    if ranker is not None:
        texts = [texts for _, texts in results]
        for (parts, _), ranking in zip(results, ranker.rank_many(zip(questions, texts))):
            parts["ranker"] = logits_of(ranking)
    return results


def label_parts(
    questions: Sequence[str],
    found: Sequence[tuple[Parts, list[str]]],
    positives: Mapping[str, set[str]],
) -> list[tuple[Parts, np.ndarray]]:
    """Returns the parts of the score of each question's candidates, and their labels."""
    return [
        (parts, np.array([" ".join(text.split()) in positives[question] for text in texts]))
        for question, (parts, texts) in zip(questions, found)
        if texts
    ]


@dataclass(frozen=True, eq=False)
class AnsweringRanker(Stage):
    """A ranker with the scoring of its answers in its folder."""

    ranker: Stage
    scoring: FittedScoring

    def run(self, context: StageContext) -> None:
        """Copies both."""
        copy_ranker(context.path(self.ranker) / RANKER, context.output)
        shutil.copy(context.path(self.scoring) / FILE, context.output / RANKER)
