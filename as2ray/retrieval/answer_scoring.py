"""How the parts of a candidate's score are combined, and when the first answer is given.

Three parts order the candidates of a question: the ranker's logit, the similarity of embeddings and
BM25. Each is standardized within the question, and their weighted sum is a logit of the answer. On
questions with labels the weights, what is dropped before the ranker, and the probability that the
first answer is right are fitted, each measured on questions that it was not fitted on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from itertools import combinations
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import beta

PARTS = ("similarity", "bm25", "ranker")
"""Parts of the score, the cheapest first."""

NUM_FOLDS = 5
"""Parts of the questions that are held out in turn."""

MIN_GAIN = 0.02
"""MAP by which the ranker must improve the score; otherwise it is not asked."""

MISSED_SHARE = 0.01
"""Share of the questions whose answer may be dropped before the ranker."""

CONFIDENCE = 0.9
"""One-sided confidence of the precision of given answers."""

FEATURES = ("similarity", "margin", "bm25")
"""What tells that an answer is right: the best similarity, the margin of the first score to the
second, and the logarithm of the best BM25."""

Parts = Mapping[str, np.ndarray]
"""Scores of a question's candidates by part, each of shape [candidates]."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnswerModel:
    """The probability that the first answer to a question is right: a logistic regression."""

    coefficients: tuple[float, ...]
    """Of `FEATURES`."""
    intercept: float
    threshold: float | None
    """Probability from which on an answer is given; None if no threshold is precise enough."""
    measures: dict[str, float] = field(default_factory=dict)
    """On questions that were held out: the precision at half and full coverage, the area under the
    curve of risk and coverage (`AURC`), the expected calibration error (`ECE`), and the highest
    precision that a threshold is sure to reach."""

    def probability(self, features: np.ndarray) -> np.ndarray:
        """Returns probabilities, shape [questions], of features of shape [questions, features]."""
        return np.asarray(expit(features @ np.array(self.coefficients) + self.intercept))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnswerScoring:
    """The combined score of candidates that an index retrieves."""

    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight of each part, standardized within the question; a part without one is not computed."""
    max_similarity_gap: float | None = None
    """Candidates whose similarity is lower than the best one by more never reach the ranker."""
    dev_quality: dict[str, float] = field(default_factory=dict)
    """MAP on dev of each part and of sums of them, with weights of other questions."""
    answer_model: AnswerModel | None = None
    encoder: str | None = None
    """Fingerprint of the sentence encoder of the similarities."""

    @property
    def uses_ranker(self) -> bool:
        """Whether the ranker is asked."""
        return "ranker" in self.weights

    def survivors(self, similarity: np.ndarray | None) -> np.ndarray | None:
        """Returns whether each candidate reaches the ranker, shape [candidates]; None for all."""
        if similarity is None or self.max_similarity_gap is None or not len(similarity):
            return None
        return np.asarray(similarity >= similarity.max() - self.max_similarity_gap)

    def score(self, parts: Parts) -> np.ndarray:
        """Returns the weighted sum of the parts, shape [candidates]; a missing part is left out."""
        weights = {name: weight for name, weight in self.weights.items() if name in parts}
        terms = [weight * standardize(parts[name]) for name, weight in weights.items()]
        return np.asarray(np.sum(terms, axis=0))

    def probability(self, parts: Parts) -> float | None:
        """Returns the probability that the first answer is right; None without a fitted model."""
        if self.answer_model is None or not len(parts["bm25"]):
            return None
        return float(self.answer_model.probability(answer_features(parts, self.score(parts))))

    def answers(self, parts: Parts) -> bool:
        """Returns whether the first answer is likely enough to be right."""
        model, probability = self.answer_model, self.probability(parts)
        if model is None or probability is None or model.threshold is None:
            return True
        return probability >= model.threshold


def standardize(scores: np.ndarray) -> np.ndarray:
    """Returns z-scores of a question's candidates; 0 where all are equal."""
    scores = np.asarray(scores, np.float64)
    deviation = scores.std()
    return np.asarray((scores - scores.mean()) / (deviation if deviation > 0 else 1.0))


def equal_weights(encoder: str | None, has_ranker: bool = True) -> AnswerScoring:
    """Returns the scoring where there are no labels: the sum of all parts."""
    names = PARTS if has_ranker else PARTS[:2]
    return AnswerScoring(dict.fromkeys(names, 1.0), encoder=encoder)


