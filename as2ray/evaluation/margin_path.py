"""Fits the margins of a cascade: a path of margins on some questions, the place on it on others.

The margins of all exits lie on one path from "nothing dropped" to "all but the best dropped". The
path is ordered on one part of the questions by what a step saves against what it loses. The place
on the path is the only number that the other part decides, so the bound on the loss holds for it.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from as2ray.cascade.cost import measure_relative_cost, observed_drop_ratios
from as2ray.cascade.margins import Margins, Risk, RiskBound, select_step
from as2ray.cascade.pruning import StagedScores, log_odds
from as2ray.evaluation.cascade_replay import CascadeReplay

NUM_LEVELS = 16
"""Finite margins of each exit on the path."""
JUMPS = (1, 2, 4)
"""By how many levels one step may lower a margin."""
MAX_BM25_WEIGHT = 40.0
"""Bound on the weight of BM25, whose log-odds differ by one or two: at 40 it alone decides."""
BM25_WEIGHT_PENALTY = 2e-4
"""Weight of the squared factors of an exit's score and of BM25, when they are fitted."""
NUM_SUBSTEPS = 4
"""Steps into which each step of the path is divided in the end."""


def question_losses(
    replay: CascadeReplay, staged: StagedScores, risk: Risk, top_k: int = 1
) -> np.ndarray:
    """Returns what each question loses by dropping, compared with the last exit; shape [questions].

    `first_place` is 1 - 1 / (place of the last exit's first), and needs no labels.
    `reciprocal_rank` is what the reciprocal rank of the first positive falls by; questions without
    a positive lose nothing. `top_k` is 1 if one of the last exit's `top_k` first was dropped.

    Args:
        replay: Stored scores.
        staged: Scores of the cascade for the same rows.
        risk: What counts as a loss.
        top_k: For the risk `top_k`.
    """
    question_index, last_stage = replay.question_index, replay.scores.shape[1] - 1
    complete = _places(question_index, replay.scores[:, last_stage])
    if risk == "top_k":
        assert staged.stage_index is not None
        is_lost = (complete <= top_k) & (staged.stage_index < staged.stage_index.max())
        return np.asarray(np.bincount(question_index, is_lost) > 0, np.float64)
    places = _places(question_index, staged.sort_keys)
    if risk == "first_place":
        return np.asarray(1.0 - 1.0 / places[_first_rows(question_index, complete)])
    labels = replay.table["label"].to_numpy() > 0
    before, after = (
        _reciprocal_ranks(question_index, labels, ranks, replay.num_questions)
        for ranks in (complete, places)
    )
    return np.asarray(np.maximum(before - after, 0.0))


def measure_last_exit(replay: CascadeReplay, scores: np.ndarray) -> float:
    """Returns the mean of 1 - 1 / (place that the last exit gives to a ranker's first).

    Args:
        replay: Stored scores of a cascade.
        scores: Scores of the ranker that it was made of, for the same rows.
    """
    reference = replace(replay, scores=scores[:, None])
    staged = StagedScores(replay.scores[:, -1])
    return float(question_losses(reference, staged, "first_place").mean())


