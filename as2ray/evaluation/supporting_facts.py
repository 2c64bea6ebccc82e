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

CLOSED_ANSWERS = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole."""


class GoldFacts(Protocol):
    """What is known of a question."""

    @property
    def facts(self) -> Collection[Fact]:
        """Its supporting facts."""

    @property
    def answer(self) -> str:
        """Its answer."""


def measure_facts(
    gold: Mapping[str, GoldFacts],
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
            f"predictions of {len(unknown):,} questions that are not known, first {unknown[:1]}"
            f"; expected some of the {len(gold):,} questions of the gold",
            fix="predict on the split that the gold is of",
        )
    rows = []
    for name, known in gold.items():
        found = set(facts.get(name, ()))
        named = {title for title, _ in found} if titles is None else set(titles.get(name, ()))
        sentences = _overlap_measures(Counter(dict.fromkeys(found, 1)), Counter(set(known.facts)))
        row = {f"SP {what}": value for what, value in sentences.items()}
        row["passage EM"] = float(named == {title for title, _ in known.facts})
        if answers is not None:
            answer = _answer_measures(answers.get(name), known.answer)
            row |= answer | _joint_measures(answer, sentences)
        rows.append({"question_id": name, **row})
    return pa.Table.from_pylist(rows)


def consistency_gap(passage_scores: np.ndarray, max_sentence_scores: np.ndarray) -> float:
    """Mean distance of a passage's score and its highest sentence score (section 5.4).

    Args:
        passage: Score of each passage, shape [passages].
        best_sentence: Highest score of its sentences, shape [passages].
    """
    return float(np.abs(passage_scores - max_sentence_scores).mean())


def normalize_answer(answer: str) -> str:
    """Lower case, without punctuation and articles, single blanks (as SQuAD's evaluator)."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _overlap_measures(predicted: "Counter[object]", gold: "Counter[object]") -> dict[str, float]:
    """Precision, recall, F1 of two bags, and whether they are the same."""
    same = sum((predicted & gold).values())
    precision = same / predicted.total() if predicted else 0.0
    recall = same / gold.total() if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if same else 0.0
    em = float(same == predicted.total() == gold.total())
    return {"precision": precision, "recall": recall, "F1": f1, "EM": em}


def _answer_measures(predicted: str | None, gold: str) -> dict[str, float]:
    if predicted is None:
        return dict.fromkeys(("precision", "recall", "F1", "EM"), 0.0)
    mine, right = normalize_answer(predicted), normalize_answer(gold)
    same = float(mine == right)
    if mine != right and (mine in CLOSED_ANSWERS or right in CLOSED_ANSWERS):
        return dict.fromkeys(("precision", "recall", "F1", "EM"), 0.0)
    return {**_overlap_measures(Counter(mine.split()), Counter(right.split())), "EM": same}


def _joint_measures(answer: Mapping[str, float], facts: Mapping[str, float]) -> dict[str, float]:
    precision, recall = (answer[what] * facts[what] for what in ("precision", "recall"))
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    joint = {"precision": precision, "recall": recall, "F1": f1, "EM": answer["EM"] * facts["EM"]}
    return {f"joint {what}": value for what, value in joint.items()}
