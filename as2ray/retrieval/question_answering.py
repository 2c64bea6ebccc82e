"""From a question to answers: sentences found by their words, ranked, or none that is good enough.

Knows an index, and of a ranker that it ranks. Must not know any one ranker, files or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from as2ray.errors import ConfigError
from as2ray.outputs import RankedCandidate
from as2ray.retrieval.sentence_index import SentenceIndex


class SupportsRank(Protocol):
    """What is needed of a ranker."""

    threshold: float | None
    """Score below which its best answer is better not given; see `Ranker.calibrate`."""

    def rank(
        self, question: str, candidates: Sequence[str], top_k: int | None = None
    ) -> list[RankedCandidate]:
        """The candidates, best first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A sentence that answers, and where it stands."""

    text: str
    score: float
    """Probability that it answers, as far as the ranker is calibrated."""
    document_id: str
    """Id of its document: a path, or a row's own."""
    title: str
    heading: str
    context: str
    """The sentence between its neighbours of the same paragraph."""
    exit_layer: int | None = None
    """Layer after which the score was taken; None of a ranker without exits."""


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """What came of a question."""

    answers: tuple[Answer, ...]
    """Best first; none where nothing was found, or nothing good enough."""
    num_candidates: int
    """Sentences that were ranked."""
    best_score: float | None
    """Score of the best candidate, also of one too low to be an answer; None without any."""
    retrieval_time_s: float
    ranking_time_s: float


@dataclass(frozen=True)
class QuestionAnswerer:
    """Answers questions from an index."""

    index: SentenceIndex
    ranker: SupportsRank
    num_candidates: int = 100
    """Most sentences that are ranked."""
    num_neighbors: int = 1
    """Neighbours on either side that come with a sentence as candidates."""
    score_threshold: float | None = None
    """Score that an answer must have; by default the ranker's own, if it was calibrated."""

    def __post_init__(self) -> None:
        inside = self.score_threshold is None or 0 <= self.score_threshold <= 1
        if self.num_candidates < 1 or self.num_neighbors < 0 or not inside:
            raise ConfigError(
                f"candidates={self.num_candidates}, around={self.num_neighbors}, threshold={self.score_threshold}"
                "; expected at least 1 candidate, around >= 0, a threshold from 0 to 1",
            )

    @property
    def min_score(self) -> float:
        """The lowest score of an answer; 0 where nothing says otherwise."""
        own = self.ranker.threshold if self.score_threshold is None else self.score_threshold
        return own or 0.0

    def ask(self, question: str, top_k: int = 3) -> QuestionAnswer:
        """The best answers to a question.

        Args:
            question: Any text.
            top_k: Most answers.
        """
        if not question.strip() or top_k < 1:
            raise ConfigError(
                f"question {question!r}, top_k={top_k}"
                "; expected a question with words, and at least one answer",
            )
        began = perf_counter()
        numbers = self.index.search_candidates(question, self.num_candidates, self.num_neighbors)
        texts = self.index.texts(numbers)
        found = perf_counter()
        ranked = self.ranker.rank(question, texts) if texts else []
        ended = perf_counter()
        # The order is the ranker's; a dropped candidate's score may stand above a survivor's.
        good = [r for r in ranked[:top_k] if r.score >= self.min_score]
        return QuestionAnswer(
            tuple(build_answer(self.index, numbers[r.index], r) for r in good),
            len(texts),
            ranked[0].score if ranked else None,
            found - began,
            ended - found,
        )


def build_answer(index: SentenceIndex, number: int, ranked: RankedCandidate) -> Answer:
    """A ranked sentence of an index, and where it stands.

    Args:
        index: It was found in.
        number: Of the sentence.
        ranked: What the ranker says of it.
    """
    at, context = index.sentence(number), index.context(number)
    return Answer(
        *(ranked.text, ranked.score, at.document_id, at.title, at.heading, context),
        exit_layer=ranked.exit_layer,
    )
