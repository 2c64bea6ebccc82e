"""Searches an index for passages and ranks them jointly with their sentences (Two-in-One, 6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import ConfigDict, PositiveInt, SkipValidation
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.outputs import RankedCandidate, RankedPassage
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.text.input_checks import check_text, check_top_k

HITS_PER_PASSAGE = 10
"""Sentences that are retrieved for each passage, because a passage may contain several."""


class SupportsRankPassages(Protocol):
    """The part of a joint model that a `PassageSearcher` uses."""

    def rank_passages(
        self, question: str, passages: Sequence[Sequence[str]], top_k: int | None = None
    ) -> list[RankedPassage]:
        """Returns the passages, best first, each with its selected sentences."""


@dataclass(frozen=True, slots=True)
class PassageHit:
    """A paragraph of a document that is relevant to a question."""

    score: float
    """Higher is more relevant; about -1 to 1."""
    sentences: tuple[RankedCandidate, ...]
    """The selected sentences, best first."""
    document_id: str
    """Id of its document: a path, or the id of a table's row."""
    title: str
    heading: str
    text: str
    """The whole paragraph."""


@config_dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class PassageSearcher:
    """Searches for passages: ranks those of the sentences with the highest BM25."""

    index: SkipValidation[SentenceIndex]
    ranker: SkipValidation[SupportsRankPassages]
    num_passages: PositiveInt = 10
    """Number of passages that are ranked; as many as HotpotQA's distractor questions have."""

    def ask(self, question: str, top_k: int = 2) -> list[PassageHit]:
        """Returns the best passages, best first.

        Args:
            question: Any text.
            top_k: Maximum number of passages (the paper's K; 2 for HotpotQA).

        Raises:
            EvaluationError: The question is blank.
            ConfigError: `top_k` is below 1.
        """
        check_text(question)
        check_top_k(top_k)
        passages = self.retrieve(question)
        texts = [self.index.texts(passage) for passage in passages]
        hits = []
        for ranked in self.ranker.rank_passages(question, texts, top_k):
            _, heading, document_id, title = self.index.sentence(passages[ranked.index].start)
            text = " ".join(texts[ranked.index])
            hit = PassageHit(ranked.score, ranked.sentences, document_id, title, heading, text)
            hits.append(hit)
        return hits

    def retrieve(self, question: str) -> list[range]:
        """Returns the sentence indices of the passages with the best sentences, best first."""
        passages: dict[range, None] = {}
        for hit in self.index.search(question, HITS_PER_PASSAGE * self.num_passages):
            passages.setdefault(self.index.neighbors(hit.index, len(self.index)))
        return list(passages)[: self.num_passages]
