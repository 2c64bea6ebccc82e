"""Stages of sentence encoders: adapted to documents, embeddings of an index, similarities."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.distributed.score import read_scores
from as2ray.errors import CorpusError
from as2ray.evaluation.measures import evaluate
from as2ray.experiments.documents import positives_by_question
from as2ray.experiments.indexes import INDEX
from as2ray.experiments.rankers import CHANGED_MODEL_FIX, RANKER, StoredScores
from as2ray.experiments.stage import Outputs, Result, Stage, StageContext
from as2ray.experiments.tables import TABLE, filtered_table, read_table, write_table
from as2ray.retrieval.answer_fitting import fit_answer_scoring
from as2ray.retrieval.answer_scoring import AnswerScoring, default_scoring, logit_of
from as2ray.retrieval.baselines import similarities
from as2ray.retrieval.embeddings import add_heading
from as2ray.retrieval.index_writer import add_embeddings
from as2ray.retrieval.question_answering import QuestionAnswer, QuestionAnswerer
from as2ray.retrieval.sentence_index import RetrievalMethod, SentenceIndex
from as2ray.retrieval.subject_bound import store_min_similarity
from as2ray.tables.atomic import replace_folder
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.reliability import measure_abstention
from as2ray.tables.schema import question_offsets
from as2ray.tables.source_files import check_files, describe_files, model_files
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import EncoderJob

log = logging.getLogger(__name__)

NUM_CANDIDATES = 100
"""Candidates that are found for a question."""

COVERAGES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the questions at which the precision of the given answers is reported."""

ENCODER = "encoder"
"""Folder of the sentence encoder in a stage that trains one."""


class EncoderStage(Stage):
    """A stage that reads a sentence encoder, which may be a folder outside the store."""

    encoder: Stage | str

    def verify(self, result: Result) -> None:
        """Refuses a result of an encoder whose folder has changed; one that is gone is kept."""
        stored, source = result.outputs.get("encoder"), str(self.encoder)
        check_files(stored, self._encoder_files(), source, CHANGED_MODEL_FIX)

    def _encoder_files(self) -> dict[str, Path]:
        return {} if isinstance(self.encoder, Stage) else model_files(self.encoder)

    def _describe_encoder(self) -> dict[str, Any]:
        """Returns the entry of the outputs that `verify` compares."""
        return {"encoder": describe_files(self._encoder_files())}


@dataclass(frozen=True, eq=False)
class AdaptedEncoder(EncoderStage):
    """A sentence encoder that is trained on the answers of tables, if that is better on dev."""

    RESOURCES = "gang"

    encoder: str
    """Folder, hub id or packaged name of the encoder to start from."""
    train: tuple[Stage, ...]
    """Tables whose positives are the answers to their questions."""
    dev: Stage
    training: TrainingConfig

    def run(self, context: StageContext) -> Outputs:
        """Trains; keeps the encoder as it was if dev likes it better."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder, save_sentence_encoder
        from as2ray.distributed.train import train_encoder_on_ray

        tables = tuple(str(context.path(table)) for table in self.train)
        job = EncoderJob(self.encoder, tables, self.training)
        folder = context.scratch / ENCODER
        shutil.rmtree(folder, ignore_errors=True)
        num_pairs = train_encoder_on_ray(job, folder, context.workers, context.store)
        dev = read_table(context.path(self.dev))
        encoders = load_sentence_encoder(self.encoder), load_sentence_encoder(folder)
        untrained, adapted = (_mean_ap(encoder, dev) for encoder in encoders)
        log.debug("sentence encoder: dev MAP %.4f, untrained %.4f", adapted, untrained)
        is_adapted = adapted >= untrained
        shutil.rmtree(selected := context.scratch / "selected", ignore_errors=True)
        save_sentence_encoder(encoders[is_adapted], selected)
        replace_folder(selected, context.output / ENCODER)
        quality = {"untrained": untrained, "adapted": adapted}
        counts = {"is_adapted": is_adapted, "num_pairs": num_pairs}
        return {"dev": quality, **counts, **self._describe_encoder()}

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        return {"data": self.encoder, "source": f"sentence encoder {self.encoder}"}


@dataclass(frozen=True, eq=False)
class EmbeddedIndex(EncoderStage):
    """An index with the embeddings of its sentences."""

    VERSION = 2
    RESOURCES = "pool"

    index: Stage
    encoder: Stage | str
    """A stage, or the name of an encoder that is used as it is."""
    with_subject_bound: bool = False
    """Whether the index gets the bound of `store_min_similarity`, for answers without a ranker."""

    def run(self, context: StageContext) -> Outputs:
        """Encodes the sentences, with actors if there are workers."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        map_blocks: Any = None
        if context.workers.num_workers and context.store.is_local:
            from as2ray.distributed.index import map_on_actors

            map_blocks = partial(map_on_actors, workers=context.workers)
        encoder = _encoder_path(context, self.encoder)
        source, new = context.path(self.index) / INDEX, context.scratch / INDEX
        shutil.rmtree(new, ignore_errors=True)
        manifest = add_embeddings(source, new, encoder, load_sentence_encoder, map_blocks)
        if self.with_subject_bound:
            store_min_similarity(new, load_sentence_encoder)
        replace_folder(new, context.output / INDEX)
        outputs = {name: manifest[name] for name in ("documents", "sentences", "fingerprint")}
        return {**outputs, **self._describe_encoder()}


