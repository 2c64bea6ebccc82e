"""Answers questions from an index: finds sentences, ranks them, and abstains where it must."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from time import perf_counter
from typing import Annotated, Protocol

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, SkipValidation
from pydantic.dataclasses import dataclass as config_dataclass
from scipy.special import expit

from as2ray.errors import ConfigError, SentenceIndexError, raise_config_errors
from as2ray.outputs import RankedCandidate
from as2ray.retrieval.answer_scoring import AnswerScoring, Parts, Ranked, default_scoring
from as2ray.retrieval.sentence_index import MIN_SIMILARITY, Candidate, SentenceIndex
from as2ray.text.input_checks import check_text, check_top_k

UNFITTED_MAX_RANKED = 40
"""Maximum number of candidates that reach the ranker where no labels were there to fit it to; the
similarity and BM25 order them before (docs/log.md)."""


class SupportsRank(Protocol):
    """The part of a ranker that a `QuestionAnswerer` uses."""

    threshold: float | None
    """Score below which the best candidate is not given as an answer; see `Ranker.calibrate`."""

    def rank(
        self, question: str, candidates: Sequence[str], top_k: int | None = None
    ) -> list[RankedCandidate]:
        """Returns the candidates, best first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A sentence that answers a question, and its source."""

    text: str
    score: float
    """The ranker's score, if nothing else orders the answers. Otherwise the answer's share of the
    combined scores of all candidates, from 0 to 1."""
    document_id: str
    """Id of its document: a path, or the id of a table's row."""
    title: str
    heading: str
    context: str
    """The sentence between its neighbors in the same paragraph."""
    exit_layer: int | None = None
    """Layer after which the sentence was scored; None for a ranker without exits, 0 without one."""

    @property
    def source(self) -> str:
        """Id of the document, and the heading above the sentence if it says more."""
        has_section = self.heading not in ("", self.title, self.document_id)
        return f"{self.document_id}, {self.heading}" if has_section else self.document_id


@dataclass(frozen=True, slots=True, repr=False)
class QuestionAnswer:
    """The answers to a question."""

    answers: tuple[Answer, ...]
    """Best first; empty if nothing was retrieved or the question should get no answer."""
    num_candidates: int
    """Number of sentences that were found."""
    best_score: float | None
    """The probability that the first answer is right, or without a fitted one the ranker's score of
    it (of a logit its probability), even if it is too low for an answer; None without candidates or
    without either, also where a budget left the ranker no time for it."""
    reason: str | None
    """Why there is no answer; None if there is one."""
    nearest: tuple[Answer, ...]
    """The best sentences where there is no answer, one where the documents are on other subjects;
    empty if there is an answer, or without candidates."""
    retrieval_time_s: float = 0.0
    is_off_topic: bool = False
    """Whether the documents are on other subjects: none has `AnswerScoring.min_similarity`."""

    def __repr__(self) -> str:
        lines = [] if self.answers else [f"no answer: {self.reason}"]
        shown = self.answers or self.nearest
        return "\n".join([*lines, *(f"{a.score:.4f}  {a.text} ({a.source})" for a in shown)])

    def _repr_html_(self) -> str:
        """Returns a table of the answers in their context, or why there is none."""
        reason = "" if self.answers else f"<p>no answer: {escape(str(self.reason))}</p>"
        rows = [
            f"<tr><td>{answer.score:.4f}</td><td>{_marked_context(answer)}</td>"
            f"<td>{escape(answer.source)}</td></tr>"
            for answer in self.answers or self.nearest
        ]
        head = "<tr><th>score</th><th>answer</th><th>source</th></tr>"
        return f"{reason}<table>{head}{''.join(rows)}</table>" if rows else reason


def _marked_context(answer: Answer) -> str:
    """Returns the context of an answer as HTML, with the answer marked."""
    text = escape(answer.text)
    return escape(answer.context).replace(text, f"<mark>{text}</mark>", 1)


@dataclass(frozen=True)
class FoundCandidates:
    """The sentences that may answer a question."""

    candidates: list[Candidate]
    parts: Parts
    """BM25 and, with embeddings, the similarity of each candidate."""
    kept: list[int]
    """Positions of the candidates that the ranker ranks."""

    @property
    def sentences(self) -> list[int]:
        """Index of the sentence of each kept candidate."""
        return [self.candidates[row].index for row in self.kept]


@dataclass(frozen=True)
class RankedCandidates:
    """The sentences that may answer a question, and the ranker's ranking of the kept ones."""

    found: FoundCandidates
    ranking: Sequence[Ranked]
    """Empty if the ranker was not asked."""
    retrieval_time_s: float


