"""Measures of HotpotQA's official evaluator: supporting facts, passages and answers.

A fact is a pair of title and sentence index, so duplicates count once and passages with the same
title are not distinguished. A question without a prediction counts as 0.
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
"""Title of a passage and index of a sentence in it, from 0."""

CLOSED_ANSWERS = ("yes", "no", "noanswer")
"""Answers that get no credit for overlapping words."""


class GoldFacts(Protocol):
    """Annotation of a question."""

    @property
    def facts(self) -> Collection[Fact]:
        """Supporting facts."""

    @property
    def answer(self) -> str:
        """Short answer."""


def measure_facts(
    gold: Mapping[str, GoldFacts],
    facts: Mapping[str, Collection[Fact]],
    titles: Mapping[str, Collection[str]] | None = None,
    answers: Mapping[str, str] | None = None,
) -> pa.Table:
    """Measures each question; the means over the columns equal the evaluator's results.

    Args:
        gold: Annotations of all questions that count, by id.
        facts: Predicted supporting facts by id.
        titles: Predicted passages by id; by default those of the predicted facts.
        answers: Predicted answers by id; without them there are no answer and joint measures.

    Returns:
        A table with columns `question_id`, `SP precision`, `SP recall`, `SP F1`, `SP EM` and
        `passage EM`; with answers also `precision`, `recall`, `F1` and `EM`, and the same with the
        prefix `joint`.

    Raises:
        EvaluationError: Predictions for questions without an annotation, or no annotations.
    """
    unknown = sorted((facts.keys() | (answers or {}).keys()) - gold.keys())
    if unknown or not gold:
        raise EvaluationError(
            f"{len(unknown):,} predictions for questions that are not among the {len(gold):,} "
            f"annotated ones, first {unknown[:1]}"
        )
    rows = []
    for question, annotation in gold.items():
        predicted = set(facts.get(question, ()))
        fact_titles = [title for title, _ in predicted]
        predicted_titles = set(fact_titles if titles is None else titles.get(question, ()))
        fact_measures = _overlap_measures(Counter(predicted), Counter(set(annotation.facts)))
        row = {f"SP {name}": value for name, value in fact_measures.items()}
        row["passage EM"] = float(predicted_titles == {title for title, _ in annotation.facts})
        if answers is not None:
            answer_measures = _answer_measures(answers.get(question), annotation.answer)
            row |= answer_measures | _joint_measures(answer_measures, fact_measures)
        rows.append({"question_id": question, **row})
    return pa.Table.from_pylist(rows)


def consistency_gap(passage_scores: np.ndarray, max_sentence_scores: np.ndarray) -> float:
    """Returns the mean distance of a passage's score from its highest sentence score (section 5.4).

    Args:
        passage_scores: Score of each passage, shape [passages].
        max_sentence_scores: Highest score of its sentences, shape [passages].
    """
    return float(np.abs(passage_scores - max_sentence_scores).mean())


def normalize_answer(answer: str) -> str:
    """Lowercases, and removes punctuation, articles and extra blanks, as SQuAD's evaluator does."""
    words = "".join(char for char in answer.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", words).split())


def _overlap_measures(predicted: "Counter[object]", gold: "Counter[object]") -> dict[str, float]:
    """Computes precision, recall and F1 of two multisets, and whether they are equal."""
    num_common = sum((predicted & gold).values())
    precision = num_common / predicted.total() if predicted else 0.0
    recall = num_common / gold.total() if gold else 0.0
    return _with_f1(precision, recall, num_common == predicted.total() == gold.total())


def _answer_measures(predicted: str | None, gold: str) -> dict[str, float]:
    if predicted is None:
        return _with_f1(0.0, 0.0, 0.0)
    predicted, gold = normalize_answer(predicted), normalize_answer(gold)
    if predicted != gold and (predicted in CLOSED_ANSWERS or gold in CLOSED_ANSWERS):
        return _with_f1(0.0, 0.0, 0.0)
    overlap = _overlap_measures(Counter(predicted.split()), Counter(gold.split()))
    return {**overlap, "EM": float(predicted == gold)}


def _joint_measures(answer: Mapping[str, float], facts: Mapping[str, float]) -> dict[str, float]:
    precision, recall, em = (answer[name] * facts[name] for name in ("precision", "recall", "EM"))
    return {f"joint {name}": value for name, value in _with_f1(precision, recall, em).items()}


def _with_f1(precision: float, recall: float, em: float) -> dict[str, float]:
    """Returns the measures by name, with the F1 of precision and recall."""
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    return {"precision": precision, "recall": recall, "F1": f1, "EM": float(em)}
