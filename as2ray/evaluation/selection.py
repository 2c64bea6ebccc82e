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

from as2ray.errors import RecipeError
from as2ray.records import question_starts

Rule = Literal["joint", "sentences", "passages"]
"""What a system can go by: scores of passages and sentences, or of one kind alone."""


@dataclass(frozen=True)
class Selecting:
    """How passages and sentences are selected."""

    rule: Rule = "joint"
    """What it goes by."""
    top: int = 2
    """Passages of a question (K; 2 for HotpotQA)."""
    threshold: float = 0.0
    """Sentences above it are selected: the paper's lies between the labels -1 and 1."""
    fallback: bool = False
    """Where a selected passage has none above, its best is; not in the paper, raises recall."""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise RecipeError(
                f"the first {self.top} passages", expected="at least 1", mend="correct the recipe"
            )

    def chosen(self, scores: np.ndarray) -> list[int]:
        """Places of the selected sentences of a passage.

        Args:
            scores: Of all its sentences.
        """
        if self.rule == "passages":
            return [0]
        above: list[int] = np.flatnonzero(scores > self.threshold).tolist()
        return above or ([int(scores.argmax())] if self.fallback else [])


@dataclass(frozen=True)
class Selection:
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


def select(
    passages: pa.Table, passage: np.ndarray, sentence: np.ndarray, how: Selecting | None = None
) -> Selection:
    """Selects passages and sentences of every question.

    Args:
        passages: A table by passages (`records.by_passage`), rows of one question adjacent.
        passage: Scores of the passages, shape [passages].
        sentence: Scores of their sentences, end to end, shape [sentences]; the rule `passages`
            reads none.
        how: What it goes by, and how many it takes.
    """
    how = how or Selecting()
    of_each = _of_each(passages, sentence)
    titles, numbers = passages["title"].to_pylist(), passages["sentence_index"].to_pylist()
    found = Selection({}, {})
    for name, rows in _questions(passages):
        top = rows[np.argsort(-passage[rows], kind="stable")][: how.top]
        found.titles[name] = [titles[row] for row in top]
        found.facts[name] = [
            (titles[row], numbers[row][place]) for row in top for place in how.chosen(of_each[row])
        ]
    return found


def best(passages: pa.Table, sentence: np.ndarray) -> np.ndarray:
    """The highest score of each passage's sentences, shape [passages].

    Args:
        passages: A table by passages.
        sentence: Scores of the sentences, end to end.
    """
    return np.array([own.max() for own in _of_each(passages, sentence)])


def _of_each(passages: pa.Table, sentence: np.ndarray) -> list[np.ndarray]:
    sizes = pc.list_value_length(passages["candidate"]).to_numpy()
    return np.split(sentence, np.cumsum(sizes)[:-1])


def _questions(passages: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    starts = question_starts(passages["question_id"])
    names = passages["question_id"].take(pa.array(starts)).to_pylist()
    yield from zip(names, np.split(np.arange(passages.num_rows), starts[1:]))
