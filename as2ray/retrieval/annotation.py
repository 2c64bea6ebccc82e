"""Lists of candidates for people to label, as GPD, IAS2 and NAD of the papers were built.

Documents are retrieved, all of their sentences are ranked, and the first ones are labeled (Cascade
Transformer, section 5.1; CERBERUS, appendix C; TANDA, section 6.1).
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from pydantic import ConfigDict, PositiveInt, SkipValidation
from pydantic.dataclasses import dataclass

from as2ray.retrieval.question_answering import SupportsRank
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import MAX_TEXT_CHARS
from as2ray.text.input_checks import check_text


class ListedCandidate(NamedTuple):
    """A row of a list to label; the corpus `annotated` reads the list with labels."""

    question_id: str
    question: str
    candidate_id: str
    candidate: str
    document_id: str
    score: float
    """Of the ranker, or BM25 without one."""
    label: str = ""
    """0 or 1; empty until somebody has labeled the candidate."""


@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class CandidateLister:
    """Lists the candidates of questions in an index."""

    index: SkipValidation[SentenceIndex]
    ranker: SkipValidation[SupportsRank | None] = None
    num_documents: PositiveInt = 100
    """Documents of a question: those of the sentences with the highest BM25."""
    top_k: PositiveInt = 100
    """Candidates of a question; 100 in GPD, 25 or more in IAS2."""

    @cached_property
    def sentences_of(self) -> dict[str, list[int]]:
        """The indices of the sentences of each document."""
        sentences: dict[str, list[int]] = {}
        for first, indices in self.index.paragraphs():
            sentences.setdefault(first.document_id, []).extend(indices)
        return sentences

    def list_candidates(self, questions: Sequence[str]) -> Iterator[ListedCandidate]:
        """Yields the candidates of each question, best first; equal texts are one candidate.

        Raises:
            EvaluationError: A question is blank.
        """
        for number, question in enumerate(questions):
            check_text(question)
            hits = (hit.index for hit in self.index.search(question, len(self.index)))
            documents: dict[str, None] = {}
            for hit in hits:
                documents.setdefault(self.index.sentence(hit).document_id)
                if len(documents) == self.num_documents:
                    break
            rows = [row for document in documents for row in self.sentences_of[document]]
            row_of: dict[str, int] = {}
            for text, row in zip(self.index.texts(rows), rows):
                row_of.setdefault(text[:MAX_TEXT_CHARS], row)
            for position, (text, score) in enumerate(self._rank(question, row_of)):
                source = self.index.sentence(row_of[text]).document_id
                ids = (f"q{number}", f"q{number}-{position}")
                yield ListedCandidate(ids[0], question, ids[1], text, source, score)

    def _rank(self, question: str, row_of: dict[str, int]) -> list[tuple[str, float]]:
        texts = list(row_of)
        if self.ranker is not None:
            ranking = self.ranker.rank(question, texts, self.top_k) if texts else []
            return [(texts[ranked.index], ranked.score) for ranked in ranking]
        scores = self.index.score_sentences(question)[np.array([*row_of.values()], np.int64)]
        order = np.argsort(-scores, kind="stable")[: self.top_k]
        return [(texts[row], float(scores[row])) for row in order]