def fit_answer_scoring(
    questions: Sequence[tuple[Parts, np.ndarray]],
    min_precision: float,
    off_topic: Sequence[Parts] = (),
    encoder: str | None = None,
    seed: int = 0,
) -> AnswerScoring:
    """Fits the weights, and what else follows from labels.

    The sum is taken only if it beats its best part on questions that are held out, and the ranker
    only if it improves the score without it by `MIN_GAIN`.

    Args:
        questions: Parts of the candidates of each question, and their labels, 0 or 1; candidates
            as they are retrieved, so a question may have no answer among them.
        min_precision: Minimum share of right answers among those that are given.
        off_topic: Parts of the candidates of questions on other subjects, which have no answer.
        encoder: Fingerprint of the sentence encoder.
        seed: Seed of the folds.
    """
    answered = [(parts, labels) for parts, labels in questions if labels.any()]
    names = [name for name in PARTS if all(name in parts for parts, _ in questions)]
    folds = np.random.default_rng(seed).permutation(len(answered)) % NUM_FOLDS
    quality: dict[tuple[str, ...], float] = {}
    for subset in (c for size in range(1, len(names) + 1) for c in combinations(names, size)):
        scores: list[float] = []
        for fold in range(NUM_FOLDS):
            train = [q for q, f in zip(answered, folds) if f != fold]
            weights = _fit_weights(train, subset)
            test = [q for q, f in zip(answered, folds) if f == fold]
            scores += [
                average_precision(AnswerScoring(weights).score(parts), labels)
                for parts, labels in test
            ]
        quality[subset] = float(np.mean(scores)) if scores else 0.0
    chosen = _choose(quality)
    scoring = AnswerScoring(
        _fit_weights(answered, chosen),
        _fit_similarity_gap(answered) if {"similarity", "ranker"} <= {*chosen} else None,
        {" + ".join(subset): value for subset, value in quality.items()},
        encoder=encoder,
    )
    model = fit_answer_model(scoring, questions, min_precision, off_topic, seed)
    return AnswerScoring(**{**vars(scoring), "answer_model": model})


