"""Answers questions from an index: retrieves sentences, ranks them, and abstains on low scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Protocol

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, SkipValidation
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.outputs import RankedCandidate
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.text.input_checks import check_text, check_top_k


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
    """Probability that the sentence answers the question, if the ranker is calibrated."""
    document_id: str
    """Id of its document: a path, or the id of a table's row."""
    title: str
    heading: str
    context: str
    """The sentence between its neighbors in the same paragraph."""
    exit_layer: int | None = None
    """Layer after which the sentence was scored; None for a ranker without exits."""


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """The answers to a question."""

    answers: tuple[Answer, ...]
    """Best first; empty if nothing was retrieved or no score is high enough."""
    num_candidates: int
    """Number of sentences that were ranked."""
    best_score: float | None
    """Score of the best candidate, even if it is too low for an answer; None without candidates."""
    retrieval_time_s: float


@config_dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class QuestionAnswerer:
    """Answers questions from an index."""

    index: SkipValidation[SentenceIndex]
    ranker: SkipValidation[SupportsRank]
    num_candidates: PositiveInt = 100
    """Maximum number of sentences that are ranked."""
    num_neighbors: NonNegativeInt = 1
    """Neighbors on either side that become candidates with a sentence."""
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum score of an answer; by default the ranker's threshold, if it is calibrated."""

    @property
    def min_score(self) -> float:
        """Minimum score of an answer; 0 without a threshold."""
        threshold = self.score_threshold
        return (self.ranker.threshold if threshold is None else threshold) or 0.0

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
        started_at = perf_counter()
        candidates = self.index.search_candidates(question, self.num_candidates, self.num_neighbors)
        texts = self.index.texts([candidate.index for candidate in candidates])
        retrieval_time_s = perf_counter() - started_at
        ranking = self.ranker.rank(question, texts) if texts else []
        # Ranks decide, not scores: a dropped candidate may have a higher score than a survivor.
        good = [ranked for ranked in ranking[:top_k] if ranked.score >= self.min_score]
        return QuestionAnswer(
            tuple(
                build_answer(self.index, candidates[ranked.index].index, ranked) for ranked in good
            ),
            len(texts),
            ranking[0].score if ranking else None,
            retrieval_time_s,
        )


def build_answer(index: SentenceIndex, sentence_index: int, ranked: RankedCandidate) -> Answer:
    """Returns a ranked sentence with its source.

    Args:
        index: The index that contains the sentence.
        sentence_index: Index of the sentence.
        ranked: The ranker's output for the sentence.
    """
    source = index.sentence(sentence_index)
    return Answer(
        text=ranked.text,
        score=ranked.score,
        document_id=source.document_id,
        title=source.title,
        heading=source.heading,
        context=index.context(sentence_index),
        exit_layer=ranked.exit_layer,
    )
