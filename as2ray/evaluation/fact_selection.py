"""Selects passages and sentences by their scores (Two-in-One, sections 4.1 and 5.2).

The score source of a system decides how it selects:

    joint       the passages with the highest passage scores; their sentences above the threshold
    sentences   the passages with the highest sentence score; their sentences above the threshold
    passages    the passages with the highest passage scores; the first sentence of each
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.tables.schema import question_offsets

ScoreSource = Literal["joint", "sentences", "passages"]
"""Scores that a system has: of passages and sentences, or of one of them."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FactSelectionConfig:
    """How passages and sentences are selected."""

    score_source: ScoreSource = "joint"
    """Scores by which passages and sentences are selected."""
    top_k_passages: PositiveInt = 2
    """Number of selected passages of a question (K; 2 for HotpotQA)."""
    threshold: float = 0.0
    """Score above which a sentence is selected; the paper's is between the labels -1 and 1."""
    always_select_one: bool = False
    """Selects the best sentence of a passage without a sentence above the threshold.

    The paper does not do this. It raises recall.
    """

    def select_sentences(self, scores: np.ndarray) -> list[int]:
        """Returns the positions of the selected sentences of a passage.

        Args:
            scores: Scores of all its sentences, shape [sentences].
        """
        if self.score_source == "passages":
            return [0]
        above: list[int] = np.flatnonzero(scores > self.threshold).tolist()
        return above or ([int(scores.argmax())] if self.always_select_one else [])


@dataclasses.dataclass(frozen=True)
class SelectedFacts:
    """Selected passages and sentences of each question."""

    facts: dict[str, list[tuple[str, int]]]
    """(title, sentence index) by question, best passage first."""
    titles: dict[str, list[str]]
    """Titles of the passages by question, best first."""

    def as_json(self, answers: Mapping[str, str] | None = None) -> dict[str, Mapping[str, object]]:
        """Returns the content of a prediction file for HotpotQA's official evaluator.

        Args:
            answers: Short answers by question, if there are any.
        """
        fact_lists = {q: [list(fact) for fact in facts] for q, facts in self.facts.items()}
        return {"answer": dict(answers or {}), "sp": fact_lists}


def select_facts(
    passages: pa.Table,
    passage_scores: np.ndarray,
    sentence_scores: np.ndarray,
    config: FactSelectionConfig | None = None,
) -> SelectedFacts:
    """Selects passages and sentences of every question.

    Args:
        passages: A table of passages (`group_by_passage`), rows of one question adjacent.
        passage_scores: Scores of the passages, shape [passages].
        sentence_scores: Scores of all sentences, passage by passage, shape [sentences]; with the
            score source `passages` only their number matters.
        config: How to select; by default jointly.
    """
    config = config or FactSelectionConfig()
    scores_of_passage = _split_by_passage(passages, sentence_scores)
    titles, sentence_index = passages["title"].to_pylist(), passages["sentence_index"].to_pylist()
    selected = SelectedFacts({}, {})
    for question, rows in _iter_questions(passages):
        ranked_rows = rows[np.argsort(-passage_scores[rows], kind="stable")]
        top_rows = ranked_rows[: config.top_k_passages]
        selected.titles[question] = [titles[row] for row in top_rows]
        selected.facts[question] = [
            (titles[row], sentence_index[row][position])
            for row in top_rows
            for position in config.select_sentences(scores_of_passage[row])
        ]
    return selected


def max_sentence_score(passages: pa.Table, sentence_scores: np.ndarray) -> np.ndarray:
    """Returns the highest sentence score of each passage, shape [passages].

    Args:
        passages: A table of passages.
        sentence_scores: Scores of all sentences, passage by passage, shape [sentences].
    """
    return np.array([scores.max() for scores in _split_by_passage(passages, sentence_scores)])


def _split_by_passage(passages: pa.Table, sentence_scores: np.ndarray) -> list[np.ndarray]:
    sizes = pc.list_value_length(passages["candidate"]).to_numpy()
    return np.split(sentence_scores, np.cumsum(sizes)[:-1])


def _iter_questions(passages: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    starts = question_offsets(passages["question_id"])
    names = passages["question_id"].take(pa.array(starts)).to_pylist()
    yield from zip(names, np.split(np.arange(passages.num_rows), starts[1:]))