@dataclass(frozen=True, eq=False)
class SimilarityScores(EncoderStage, StoredScores):
    """The similarity of each question and its candidates."""

    RESOURCES = "device"

    table: Stage
    encoder: Stage | str
    """A stage, or the name of an encoder that is used as it is."""
    question_filter: QuestionFilter = "raw"

    def run(self, context: StageContext) -> Outputs:
        """Encodes the texts, and multiplies their embeddings."""
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        encoder = load_sentence_encoder(_encoder_path(context, self.encoder))
        rows = filtered_table(context.path(self.table), self.question_filter)
        scores = similarities(encoder, rows)
        pq.write_table(pa.table({"score": scores}), context.output / TABLE)
        return self._describe_encoder()


def _encoder_path(context: StageContext, encoder: Stage | str) -> str:
    return str(context.path(encoder) / ENCODER) if isinstance(encoder, Stage) else encoder


@dataclass(frozen=True, eq=False)
class IndexScores(StoredScores):
    """A part of the score of a table's candidates as an index scores them as answers.

    The embedding of a sentence takes in its heading and its neighbors, and BM25 counts words in all
    documents.
    """

    RESOURCES = "device"

    table: Stage
    index: Stage
    """Index with embeddings, which has all candidates of the table."""
    part: Literal["similarity", "bm25"]
    question_filter: QuestionFilter = "raw"

    def run(self, context: StageContext) -> None:
        """Looks up each candidate.

        Raises:
            CorpusError: A candidate is not in the index.
        """
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        rows = filtered_table(context.path(self.table), self.question_filter)
        index = SentenceIndex.open(context.path(self.index) / INDEX, load_sentence_encoder)
        sentences = _find_sentences(index, rows["candidate"].to_pylist())
        scores, starts = np.empty(len(rows)), question_offsets(rows["question_id"])
        questions = rows["question"].take(pa.array(starts)).to_pylist()
        is_bm25 = self.part == "bm25"
        queries = questions if is_bm25 else index.embeddings.encode_queries(questions)
        for query, (start, end) in zip(queries, pairwise([*starts, len(rows)])):
            candidates = sentences[start:end]
            if is_bm25:
                scores[start:end] = index.score_sentences(query)[candidates]
            else:
                scores[start:end] = index.embeddings.similarities(query, candidates)
        pq.write_table(pa.table({"score": scores}), context.output / TABLE)