@raise_config_errors
@config_dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class QuestionAnswerer:
    """Answers questions from an index."""

    index: SkipValidation[SentenceIndex]
    ranker: SkipValidation[SupportsRank | None] = None
    """Without one, the similarity and BM25 order the answers."""
    num_candidates: PositiveInt = 100
    """Maximum number of sentences that are found."""
    num_neighbors: NonNegativeInt = 1
    """Neighbors on either side that become candidates with a sentence."""
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum `QuestionAnswer.best_score` of answers, instead of all other rules; 0 always answers.
    By default what was fitted decides, or the ranker's threshold."""
    scoring: AnswerScoring | None = None
    """How the parts of the score are combined; by default as `default_scoring` does."""

    def __post_init__(self) -> None:
        # Wrong combinations are refused before the first question.
        if not isinstance(self.index, SentenceIndex):
            raise ConfigError(
                f"expected an index, not {self.index!r:.200}",
                fix="open its folder: as2ray.SentenceIndex.open(folder, load_sentence_encoder), "
                "with the function of as2ray.checkpoints.sentence_encoder",
            )
        if self.ranker is not None and not hasattr(self.ranker, "rank"):
            problem = f"expected a ranker, not {self.ranker!r:.200}"
            raise ConfigError(problem, fix="load its folder: as2ray.load(folder)")
        if self.combined.uses_ranker and self.ranker is None:
            raise ConfigError("the scores were fitted with a ranker, and none is given")
        check_threshold(self.combined, self.score_threshold)

    @cached_property
    def combined(self) -> AnswerScoring:
        """How the parts of the score are combined.

        Raises:
            SentenceIndexError: It needs embeddings of another encoder than the index has.
        """
        return resolve_scoring(self.index, self.scoring, self.ranker is not None)

    def ask(self, question: str, top_k: int = 3) -> QuestionAnswer:
        """Returns the best answers to a question.

        Args:
            question: Any text.
            top_k: Maximum number of answers.

        Raises:
            EvaluationError: The question is blank.
            ConfigError: `top_k` is below 1.
        """
        check_text(question)
        check_top_k(top_k)
        return self.select(self.look_up(question), top_k)

    def look_up(self, question: str) -> RankedCandidates:
        """Finds and ranks the candidates of a question, for `select`."""
        started_at = perf_counter()
        sizes = (self.num_candidates, self.num_neighbors)
        found = find_candidates(self.index, self.combined, question, *sizes)
        texts = self.index.texts(found.sentences)
        retrieval_time_s = perf_counter() - started_at
        ranking: Sequence[Ranked] = ()
        if self.ranker is not None and self.combined.uses_ranker and texts:
            ranking = self.ranker.rank(question, texts)
        return RankedCandidates(found, ranking, retrieval_time_s)

    def select(
        self, ranked: RankedCandidates, top_k: int, score_threshold: float | None = None
    ) -> QuestionAnswer:
        """Returns the best answers among the candidates of a question.

        Args:
            ranked: Result of `look_up`.
            top_k: Maximum number of answers.
            score_threshold: Instead of the one of this object.

        Raises:
            ConfigError: `check_threshold` refuses the threshold.
        """
        threshold = self.score_threshold if score_threshold is None else score_threshold
        check_threshold(self.combined, threshold)
        ranker_threshold = None if self.ranker is None else self.ranker.threshold
        arguments = (self.index, self.combined, ranked.found, ranked.ranking, top_k)
        result = select_answers(*arguments, threshold, ranker_threshold)
        return replace(result, retrieval_time_s=ranked.retrieval_time_s)


def resolve_scoring(
    index: SentenceIndex, scoring: AnswerScoring | None, has_ranker: bool = True
) -> AnswerScoring:
    """Returns how answers from an index are scored; see `default_scoring`.

    Raises:
        SentenceIndexError: The scoring needs embeddings of another encoder than the index has, or
            the index was opened without an encoder.
    """
    stored = index.stored_embeddings
    if scoring is None:
        if stored is not None and stored.load_encoder is not None:
            default = default_scoring(stored.info.fingerprint, has_ranker)
            lowest = index.manifest.get(MIN_SIMILARITY)
            return replace(default, max_ranked=UNFITTED_MAX_RANKED, min_similarity=lowest)
        return AnswerScoring({"ranker" if has_ranker else "bm25": 1.0})
    if scoring.needs_similarity:
        index.embeddings.require_load_encoder()
        check_encoder(scoring, index.embeddings.info.fingerprint)
    return scoring


def check_encoder(scoring: AnswerScoring | None, encoder: str | None) -> None:
    """Checks that an index has the embeddings with which answers were scored, if any were.

    Args:
        scoring: How answers are scored; None if that was not fitted.
        encoder: Fingerprint of the encoder of the index; None without embeddings.

    Raises:
        SentenceIndexError: It has others, or none.
    """
    if scoring is not None and scoring.needs_similarity and scoring.encoder != encoder:
        others = f"those of {encoder}" if encoder else "no embeddings"
        raise SentenceIndexError(
            "the answers were scored with embeddings of an encoder with the fingerprint "
            f"{scoring.encoder}, but the index has {others}",
            fix="use the index that the model was adapted to, or index the documents again with "
            "its encoder",
        )


