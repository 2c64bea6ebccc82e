"""Supporting facts, passages and answers, as HotpotQA's official evaluator measures them.

Knows predictions and gold in HotpotQA's terms: (title, number of the sentence). Must not know
corpora or models.

A fact is a pair, so duplicates and two passages of one title fall together. A question without a
prediction has 0 everywhere, and counts.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import pyarrow as pa

from as2ray.errors import EvaluationError

Fact = tuple[str, int]
"""Title of the passage, number of the sentence in it from 0."""

CLOSED = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole."""


class Gold(Protocol):
    """What is known of a question."""

    @property
    def facts(self) -> Collection[Fact]:
        """Its supporting facts."""

    @property
    def answer(self) -> str:
        """Its answer."""


def measure_facts(
    gold: Mapping[str, Gold],
    facts: Mapping[str, Collection[Fact]],
    titles: Mapping[str, Collection[str]] | None = None,
    answers: Mapping[str, str] | None = None,
) -> pa.Table:
    """Measures of each question; means over the column are the evaluator's figures.

    Args:
        gold: Every question that counts, by id.
        facts: Predicted supporting facts by id.
        titles: Predicted passages by id; by default those of the predicted facts.
        answers: Predicted answers by id; with them come answer and joint measures.

    Returns:
        `question_id`, then `SP precision`, `SP recall`, `SP F1`, `SP EM`, `passage EM`, and with
        answers `precision`, `recall`, `F1`, `EM` and the same with `joint`.

    Raises:
        EvaluationError: Predictions of questions that are not in the gold, or no gold at all.
    """
    unknown = sorted((facts.keys() | (answers or {}).keys()) - gold.keys())
    if unknown or not gold:
        raise EvaluationError(
            f"predictions of {len(unknown):,} questions that are not known, first {unknown[:1]}",
            expected=f"some of the {len(gold):,} questions of the gold",
            mend="predict on the split that the gold is of",
        )
    rows = []
    for name, known in gold.items():
        found = set(facts.get(name, ()))
        named = {title for title, _ in found} if titles is None else set(titles.get(name, ()))
        sentences = _overlap(Counter(dict.fromkeys(found, 1)), Counter(set(known.facts)))
        row = {f"SP {what}": value for what, value in sentences.items()}
        row["passage EM"] = float(named == {title for title, _ in known.facts})
        if answers is not None:
            answer = _answer(answers.get(name), known.answer)
            row |= answer | _joint(answer, sentences)
        rows.append({"question_id": name, **row})
    return pa.Table.from_pylist(rows)


def gap(passage: np.ndarray, best_sentence: np.ndarray) -> float:
    """Mean distance of a passage's score and its highest sentence score (section 5.4).

    Args:
        passage: Score of each passage, shape [passages].
        best_sentence: Highest score of its sentences, shape [passages].
    """
    return float(np.abs(passage - best_sentence).mean())


def normalise(answer: str) -> str:
    """Lower case, without punctuation and articles, single blanks (as SQuAD's evaluator)."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _overlap(found: "Counter[object]", known: "Counter[object]") -> dict[str, float]:
    """Precision, recall, F1 of two bags, and whether they are the same."""
    same = sum((found & known).values())
    precision = same / found.total() if found else 0.0
    recall = same / known.total() if known else 0.0
    f1 = 2 * precision * recall / (precision + recall) if same else 0.0
    em = float(same == found.total() == known.total())
    return {"precision": precision, "recall": recall, "F1": f1, "EM": em}


def _answer(found: str | None, known: str) -> dict[str, float]:
    if found is None:
        return dict.fromkeys(("precision", "recall", "F1", "EM"), 0.0)
    mine, right = normalise(found), normalise(known)
    same = float(mine == right)
    if mine != right and (mine in CLOSED or right in CLOSED):
        return dict.fromkeys(("precision", "recall", "F1", "EM"), 0.0)
    return {**_overlap(Counter(mine.split()), Counter(right.split())), "EM": same}


def _joint(answer: Mapping[str, float], facts: Mapping[str, float]) -> dict[str, float]:
    precision, recall = (answer[what] * facts[what] for what in ("precision", "recall"))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    joint = {"precision": precision, "recall": recall, "F1": f1, "EM": answer["EM"] * facts["EM"]}
    return {f"joint {what}": value for what, value in joint.items()}