@dataclass(frozen=True, eq=False)
class CombinedScores(StoredScores):
    """The combined score of the rows of a table."""

    VERSION = 2
    table: Stage
    scoring: Stage
    similarity: StoredScores
    ranker: StoredScores | None = None
    bm25: StoredScores | None = None
    """By default BM25 over the candidates of the table."""
    uses_stage_zero: bool = True
    """Whether candidates with a low similarity are put last, as they never reach the ranker."""
    question_filter: QuestionFilter = "raw"

    def run(self, context: StageContext) -> None:
        """Ranks the candidates of each question; the score is the negative rank."""
        rows = filtered_table(context.path(self.table), self.question_filter)
        scoring = AnswerScoring.read(context.path(self.scoring))
        assert scoring is not None
        if not self.uses_stage_zero:
            scoring = replace(scoring, max_similarity_gap=None)
        parts = _read_parts(context, rows, self.similarity, self.ranker, self.bm25)
        orders = [scoring.order(question_parts) for question_parts, _ in parts]
        ranks = np.concatenate([np.argsort(order) for order in orders])
        pq.write_table(pa.table({"score": -ranks.astype(np.float64)}), context.output / TABLE)


@dataclass(frozen=True, eq=False)
class TableScoring(Stage):
    """How the parts of the score of a table's candidates are combined."""

    VERSION = 2
    table: Stage
    """Questions whose labels the weights are fitted to."""
    similarity: StoredScores
    ranker: StoredScores | None = None
    is_labeled: bool = True
    """Whether the labels are used; without them the weights are `DEFAULT_WEIGHTS`."""

    def run(self, context: StageContext) -> Outputs:
        """Fits the weights."""
        scoring = default_scoring(None, has_ranker=self.ranker is not None)
        if self.is_labeled:
            rows = filtered_table(context.path(self.table), self.similarity.question_filter)
            parts = _read_parts(context, rows, self.similarity, self.ranker)
            scoring = replace(fit_answer_scoring(parts, 0.5), answer_model=None)
        scoring.write(context.output)
        return {"weights": scoring.weights, "dev": scoring.dev_quality}


def _read_parts(
    context: StageContext,
    rows: pa.Table,
    similarity: StoredScores,
    ranker: StoredScores | None,
    bm25: StoredScores | None = None,
) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Returns the stored parts of the score of each question's candidates, and their labels."""
    columns = {"similarity": _stored(context, similarity)}
    columns["bm25"] = _stored(context, bm25) if bm25 else BM25().score_candidates(rows)
    if ranker is not None:
        columns["ranker"] = logit_of(_stored(context, ranker))
    labels = rows["label"].to_numpy()
    bounds = [*question_offsets(rows["question_id"]), len(rows)]
    return [
        ({name: values[start:end] for name, values in columns.items()}, labels[start:end])
        for start, end in pairwise(bounds)
    ]