def check_threshold(scoring: AnswerScoring, threshold: float | None) -> None:
    """Checks that answers have a score which a threshold can be compared with.

    Raises:
        ConfigError: They have none, and the threshold is above 0.
    """
    if threshold and scoring.answer_model is None and not scoring.uses_ranker:
        raise ConfigError(
            f"a threshold of {threshold:g} needs a probability, and the answers have none: no "
            "ranker is asked, and nothing was fitted",
            fix="leave the threshold out, or take 0, which always answers",
        )


def find_candidates(
    index: SentenceIndex,
    scoring: AnswerScoring,
    question: str,
    num_candidates: int,
    num_neighbors: int,
) -> FoundCandidates:
    """Returns the sentences that may answer a question, and which of them reach the ranker."""
    found = index.search_candidates(question, num_candidates, num_neighbors)
    parts = {"bm25": np.array([candidate.bm25 for candidate in found])}
    if all(candidate.similarity is not None for candidate in found):
        parts["similarity"] = np.array([candidate.similarity for candidate in found], np.float64)
    return FoundCandidates(found, parts, scoring.kept_rows(parts).tolist())


def select_answers(
    index: SentenceIndex,
    scoring: AnswerScoring,
    found: FoundCandidates,
    ranking: Sequence[Ranked],
    top_k: int,
    threshold: float | None = None,
    ranker_threshold: float | None = None,
) -> QuestionAnswer:
    """Combines the scores of candidates, and decides whether they answer the question.

    Args:
        index: The index that contains the sentences.
        scoring: How the parts of the score are combined.
        found: The candidates.
        ranking: The ranker's ranking of the kept candidates; empty if it was not asked.
        top_k: Maximum number of answers.
        threshold: Minimum `QuestionAnswer.best_score`, instead of what was fitted to labels and of
            `AnswerScoring.min_similarity`.
        ranker_threshold: The ranker's own, which counts if nothing else was fitted.
    """
    reason: str | None = None
    if not found.candidates:
        reason = "no sentence has a word in common with the question"
        return QuestionAnswer((), 0, None, reason, ())
    combined = scoring.rank(found.parts, ranking)
    rows = _first_with_each_text(index, found, combined.rows, top_k)
    best = [
        _build_answer(
            index,
            found.candidates[row].index,
            float(combined.scores[row]),
            combined.exit_layers[row],
        )
        for row in rows
    ]
    model, probability = scoring.answer_model, combined.probability
    best_score, given = probability, best
    if model is None and len(ranking):
        ranker_scores = combined.ranker_scores[rows]
        if ranking[0].is_logit:
            ranker_scores = expit(ranker_scores)
        needed = ranker_threshold if threshold is None else threshold
        if combined.exit_layers[rows[0]] != 0:  # else it was dropped, or there was no time for it
            best_score = float(ranker_scores[0])
        if needed:
            given = [a for a, score in zip(best, ranker_scores) if score >= needed]
            if best_score is None or best_score < needed:
                if best_score is None:
                    cause = "the ranker did not score the best sentence"
                else:
                    cause = f"the best score is {best_score:.4f}"
                reason = f"{cause}, and an answer needs {needed:.4f}"
    elif model is not None and probability is not None:
        limit = (model.threshold if threshold is None else threshold) or 0.0
        if probability < limit:
            reason = (
                f"the best sentence is an answer with a probability of {probability:.4f}, and an "
                f"answer needs {limit:.4f}"
            )
    lowest = scoring.min_similarity
    similarity = found.parts["similarity"].max() if "similarity" in found.parts else np.inf
    is_off_topic = lowest is not None and bool(similarity < lowest)
    if threshold is None and is_off_topic:
        reason = (
            f"the documents are on other subjects: the similarity of the nearest sentence is "
            f"{similarity:.4f}, and an answer needs {lowest:.4f}"
        )
    answers = () if reason else tuple(given)
    nearest = tuple(best[: 1 if is_off_topic else None]) if reason else ()
    num_candidates = len(found.candidates)
    return QuestionAnswer(
        answers, num_candidates, best_score, reason, nearest, is_off_topic=is_off_topic
    )


def _first_with_each_text(
    index: SentenceIndex, found: FoundCandidates, rows: Sequence[int], top_k: int
) -> list[int]:
    """Returns up to `top_k` rows with different texts: documents repeat sentences."""
    first: dict[str, int] = {}
    for row in rows:
        if len(first) == top_k:
            break
        (text,) = index.texts([found.candidates[row].index])
        first.setdefault(text, row)
    return list(first.values())


def _build_answer(
    index: SentenceIndex, sentence_index: int, score: float, exit_layer: int | None
) -> Answer:
    source = index.sentence(sentence_index)
    return Answer(
        text=source.text,
        score=score,
        document_id=source.document_id,
        title=source.title,
        heading=source.heading,
        context=index.context(sentence_index),
        exit_layer=exit_layer,
    )
