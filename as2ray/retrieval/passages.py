"""From a question to passages with the sentences that matter in them (Two-in-One, section 6).

Knows an index, and of a joint model that it ranks passages. Must not know models, files or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from as2ray.errors import RecipeError
from as2ray.records import Ranked, RankedPassage
from as2ray.retrieval.index import SentenceIndex

HITS = 10
"""Sentences looked at for each passage: several may lie in one."""


class RanksPassages(Protocol):
    """What is needed of a joint model."""

    def rank_passages(
        self, question: str, passages: Sequence[Sequence[str]], top_k: int | None = None
    ) -> list[RankedPassage]:
        """The passages, best first, each with the sentences selected in it."""


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A paragraph of a document that bears on a question."""

    score: float
    """Higher is more relevant; around -1 to 1."""
    sentences: tuple[Ranked, ...]
    """The selected ones, best first."""
    document: str
    """Id of its document: a path, or a row's own."""
    title: str
    heading: str
    text: str
    """All of it."""


@dataclass(frozen=True)
class PassageFinder:
    """Finds passages in an index: those of the sentences that BM25 ranks highest."""

    index: SentenceIndex
    ranker: RanksPassages
    passages: int = 10
    """That are ranked; as many as HotpotQA's distractor questions have."""

    def __post_init__(self) -> None:
        if self.passages < 1:
            raise RecipeError(f"passages={self.passages}", expected="at least 1", mend="correct it")

    def ask(self, question: str, top_k: int = 2) -> list[FoundPassage]:
        """The best passages, best first.

        Args:
            question: Any text.
            top_k: Most passages (K; 2 for HotpotQA).
        """
        if not question.strip() or top_k < 1:
            raise RecipeError(
                f"question {question!r}, top_k={top_k}",
                expected="a question with words, and at least one passage",
                mend="correct them",
            )
        found = self.retrieved(question)
        texts = [self.index.texts(passage) for passage in found]
        ranked = self.ranker.rank_passages(question, texts, top_k)
        return [self._told(found[one.index], texts[one.index], one) for one in ranked]

    def retrieved(self, question: str) -> list[range]:
        """Numbers of the sentences of the passages that hold the best sentences, best first."""
        found: dict[range, None] = {}
        for hit in self.index.top(question, HITS * self.passages):
            found.setdefault(self.index.around(hit.index, len(self.index)))
        return list(found)[: self.passages]

    def _told(self, numbers: range, texts: list[str], one: RankedPassage) -> FoundPassage:
        at = self.index.sentence(numbers.start)
        return FoundPassage(
            one.score, one.sentences, at.document, at.title, at.heading, " ".join(texts)
        )