def _places(question_index: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns the place of each row in its question, from 1; of equal scores the first row's."""
    order = np.lexsort((-scores, question_index))
    sizes = np.bincount(question_index)
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    return places


def _first_rows(question_index: np.ndarray, places: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(places == 1)
    return rows[np.argsort(question_index[rows])]


def _reciprocal_ranks(
    question_index: np.ndarray, labels: np.ndarray, places: np.ndarray, num_questions: int
) -> np.ndarray:
    ranks = np.zeros(num_questions)
    np.maximum.at(ranks, question_index[labels], 1.0 / places[labels])
    return ranks


def measure_margins(
    replay: CascadeReplay, margins: np.ndarray, risk: Risk, top_k: int
) -> tuple[np.ndarray, float]:
    """Returns the loss of each question and the FLOPs relative to the whole encoder's.

    An exit whose margin is infinite is not used, and costs nothing.

    Args:
        replay: Stored scores.
        margins: Margin after each exit but the last, shape [exits - 1].
        risk: See `question_losses`.
        top_k: See `Pruning`; it is also that of the risk `top_k`.
    """
    exits, values = _used_exits(margins)
    staged = replay.rank_by_margins(exits, values, top_k)
    assert staged.stage_index is not None
    _, flops = measure_relative_cost(
        replay.shape,
        [replay.exit_layers[index] for index in exits],
        observed_drop_ratios(staged.stage_index, len(exits)),
        replay.num_tokens,
        staged.stage_index,
    )
    return question_losses(replay, staged, risk, top_k), flops


def _used_exits(margins: np.ndarray) -> tuple[list[int], list[float]]:
    used = np.flatnonzero(np.isfinite(margins)).tolist()
    return [*used, len(margins)], margins[used].tolist()


def fit_margin_path(replay: CascadeReplay, risk: Risk, top_k: int) -> np.ndarray:
    """Orders margins from "nothing dropped" to "all but the `top_k` best dropped".

    Each step lowers the margin of the exit that saves most per loss.

    Args:
        replay: Stored scores of questions that will not choose the place on the path.
        risk: See `question_losses`.
        top_k: See `Pruning`.

    Returns:
        Shape [steps, exits - 1]; no margin rises from one step to the next.
    """
    levels = [_margin_levels(replay, stage, top_k) for stage in range(replay.scores.shape[1] - 1)]
    place = np.zeros(len(levels), np.int64)
    smallest_loss = 0.1 / replay.num_questions

    def margins_at(place: np.ndarray) -> np.ndarray:
        return np.array([values[index] for values, index in zip(levels, place)])

    def measure(place: np.ndarray) -> tuple[float, float]:
        losses, flops = measure_margins(replay, margins_at(place), risk, top_k)
        return float(losses.mean()), flops

    path, (loss, flops) = [margins_at(place)], measure(place)
    while np.any(place < NUM_LEVELS):
        steps = []
        for stage in np.flatnonzero(place < NUM_LEVELS):
            for jump in JUMPS:
                lowered = place.copy()
                lowered[stage] = min(lowered[stage] + jump, NUM_LEVELS)
                new_loss, new_flops = measure(lowered)
                gain = (flops - new_flops) / (max(new_loss - loss, 0.0) + smallest_loss)
                steps.append((gain, new_loss, new_flops, lowered))
        _, loss, flops, place = max(steps, key=lambda step: step[0])
        path.append(margins_at(place))
    return _divide_steps(
        path, np.array([_largest_gap(replay, i, top_k) for i in range(len(levels))])
    )


def _divide_steps(path: list[np.ndarray], largest_gaps: np.ndarray) -> np.ndarray:
    """Returns the path with `NUM_SUBSTEPS` steps in place of each one.

    A margin that was infinite falls from the exit's largest gap, which drops as little.
    """
    steps = [path[0]]
    for margins, lower in pairwise(path):
        start = np.where(np.isfinite(margins), margins, largest_gaps)
        for share in np.linspace(0.0, 1.0, NUM_SUBSTEPS + 1)[1:]:
            steps.append((1 - share) * start + share * lower)
    return np.stack(steps)


def _margin_levels(replay: CascadeReplay, stage: int, top_k: int) -> np.ndarray:
    """Returns infinity and then the quantiles of an exit's gaps to the `top_k`-th best, down to 0.

    Shape [NUM_LEVELS + 1].
    """
    quantiles = np.quantile(
        _gaps(replay, stage, top_k), np.linspace(1.0, 0.0, NUM_LEVELS + 1)[1:-1]
    )
    return np.array([np.inf, *quantiles, 0.0])


def _largest_gap(replay: CascadeReplay, stage: int, top_k: int) -> float:
    return float(_gaps(replay, stage, top_k).max())


def _gaps(replay: CascadeReplay, stage: int, top_k: int) -> np.ndarray:
    """Returns how far all but the best lie below the `top_k`-th best of their question."""
    values, question_index = log_odds(replay.scores[:, stage]), replay.question_index
    places, sizes = _places(question_index, values), np.bincount(question_index)
    best = np.empty(len(sizes))
    is_best = places == np.minimum(top_k, sizes)[question_index]
    best[question_index[is_best]] = values[is_best]
    gaps: np.ndarray = np.maximum(best[question_index] - values, 0.0)
    return gaps[places > 1]


def fit_bm25_weights(replay: CascadeReplay, last_weight: float = 0.0) -> dict[int, float]:
    """Fits by which weights BM25 brings the exits' scores nearest to the last exit's.

    Scores and BM25 are combined such that the probability of being the best of a question's
    candidates (softmax of the log-odds) is that of the last exit as nearly as possible (cross
    entropy). The first layers do not know yet which words the question has; BM25 does.

    Args:
        replay: Stored scores of questions that trained no exit.
        last_weight: Weight of BM25 in the scores of the last exit.

    Returns:
        Weight by the layer of each exit, from 0 to `MAX_BM25_WEIGHT`; see
        `MultiStageRanker.bm25_weights`.
    """
    rows = replay.question_index
    bm25, *exits, last = (log_odds(scores) for scores in replay.with_bm25().scores.T)
    target = _softmax(last + last_weight * bm25, rows)
    weights = [_fit_bm25_weight(scores, bm25, target, rows) for scores in exits]
    return dict(zip(replay.exit_layers, [*weights, last_weight]))


def fit_last_bm25_weight(replay: CascadeReplay) -> float:
    """Fits by which weight BM25 brings the last exit's scores nearest to the labels.

    The probability of being the best candidate (see `fit_bm25_weights`) is divided evenly between
    a question's positives.

    Args:
        replay: Stored scores of questions with a positive, best of such that did not train the
            ranker: of those it knows the answers, and BM25 seems to add nothing.
    """
    rows = replay.question_index
    bm25, *_, last = (log_odds(scores) for scores in replay.with_bm25().scores.T)
    labels = (replay.table["label"].to_numpy() > 0).astype(np.float64)
    return _fit_bm25_weight(last, bm25, labels / np.bincount(rows, labels)[rows], rows)


def _fit_bm25_weight(
    scores: np.ndarray, bm25: np.ndarray, target: np.ndarray, question_index: np.ndarray
) -> float:
    """Returns the weight of BM25 beside log-odds, whose softmax is nearest to some shares."""
    from scipy.optimize import minimize

    features, num_questions = np.stack([scores, bm25], 1), question_index.max() + 1

    def loss(factors: np.ndarray) -> tuple[float, np.ndarray]:
        probabilities = _softmax(features @ factors, question_index)
        entropy = -(target * np.log(np.maximum(probabilities, 1e-300))).sum() / num_questions
        gradient = (probabilities - target) @ features / num_questions
        penalty = BM25_WEIGHT_PENALTY * factors
        return float(entropy + (penalty @ factors) / 2), gradient + penalty

    slope, weight = minimize(loss, [1.0, 0.0], jac=True).x
    return float(np.clip(weight / max(slope, 1e-9), 0.0, MAX_BM25_WEIGHT))


def _softmax(values: np.ndarray, question_index: np.ndarray) -> np.ndarray:
    """Returns the softmax over the rows of each question, shape [rows]."""
    best = np.full(question_index.max() + 1, -np.inf)
    np.maximum.at(best, question_index, values)
    shares = np.exp(values - best[question_index])
    return np.asarray(shares / np.bincount(question_index, shares)[question_index])


def fit_margins(
    path_replay: CascadeReplay,
    calibration: CascadeReplay,
    risk: Risk,
    max_loss: float,
    confidence: float | None = None,
    top_k: int = 1,
) -> tuple[tuple[int, ...], Margins]:
    """Fits the cheapest margins whose loss is bounded.

    Args:
        path_replay: Stored scores of the questions that order the path.
        calibration: Stored scores of other questions, all with two or more candidates, that choose
            the place on it.
        risk: What is bounded; see `question_losses`.
        max_loss: Bound on the loss; see `RiskBound`.
        confidence: See `RiskBound`.
        top_k: See `Pruning`; it is also that of the risk `top_k`.

    Returns:
        Layers of the exits that are used, and their margins.

    Raises:
        EvaluationError: Too few questions for the bound.
    """
    path = fit_margin_path(path_replay, risk, top_k)
    measured = [measure_margins(calibration, margins, risk, top_k) for margins in path]
    losses = np.maximum.accumulate([question_losses for question_losses, _ in measured])
    step = select_step(losses, max_loss, confidence)
    exits, values = _used_exits(path[step])
    bound = RiskBound(
        risk,
        max_loss,
        calibration.num_questions,
        float(losses[step].mean()),
        measured[step][1],
        confidence,
    )
    layers = tuple(calibration.exit_layers[index] for index in exits)
    return layers, Margins(tuple(values), top_k, bound)
