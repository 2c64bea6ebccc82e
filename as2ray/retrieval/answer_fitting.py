"""Fits how the parts of a score are combined, and when the first answer is given, to labels.

The weights, what is dropped before the ranker, and the probability that the first answer is right
are each measured on questions that they were not fitted on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from as2ray.retrieval.answer_scoring import (
    MIN_GAIN,
    PARTS,
    AnswerModel,
    AnswerScoring,
    Parts,
    answer_features,
    standardize,
    take_rows,
)
from as2ray.tables.reliability import measure_abstention, measure_reliability

NUM_FOLDS = 5
"""Parts of the questions that are held out in turn."""

NUM_REPEATS = 10
"""Times that the questions are divided into folds to fit `AnswerModel`; probabilities are means."""

MISSED_SHARE = 0.01
"""Share of the questions whose answer may be dropped before the ranker."""

OFF_TOPIC_SHARE = 0.03
"""Share of the questions on other subjects that may be answered, or, if that is less strict, of the
questions with an answer that are not."""

PENALTY = 5.0
"""Weight of the squared coefficients of standardized features."""


def fit_answer_scoring(
    questions: Sequence[tuple[Parts, np.ndarray]],
    min_precision: float,
    off_topic: Sequence[Parts] = (),
    encoder: str | None = None,
    max_similarity_gap: float | None = None,
    seed: int = 0,
    *,
    high_confidence: bool = False,
) -> AnswerScoring:
    """Fits the weights, and what else follows from labels.

    The sum is taken only if it beats its best part on questions that are held out, and the ranker
    only if it improves the score without it by `MIN_GAIN`.

    Args:
        questions: Parts of the candidates of each question, and their labels, 0 or 1; candidates
            that are retrieved and reach the ranker, so a question may have no answer among them.
        min_precision: Minimum share of right answers among those that are given.
        off_topic: Parts of the candidates of questions on other subjects, which have no answer.
        encoder: Fingerprint of the sentence encoder.
        max_similarity_gap: What `fit_similarity_gap` found for these questions; the candidates
            below it are left out already.
        seed: Seed of the folds.
        high_confidence: Whether new questions reach `min_precision` with a probability of 90 %.
    """
    names = [name for name in PARTS if all(name in parts for parts, _ in questions)]
    answered = [(parts, labels) for parts, labels in questions if labels.any()]
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
        max_similarity_gap,
        dev_quality={" + ".join(subset): value for subset, value in quality.items()},
        encoder=encoder,
    )
    own_parts = [parts for parts, _ in questions]
    scoring = fit_min_similarity(scoring, own_parts, off_topic, is_written=True)
    scoring = replace(scoring, max_ranked=fit_max_ranked(scoring, answered))
    model = fit_answer_model(
        scoring, questions, min_precision, off_topic, seed, high_confidence=high_confidence
    )
    return replace(scoring, answer_model=model)


def fit_min_similarity(
    scoring: AnswerScoring,
    questions: Sequence[Parts],
    off_topic: Sequence[Parts],
    *,
    is_written: bool = False,
) -> AnswerScoring:
    """Fits the similarity that tells questions on other subjects; labels are not needed.

    It is the lowest one that all but `OFF_TOPIC_SHARE` of the questions on other subjects miss. If
    people wrote the questions on the subjects, and all but this share of them have more, it is
    halfway between; generated questions are more similar to the documents than those of users.

    Args:
        scoring: The combined score.
        questions: Parts of the candidates of questions on the subjects of the documents.
        off_topic: Those of questions on other subjects.
        is_written: Whether people wrote the questions.
    """
    own, others = (
        np.array([parts["similarity"].max() for parts in group if "similarity" in parts])
        for group in (questions, off_topic)
    )
    if not len(own) or not len(others):
        return scoring
    other_bound = np.quantile(others, 1 - OFF_TOPIC_SHARE)
    own_bound = np.quantile(own, OFF_TOPIC_SHARE, method="lower")
    halfway = (own_bound + other_bound) / 2 if is_written else other_bound
    lowest = float(min(own_bound, halfway))
    shares = {
        name: float((values >= lowest).mean())
        for name, values in (("answered", own), ("answered of other subjects", others))
    }
    quality = {**scoring.dev_quality, **shares}
    return replace(scoring, min_similarity=lowest, dev_quality=quality)


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
    from scipy.optimize import minimize  # Loading it takes 0.5 s, and answering does not need it.

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
    fitted = minimize(loss, start, bounds=bounds, jac=True).x
    return dict(zip(names, fitted.tolist()))


def fit_similarity_gap(questions: Sequence[tuple[Parts, np.ndarray]]) -> float | None:
    """Returns the gap within which all but few questions keep their most similar answer.

    None if no question has an answer.
    """
    gaps = [
        float(parts["similarity"].max() - parts["similarity"][labels.astype(bool)].max())
        for parts, labels in questions
        if labels.any()
    ]
    return float(np.quantile(gaps, 1 - MISSED_SHARE, method="higher")) if gaps else None


def fit_max_ranked(
    scoring: AnswerScoring, questions: Sequence[tuple[Parts, np.ndarray]]
) -> int | None:
    """Returns the fewest candidates to rank at which MAP is within `MISSED_SHARE` of that with all.

    None if the ranker is not asked, or if no question has an answer.
    """
    answered = [(parts, labels) for parts, labels in questions if labels.any()]
    if not scoring.uses_ranker or not answered:
        return None

    def quality(max_ranked: int) -> float:
        limited = replace(scoring, max_ranked=max_ranked)
        places = [labels[limited.order(parts)] for parts, labels in answered]
        return float(np.mean([average_precision(-np.arange(len(p)), p) for p in places]))

    max_size = max(len(labels) for _, labels in answered)
    enough = (1 - MISSED_SHARE) * quality(max_size)
    return next(size for size in range(1, max_size + 1) if quality(size) >= enough)


def fit_answer_model(
    scoring: AnswerScoring,
    questions: Sequence[tuple[Parts, np.ndarray]],
    min_precision: float,
    off_topic: Sequence[Parts] = (),
    seed: int = 0,
    *,
    high_confidence: bool = False,
) -> AnswerModel | None:
    """Fits the probability that the first answer is right, and the threshold.

    Args:
        scoring: The combined score.
        questions: As in `fit_answer_scoring`.
        min_precision: Minimum share of right answers among those that are given; see
            `measure_abstention`.
        off_topic: As in `fit_answer_scoring`.
        seed: Seed of the folds.
        high_confidence: As in `fit_answer_scoring`.

    Returns:
        The model; None if all first answers are right, or none is.
    """
    features, is_right = [], []
    lowest = -np.inf if scoring.min_similarity is None else scoring.min_similarity
    unlabeled = [(parts, np.zeros(len(parts["bm25"]))) for parts in off_topic]
    for parts, labels in [*questions, *unlabeled]:
        # Others are not answered, whatever the probability.
        if len(labels) and parts.get("similarity", np.array([np.inf])).max() >= lowest:
            rows = scoring.kept_rows(parts)
            kept = take_rows(parts, rows)
            scores = scoring.score(kept)
            features.append(answer_features(kept, scores))
            is_right.append(bool(labels[rows[np.argmax(scores)]]))
    x, y = np.array(features), np.array(is_right)
    if y.all() or not y.any():
        return None
    random, held_out = np.random.default_rng(seed), np.zeros(len(y))
    for _ in range(NUM_REPEATS):
        folds = random.permutation(len(y)) % NUM_FOLDS
        for fold in range(NUM_FOLDS):
            model = _fit_logistic(x[folds != fold], y[folds != fold])
            held_out[folds == fold] += model.probability(x[folds == fold]) / NUM_REPEATS
    abstention = measure_abstention(
        held_out, y.astype(int), min_precision, high_confidence=high_confidence
    )
    measures = {
        "precision": abstention.precision_at(1.0),
        "precision at half coverage": abstention.precision_at(0.5),
        "AURC": abstention.aurc,
        "ECE": measure_reliability(held_out, y.astype(int), num_bins=10).ece,
    }
    if abstention.threshold is None:
        measures["reachable precision"] = abstention.reachable_precision
    else:
        is_given = held_out >= abstention.threshold
        measures |= {"given": is_given.mean(), "precision of given": y[is_given].mean()}
    model = _fit_logistic(x, y)
    return AnswerModel(model.coefficients, model.intercept, abstention.threshold, measures)


def _fit_logistic(features: np.ndarray, labels: np.ndarray) -> AnswerModel:
    """Fits a logistic regression with a penalty on standardized features."""
    from scipy.optimize import minimize
    from scipy.special import expit

    mean, scale = features.mean(0), np.maximum(features.std(0), 1e-9)
    x, signs = (features - mean) / scale, 2.0 * labels - 1.0

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (x @ weights[1:] + weights[0])
        penalty = 0.5 * PENALTY * weights[1:] @ weights[1:]
        slopes = -signs * expit(-margins)
        gradient = np.array([slopes.sum(), *(slopes @ x + PENALTY * weights[1:])])
        return float(np.logaddexp(0.0, -margins).sum() + penalty), gradient

    start = np.zeros(x.shape[1] + 1)
    fitted = minimize(loss, start, jac=True).x
    coefficients = fitted[1:] / scale
    intercept = float(fitted[0] - coefficients @ mean)
    return AnswerModel(tuple(coefficients.tolist()), intercept, None)


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the average precision of a question, ties broken against the system."""
    order = np.lexsort((labels, -scores))
    ranked = labels[order].astype(float)
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float((precision * ranked).sum() / ranked.sum())