def _find_sentences(index: SentenceIndex, texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Returns the index of the sentence with each text, shape [texts]."""
    numbers = {text: number for number, text in enumerate(index.texts(range(len(index))))}
    texts = [" ".join(text.split()) for text in texts]
    missing = [text for text in texts if text not in numbers]
    if missing:
        raise CorpusError(
            f"{len(missing)} candidates of the table are no sentences of the index, such as "
            f"{missing[0]!r:.100}"
        )
    return np.array([numbers[text] for text in texts], np.int64)


@dataclass(frozen=True, eq=False)
class TableWithHeadings(Stage):
    """A table whose candidates follow the headings above them, as an index encodes its sentences.

    Candidates that the index does not have stay as they are.
    """

    table: Stage
    index: Stage

    def run(self, context: StageContext) -> Outputs:
        """Writes the rows with other candidates."""
        index = SentenceIndex.open(context.path(self.index) / INDEX)
        sentences = map(index.sentence, range(len(index)))
        texts = {s.text: add_heading(s.heading, s.text) for s in sentences}
        rows = read_table(context.path(self.table))
        candidates = [texts.get(" ".join(c.split()), c) for c in rows["candidate"].to_pylist()]
        column = rows.column_names.index("candidate")
        field = rows.schema.field(column)
        return write_table(
            rows.set_column(column, field, pa.array(candidates, field.type)), context.output
        )


def _stored(context: StageContext, stage: Stage) -> np.ndarray:
    scores: np.ndarray = read_scores(context.path(stage))["score"].to_numpy()
    return scores.astype(np.float64)


@dataclass(frozen=True, eq=False)
class SearchEvaluation(Stage):
    """How often the answer to a question is found in an index."""

    VERSION = 3
    RESOURCES = "device"

    index: Stage
    table: Stage
    """Questions with labels; their positives are recognized by their text."""
    method: RetrievalMethod = "auto"
    scoring: Stage | None = None
    """What ranks the candidates; by default they are taken in the order in which they are found."""
    ranker: Stage | None = None
    off_topic: tuple[str, ...] = ()
    """Questions on other subjects, which should get no answer."""

    def run(self, context: StageContext) -> Outputs:
        """Asks all questions that have an answer, and with a scoring those on other subjects.

        With a scoring there is `abstention`; see `describe_abstention`.
        """
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        index = SentenceIndex.open(context.path(self.index) / INDEX, load_sentence_encoder)
        scoring = AnswerScoring.read(context.path(self.scoring)) if self.scoring else None
        ranker = None
        if scoring is not None and scoring.uses_ranker and self.ranker is not None:
            ranker = load(context.path(self.ranker) / RANKER)
        positives = positives_by_question(read_table(context.path(self.table)))
        answerer = None
        if scoring is not None:
            answerer = QuestionAnswerer(index, ranker, NUM_CANDIDATES, scoring=scoring)
        ranks, results = [], []
        for question, answers in positives.items():
            if answerer is None:
                found = index.search_candidates(question, NUM_CANDIDATES, 1, self.method)
                texts = index.texts([candidate.index for candidate in found])
            else:
                ranked = answerer.look_up(question)
                all_answers = answerer.select(ranked, NUM_CANDIDATES, score_threshold=0.0).answers
                texts = [answer.text for answer in all_answers]
                results.append(answerer.select(ranked, 1))
            is_right = [" ".join(text.split()) in answers for text in texts]
            ranks.append(is_right.index(True) + 1 if any(is_right) else np.inf)
        found_at = np.array(ranks)
        measures = {f"hit@{k}": float((found_at <= k).mean()) for k in (1, 3, 10)}
        measures["RR"] = float((1 / found_at).mean())
        measures["R@100"] = float((found_at <= NUM_CANDIDATES).mean())
        outputs: dict[str, Any] = {"measures": measures, "num_questions": len(ranks)}
        if answerer is not None:
            others = [answerer.ask(question, 1) for question in self.off_topic]
            has_probability = scoring is not None and scoring.answer_model is not None
            outputs["abstention"] = describe_abstention(
                results, found_at <= 1, others, has_probability
            )
        return outputs


def describe_abstention(
    own: Sequence[QuestionAnswer],
    is_right: np.ndarray,
    others: Sequence[QuestionAnswer],
    has_probability: bool,
) -> dict[str, Any]:
    """Describes how well questions that should get no answer are told from others.

    Args:
        own: Results of questions on the subjects of the documents.
        is_right: Whether the best sentence of each is an answer, shape [own].
        others: Results of questions on other subjects.
        has_probability: Whether `best_score` is a fitted probability.

    Returns:
        `given` and `precision`: the share of own questions that get an answer, and of right ones
        among these answers. `on_subject`: by kind of question, the share that is close enough to
        some sentence. With a fitted probability also `AURC` and `precision_at`: the share of right
        ones among the first answers with the highest probabilities, by the share of own questions
        that these answer; questions that are not close enough come last.
    """
    is_given = np.array([bool(result.answers) for result in own])
    outputs: dict[str, Any] = {
        "given": float(is_given.mean()),
        "precision": float(is_right[is_given].mean()) if is_given.any() else None,
        "on_subject": {
            name: float(np.mean([not result.is_off_topic for result in results]))
            for name, results in (("own", own), ("others", others))
            if results
        },
        "others": {
            "number": len(others),
            "given": sum(bool(result.answers) for result in others),
        },
    }
    if has_probability:
        # A question that is not close enough is answered last, whatever its probability.
        scores = np.array([0.0 if r.is_off_topic else r.best_score or 0.0 for r in own])
        curve = measure_abstention(scores, is_right.astype(int), min_precision=1.0)
        shares = {f"{coverage:g}": curve.precision_at(coverage) for coverage in COVERAGES}
        outputs |= {"AURC": curve.aurc, "precision_at": shares}
    return outputs


def _mean_ap(encoder: Any, rows: pa.Table) -> float:
    result = evaluate(rows, similarities(encoder, rows), ["AP"], question_filter="no_all_negative")
    return float(result.measures["AP"])
