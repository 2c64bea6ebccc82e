"""Fits the margins of a cascade: a path of margins on some questions, the place on it on others.

The margins of all exits lie on one path from "nothing dropped" to "all but the best dropped". It
passes through the cheapest margins for each of several losses on one part of the questions. The
place on the path is the only number that the other part decides, so the bound on the loss holds
for it.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from as2ray.cascade.cost import measure_relative_cost, observed_drop_ratios
from as2ray.cascade.margins import Margins, Risk, RiskBound, select_step
from as2ray.cascade.pruning import StagedScores, log_odds
from as2ray.evaluation.cascade_replay import CascadeReplay, compute_places

NUM_LEVELS = 16
"""Finite margins of each exit among which the cheapest are sought."""
LOSSES = tuple(0.0005 * 2**power for power in range(9))
"""Mean losses for which they are sought."""
FACTORS = (0.3, 0.5, 0.7)
"""Before them the path passes through margins that keep the smallest loss even if they are so many
times as large: on other questions the exits agree less with the last one."""
LOSS_WEIGHTS = (64.0, 16.0, 4.0, 1.0)
"""Weights of the loss, beside the cost, by which margins are sought, one after the other."""
MAX_BM25_WEIGHT = 40.0
"""Bound on the weight of BM25, whose log-odds differ by one or two: at 40 it alone decides."""
BM25_WEIGHT_PENALTY = 2e-4
"""Weight of the squared factors of an exit's score and of BM25, when they are fitted."""
NUM_SUBSTEPS = 8
"""Steps of the path from one of the margins that were sought to the next."""