def _choose(quality: Mapping[tuple[str, ...], float]) -> tuple[str, ...]:
    """Returns the best of the parts and their sums; of equal ones the smallest."""

    def best(subsets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        return max(subsets, key=lambda subset: (quality[subset], -len(subset)))

    with_ranker = [subset for subset in quality if "ranker" in subset]
    without = [subset for subset in quality if "ranker" not in subset]
    if not with_ranker or not without:
        return best(list(quality))
    gain = quality[best(with_ranker)] - quality[best(without)]
    return best(with_ranker) if gain >= MIN_GAIN else best(without)


def _fit_weights(
    questions: Sequence[tuple[Parts, np.ndarray]], names: Sequence[str]
) -> dict[str, float]:
    """Fits weights that maximize the probability of answers among a question's candidates."""
    if len(names) == 1 or not questions:
        return dict.fromkeys(names, 1.0)
    features = [np.stack([standardize(parts[n]) for n in names], 1) for parts, _ in questions]
    starts = np.cumsum([0, *map(len, features[:-1])])
    x, is_answer = np.concatenate(features), np.concatenate([labels for _, labels in questions])
    counts = np.diff([*starts, len(x)])
    masks = (np.ones(len(x)), (is_answer > 0).astype(float))

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = x @ weights
        logits -= np.repeat(np.maximum.reduceat(logits, starts), counts)
        value, gradient = 1e-3 * weights @ weights, 2e-3 * weights
        for sign, mask in zip((1.0, -1.0), masks):
            exponentials = np.exp(logits) * mask
            sums = np.add.reduceat(exponentials, starts)
            value += sign * np.log(np.maximum(sums, 1e-300)).mean()
            shares = exponentials / np.repeat(np.maximum(sums, 1e-300), counts)
            gradient += sign * (shares @ x) / len(starts)
        return float(value), gradient

    start, bounds = np.ones(len(names)), [(0.0, None)] * len(names)
    found = minimize(loss, start, bounds=bounds, method="L-BFGS-B", jac=True).x
    return dict(zip(names, found.tolist()))


def _fit_similarity_gap(questions: Sequence[tuple[Parts, np.ndarray]]) -> float | None:
    """Returns the gap within which all but few questions keep their most similar answer."""
    gaps = [
        float(parts["similarity"].max() - parts["similarity"][labels.astype(bool)].max())
        for parts, labels in questions
    ]
    return float(np.quantile(gaps, 1 - MISSED_SHARE, method="higher")) if gaps else None


def answer_features(parts: Parts, scores: np.ndarray) -> np.ndarray:
    """Returns the features of a question for its `AnswerModel`, shape [features].

    Args:
        parts: Scores of its candidates by part; at least one candidate.
        scores: Their combined scores, shape [candidates].
    """
    top = np.sort(scores)[::-1][:2]
    similarity = parts["similarity"].max() if "similarity" in parts else 0.0
    return np.array([similarity, top[0] - top[-1], np.log1p(parts["bm25"].max())])


def fit_answer_model(
    scoring: AnswerScoring,
    questions: Sequence[tuple[Parts, np.ndarray]],
    min_precision: float,
    off_topic: Sequence[Parts] = (),
    seed: int = 0,
) -> AnswerModel | None:
    """Fits the probability that the first answer is right, and the threshold.

    Args:
        scoring: The combined score.
        questions: As in `fit_answer_scoring`.
        min_precision: Minimum share of right answers among those that are given. It is reached with
            a confidence of `CONFIDENCE`.
        off_topic: As in `fit_answer_scoring`.
        seed: Seed of the folds.

    Returns:
        The model; None if all first answers are right, or none is.
    """
    features, is_right = [], []
    unlabeled = [(parts, np.zeros(len(parts["bm25"]))) for parts in off_topic]
    for parts, labels in [*questions, *unlabeled]:
        if len(labels):
            scores = scoring.score(parts)
            features.append(answer_features(parts, scores))
            is_right.append(bool(labels[np.argmax(scores)]))
    x, y = np.array(features), np.array(is_right)
    if y.all() or not y.any():
        return None
    folds = np.random.default_rng(seed).permutation(len(y)) % NUM_FOLDS
    held_out = np.empty(len(y))
    for fold in range(NUM_FOLDS):
        model = _fit_logistic(x[folds != fold], y[folds != fold])
        held_out[folds == fold] = model.probability(x[folds == fold])
    order = np.argsort(-held_out, kind="stable")
    num_right, num_given = np.cumsum(y[order]), np.arange(1, len(y) + 1)
    precision = num_right / num_given
    # A threshold was chosen on these questions, so its precision is a bound and not the mean.
    bounds = beta.ppf(1 - CONFIDENCE, num_right, num_given - num_right + 1)
    bounds = np.where(num_right > 0, bounds, 0.0)
    is_precise = np.flatnonzero(bounds >= min_precision)
    measures = {
        "precision": float(precision[-1]),
        "precision at half coverage": float(precision[(len(y) - 1) // 2]),
        "AURC": float(np.mean(1 - precision)),
        "ECE": expected_calibration_error(held_out, y),
        "reachable precision": float(bounds.max()),
    }
    threshold = float(held_out[order][is_precise[-1]]) if len(is_precise) else None
    model = _fit_logistic(x, y)
    return AnswerModel(model.coefficients, model.intercept, threshold, measures)


def _fit_logistic(features: np.ndarray, labels: np.ndarray) -> AnswerModel:
    """Fits a logistic regression with a small penalty on standardized features."""
    mean, scale = features.mean(0), np.maximum(features.std(0), 1e-9)
    x, signs = (features - mean) / scale, 2.0 * labels - 1.0

    def loss(weights: np.ndarray) -> float:
        logits = x @ weights[1:] + weights[0]
        return float(np.logaddexp(0.0, -signs * logits).sum() + 0.5 * weights[1:] @ weights[1:])

    found = minimize(loss, np.zeros(x.shape[1] + 1), method="L-BFGS-B").x
    coefficients = found[1:] / scale
    intercept = float(found[0] - coefficients @ mean)
    return AnswerModel(tuple(coefficients.tolist()), intercept, None)


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the average precision of a question, ties broken against the system."""
    order = np.lexsort((labels, -scores))
    ranked = labels[order].astype(float)
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float((precision * ranked).sum() / ranked.sum())


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean distance of probabilities and shares in ten bins (Guo et al. 2017)."""
    bins = np.minimum((probabilities * 10).astype(int), 9)
    gaps = [
        (bins == b).mean() * abs(probabilities[bins == b].mean() - labels[bins == b].mean())
        for b in np.unique(bins)
    ]
    return float(np.sum(gaps))


def to_dict(scoring: AnswerScoring | None) -> dict[str, Any] | None:
    """Returns the entry of a checkpoint's configuration."""
    return None if scoring is None else asdict(scoring)
