"""From scores of passages and sentences to the ones that are selected (Two-in-One, 4.1 and 5.2).

Knows tables by passages and scores. Must not know models or files.

    joint       the best passages by their own score; in them the sentences above the threshold
    sentences   the passages of the best sentences (`best`); in them those above the threshold
    passages    the best passages by their own score; of each its first sentence
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import ConfigError
from as2ray.tables.schema import question_offsets

ScoreSource = Literal["joint", "sentences", "passages"]
"""What a system can go by: scores of passages and sentences, or of one kind alone."""


@dataclass(frozen=True)
class FactSelectionConfig:
    """How passages and sentences are selected."""

    score_source: ScoreSource = "joint"
    """What it goes by."""
    top_k_passages: int = 2
    """Passages of a question (K; 2 for HotpotQA)."""
    threshold: float = 0.0
    """Sentences above it are selected: the paper's lies between the labels -1 and 1."""
    always_select_one: bool = False
    """Where a selected passage has none above, its best is; not in the paper, raises recall."""

    def __post_init__(self) -> None:
        if self.top_k_passages < 1:
            raise ConfigError(
                f"the first {self.top_k_passages} passages; expected at least 1",
            )

    def select_sentences(self, scores: np.ndarray) -> list[int]:
        """Places of the selected sentences of a passage.

        Args:
            scores: Of all its sentences.
        """
        if self.score_source == "passages":
            return [0]
        above: list[int] = np.flatnonzero(scores > self.threshold).tolist()
        return above or ([int(scores.argmax())] if self.always_select_one else [])


@dataclass(frozen=True)
class SelectedFacts:
    """What was selected for each question, in the dataset's own terms."""

    facts: dict[str, list[tuple[str, int]]]
    """(title, number of the sentence) by question, best passage first."""
    titles: dict[str, list[str]]
    """Titles of the passages by question, best first."""

    def as_json(self, answers: Mapping[str, str] | None = None) -> dict[str, dict[str, object]]:
        """A prediction file of HotpotQA's official evaluator.

        Args:
            answers: Short answers by question, where there are any.
        """
        facts: dict[str, object] = {name: list(map(list, of)) for name, of in self.facts.items()}
        return {"answer": dict(answers or {}), "sp": facts}


def select_facts(
    passages: pa.Table,
    passage_scores: np.ndarray,
    sentence_scores: np.ndarray,
    config: FactSelectionConfig | None = None,
) -> SelectedFacts:
    """Selects passages and sentences of every question.

    Args:
        passages: A table by passages (`records.by_passage`), rows of one question adjacent.
        passage: Scores of the passages, shape [passages].
        sentence: Scores of their sentences, end to end, shape [sentences]; the rule `passages`
            reads none.
        how: What it goes by, and how many it takes.
    """
    config = config or FactSelectionConfig()
    of_each = _split_by_passage(passages, sentence_scores)
    titles, numbers = passages["title"].to_pylist(), passages["sentence_index"].to_pylist()
    found = SelectedFacts({}, {})
    for name, rows in _iter_questions(passages):
        top = rows[np.argsort(-passage_scores[rows], kind="stable")][: config.top_k_passages]
        found.titles[name] = [titles[row] for row in top]
        found.facts[name] = [
            (titles[row], numbers[row][place])
            for row in top
            for place in config.select_sentences(of_each[row])
        ]
    return found


def max_sentence_score(passages: pa.Table, sentence_scores: np.ndarray) -> np.ndarray:
    """The highest score of each passage's sentences, shape [passages].

    Args:
        passages: A table by passages.
        sentence: Scores of the sentences, end to end.
    """
    return np.array([own.max() for own in _split_by_passage(passages, sentence_scores)])


def _split_by_passage(passages: pa.Table, sentence_scores: np.ndarray) -> list[np.ndarray]:
    sizes = pc.list_value_length(passages["candidate"]).to_numpy()
    return np.split(sentence_scores, np.cumsum(sizes)[:-1])


def _iter_questions(passages: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    starts = question_offsets(passages["question_id"])
    names = passages["question_id"].take(pa.array(starts)).to_pylist()
    yield from zip(names, np.split(np.arange(passages.num_rows), starts[1:]))