Place = tuple[int, ...]
"""Level of each exit's margin, from 0 (infinite) to `NUM_LEVELS` (0)."""


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
    question_index, complete = replay.question_index, replay.last_exit_places
    if risk == "top_k":
        assert staged.stage_index is not None
        is_lost = (complete <= top_k) & (staged.stage_index < staged.stage_index.max())
        return np.asarray(np.bincount(question_index, is_lost) > 0, np.float64)
    sort_keys = staged.sort_keys
    if risk == "first_place":
        firsts = _best_rows(question_index, -complete, np.flatnonzero(complete == 1))
        return np.asarray(1.0 - 1.0 / _places_of(firsts, question_index, sort_keys))
    positives = np.flatnonzero(replay.table["label"].to_numpy() > 0)
    before, after = (
        1.0 / _places_of(_best_rows(question_index, keys, positives), question_index, keys)
        for keys in (-complete, sort_keys)
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


def _best_rows(question_index: np.ndarray, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns which of some rows is the best of each question, shape [questions]; -1 if none is."""
    rows = rows[np.lexsort((-keys[rows], question_index[rows]))]
    questions, first = np.unique(question_index[rows], return_index=True)
    best = np.full(question_index.max(initial=-1) + 1, -1)
    best[questions] = rows[first]
    return best


def _places_of(best: np.ndarray, question_index: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the place of one row of each question, from 1; infinity where there is none (-1).

    Of equal keys the first row's place is better.
    """
    row = best[question_index]
    is_above = (keys > keys[row]) | ((keys == keys[row]) & (np.arange(len(keys)) < row))
    return np.where(best < 0, np.inf, 1.0 + np.bincount(question_index, is_above, len(best)))


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

    The path passes through the cheapest margins for each of `LOSSES`.

    Args:
        replay: Stored scores of questions that will not choose the place on the path.
        risk: See `question_losses`.
        top_k: See `Pruning`.

    Returns:
        Shape [steps, exits - 1]; no margin rises from one step to the next.
    """
    if replay.scores.shape[1] == 1:
        return np.empty((1, 0))  # the last exit alone, after which nothing is dropped
    search = _MarginSearch(replay, risk, top_k)
    targets = [(LOSSES[0], factor) for factor in FACTORS] + [(loss, 1.0) for loss in LOSSES]
    return search.path_through(search.nested_places(targets))


class _MarginSearch:
    """Seeks cheap margins among `NUM_LEVELS` of each exit, the quantiles of its gaps."""

    def __init__(self, replay: CascadeReplay, risk: Risk, top_k: int) -> None:
        self.replay, self.risk, self.top_k = replay, risk, top_k
        gaps = [_gaps(replay, stage, top_k) for stage in range(replay.scores.shape[1] - 1)]
        shares = np.linspace(1.0, 0.0, NUM_LEVELS + 1)
        self.levels = np.stack([np.quantile(part, shares) for part in gaps])
        """Margin of each exit at each level, [exits - 1, levels]; at level 0 its largest gap."""
        self.levels[:, -1] = 0.0
        self.measured: dict[tuple[Place, float], tuple[float, float]] = {}

    def margins(self, place: np.ndarray | Place) -> np.ndarray:
        """Returns the margins at a place, whose levels may lie between two."""
        levels = range(NUM_LEVELS + 1)
        values = [np.interp(x, levels, part) for x, part in zip(place, self.levels)]
        return np.where(np.asarray(place) > 0, values, np.inf)

    def measure(self, place: Place, factor: float) -> tuple[float, float]:
        """Returns the mean loss with margins that are multiplied by a factor, and the cost."""
        if (place, factor) not in self.measured:
            margins = self.margins(place)
            losses, cost = measure_margins(self.replay, margins, self.risk, self.top_k)
            if factor != 1.0:
                losses, _ = measure_margins(self.replay, factor * margins, self.risk, self.top_k)
            self.measured[place, factor] = float(losses.mean()), cost
        return self.measured[place, factor]

    def nested_places(self, targets: list[tuple[float, float]]) -> list[Place]:
        """Returns the first place, the cheapest for each target, and the last place.

        Targets are bounds on the loss, with the factor of the margins that keep it, from the
        strictest. The middle one comes first; then those before it are sought among lower levels,
        and those after it among higher ones, so that no level falls from one place to the next.
        """
        num_exits = len(self.levels)
        places: list[Place] = [(0,) * num_exits] * (len(targets) + 1)
        places.append((NUM_LEVELS,) * num_exits)

        def fill(start: int, end: int) -> None:
            middle = (start + end) // 2
            if middle > start:
                target = targets[middle - 1]
                places[middle] = self.cheapest(*target, places[start], places[end])
                fill(start, middle)
                fill(middle, end)

        fill(0, len(targets) + 1)
        return places

    def cheapest(self, max_loss: float, factor: float, lower: Place, upper: Place) -> Place:
        """Returns the cheapest place between two of all that a coordinate descent has seen."""
        lowest_cost, cheapest, place = np.inf, lower, lower
        for weight in LOSS_WEIGHTS:
            loss, cost = self.measure(place, factor)
            value, is_better = cost + weight * loss, True
            while is_better:
                is_better = False
                for stage, bounds in enumerate(zip(lower, upper)):
                    for level in range(bounds[0], bounds[1] + 1):
                        other = (*place[:stage], level, *place[stage + 1 :])
                        loss, cost = self.measure(other, factor)
                        if loss <= max_loss and cost < lowest_cost:
                            lowest_cost, cheapest = cost, other
                        if cost + weight * loss < value - 1e-9:
                            value, place, is_better = cost + weight * loss, other, True
        return cheapest

    def path_through(self, places: list[Place]) -> np.ndarray:
        """Returns the margins between each place and the next, [steps, exits - 1].

        A margin that was infinite falls from the exit's largest gap, which drops as little.
        """
        steps = [self.margins(places[0])]
        for place, following in pairwise(np.array(places)):
            if (place != following).any():
                for share in np.linspace(0.0, 1.0, NUM_SUBSTEPS + 1)[1:]:
                    steps.append(self.margins(place + share * (following - place)))
        return np.stack(steps)


def _gaps(replay: CascadeReplay, stage: int, top_k: int) -> np.ndarray:
    """Returns how far all but the best lie below the `top_k`-th best of their question."""
    values, question_index = log_odds(replay.scores[:, stage]), replay.question_index
    stage_places, sizes = compute_places(question_index, values), np.bincount(question_index)
    best = np.empty(len(sizes))
    is_best = stage_places == np.minimum(top_k, sizes)[question_index]
    best[question_index[is_best]] = values[is_best]
    gaps: np.ndarray = np.maximum(best[question_index] - values, 0.0)
    return gaps[stage_places > 1]


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
