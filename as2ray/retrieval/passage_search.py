"""From a question to passages with the sentences that matter in them (Two-in-One, section 6).

Knows an index, and of a joint model that it ranks passages. Must not know models, files or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from as2ray.errors import ConfigError
from as2ray.outputs import RankedCandidate, RankedPassage
from as2ray.retrieval.sentence_index import SentenceIndex

HITS_PER_PASSAGE = 10
"""Sentences looked at for each passage: several may lie in one."""


class SupportsRankPassages(Protocol):
    """What is needed of a joint model."""

    def rank_passages(
        self, question: str, passages: Sequence[Sequence[str]], top_k: int | None = None
    ) -> list[RankedPassage]:
        """The passages, best first, each with the sentences selected in it."""


@dataclass(frozen=True, slots=True)
class PassageHit:
    """A paragraph of a document that bears on a question."""

    score: float
    """Higher is more relevant; around -1 to 1."""
    sentences: tuple[RankedCandidate, ...]
    """The selected ones, best first."""
    document_id: str
    """Id of its document: a path, or a row's own."""
    title: str
    heading: str
    text: str
    """All of it."""


@dataclass(frozen=True)
class PassageSearcher:
    """Finds passages in an index: those of the sentences that BM25 ranks highest."""

    index: SentenceIndex
    ranker: SupportsRankPassages
    num_passages: int = 10
    """That are ranked; as many as HotpotQA's distractor questions have."""

    def __post_init__(self) -> None:
        if self.num_passages < 1:
            raise ConfigError(
                f"passages={self.num_passages}; expected at least 1",
            )

    def ask(self, question: str, top_k: int = 2) -> list[PassageHit]:
        """The best passages, best first.

        Args:
            question: Any text.
            top_k: Most passages (K; 2 for HotpotQA).
        """
        if not question.strip() or top_k < 1:
            raise ConfigError(
                f"question {question!r}, top_k={top_k}"
                "; expected a question with words, and at least one passage",
            )
        found = self.retrieve(question)
        texts = [self.index.texts(passage) for passage in found]
        ranked = self.ranker.rank_passages(question, texts, top_k)
        return [self._build_hit(found[one.index], texts[one.index], one) for one in ranked]

    def retrieve(self, question: str) -> list[range]:
        """Numbers of the sentences of the passages that hold the best sentences, best first."""
        found: dict[range, None] = {}
        for hit in self.index.search(question, HITS_PER_PASSAGE * self.num_passages):
            found.setdefault(self.index.neighbors(hit.index, len(self.index)))
        return list(found)[: self.num_passages]

    def _build_hit(self, numbers: range, texts: list[str], ranked: RankedPassage) -> PassageHit:
        at = self.index.sentence(numbers.start)
        return PassageHit(
            ranked.score, ranked.sentences, at.document_id, at.title, at.heading, " ".join(texts)
        )
