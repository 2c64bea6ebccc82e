from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tiny
from scipy.optimize import minimize

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.pruning import StagedScores, log_odds
from as2ray.errors import EvaluationError
from as2ray.evaluation import margin_path
from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.margin_path import (
    MAX_BM25_WEIGHT,
    fit_bm25_weights,
    fit_last_bm25_weight,
    fit_margin_path,
    fit_margins,
    measure_margins,
    question_losses,
)
from as2ray.text.bm25 import list_probabilities


def stored(num_questions: int, seed: int = 0) -> CascadeReplay:
    """A cascade of three exits; later ones agree better with the last."""
    table, random = tiny.candidates(num_questions, each=8, seed=seed), np.random.default_rng(seed)
    # Some questions have a clear answer, others have none.
    last = random.normal(0, 1, table.num_rows) + 6 * table["label"].to_numpy() * np.repeat(
        random.random(num_questions) > 0.3, 8
    )
    exits = [last + random.normal(0, noise, table.num_rows) for noise in (1.5, 0.7, 0)]
    scores = 1 / (1 + np.exp(-np.stack(exits, 1)))
    tokens = random.integers(10, 60, table.num_rows)
    shape = EncoderShape(num_layers=6)
    return CascadeReplay(table, (2, 4, 6), scores.astype(np.float32), tokens, shape)


@pytest.fixture(scope="module")
def replay() -> CascadeReplay:
    return stored(60)


@pytest.fixture(scope="module")
def path(replay):
    return fit_margin_path(replay, "first_place", 1)


def test_a_margin_falls_from_the_largest_gap_of_its_exit(replay, path):
    for stage in range(path.shape[1]):
        finite = path[np.isfinite(path[:, stage]), stage]
        largest = margin_path._gaps(replay, stage, 1).max()
        assert 0 < finite[0] < largest
        assert finite[-1] == 0.0


def test_no_margins_among_the_levels_are_cheaper_for_the_losses_of_the_path():
    """Of two exits all pairs of levels are tried."""
    replay = stored(100, seed=5)
    search = margin_path._MarginSearch(replay, "first_place", 1)
    last = margin_path.NUM_LEVELS
    places = search.nested_places([(loss, 1.0) for loss in margin_path.LOSSES])
    assert places[0] == (0, 0)
    assert places[-1] == (last, last)
    assert np.all(np.diff(places, axis=0) >= 0)
    every = [search.measure(place, 1.0) for place in product(range(last + 1), repeat=2)]
    middle = (len(margin_path.LOSSES) + 1) // 2  # what is sought without bounds
    loss, cost = search.measure(places[middle], 1.0)
    target = margin_path.LOSSES[middle - 1]
    assert loss <= target
    assert cost <= min(c for other, c in every if other <= target) + 0.01
    costs = [search.measure(place, 1.0)[1] for place in places]
    assert np.all(np.diff(costs) <= 0)


def test_places_keep_the_loss_of_their_targets_from_the_first_to_the_last():
    replay = stored(100, seed=5)
    search = margin_path._MarginSearch(replay, "first_place", 1)
    targets = [(0.01, 0.5), (0.01, 1.0), (0.02, 1.0), (0.05, 1.0)]
    places = search.nested_places(targets)
    assert len({places[0], *places[1:-1], places[-1]}) == 6  # each target has a place of its own
    for target, place in zip(targets, places[1:-1], strict=True):
        assert search.measure(place, target[1])[0] <= target[0]
    loss, cost = search.measure(places[-2], 0.5)
    margins = search.margins(places[-2])
    losses, _ = measure_margins(replay, 0.5 * margins, "first_place", 1)
    assert 0.05 < loss == losses.mean()
    assert cost == measure_margins(replay, margins, "first_place", 1)[1]


def test_path_has_even_steps_between_places_and_none_where_they_are_equal():
    search = margin_path._MarginSearch(stored(30), "first_place", 1)
    path = search.path_through([(0, 0), (8, 0), (8, 0), (8, 1)])
    assert len(path) == 1 + 2 * margin_path.NUM_SUBSTEPS
    assert np.isinf(path[0]).all()
    assert path[1 : margin_path.NUM_SUBSTEPS + 1, 0].tolist() == search.levels[0, 1:9].tolist()
    assert np.isinf(path[: margin_path.NUM_SUBSTEPS + 1, 1]).all()
    largest, first = search.levels[1, :2]
    expected = largest + np.arange(1, 9) / 8 * (first - largest)
    assert path[margin_path.NUM_SUBSTEPS + 1 :, 1].tolist() == pytest.approx(expected.tolist())
    assert search.margins((0, 1)).tolist() == [np.inf, first]


def test_path_passes_through_safe_margins_before_those_of_each_loss(replay, monkeypatch):
    targets = []
    monkeypatch.setattr(
        margin_path._MarginSearch, "nested_places", lambda _, each: targets.extend(each) or [(0, 0)]
    )
    fit_margin_path(replay, "first_place", 1)
    losses = margin_path.LOSSES
    assert targets == [*((losses[0], f) for f in (0.3, 0.5, 0.7)), *((x, 1.0) for x in losses)]


def test_last_exit_alone_has_no_margins_and_drops_nothing(replay):
    alone = replace(replay, exit_layers=(6,), scores=replay.scores[:, -1:])
    layers, margins = fit_margins(alone, alone, "first_place", 0.05)
    assert (layers, margins.values) == ((6,), ())
    assert margins.bound.mean_loss == 0


def test_question_without_a_positive_loses_no_reciprocal_rank():
    replay, staged = staged_example()
    labels = np.array([0, 1, 0, 0, 0, 0, 0, 0], np.int8)
    none = replace(replay, table=replay.table.set_column(4, "label", [labels]))
    # The last row, of the question without a positive, falls.
    fallen = replace(staged, scores=np.append(staged.scores[:-1], np.float32(0.0)))
    assert question_losses(none, fallen, "reciprocal_rank").tolist() == [0.0, 0.0]
    assert question_losses(none, fallen, "reciprocal_rank").dtype == np.float64


def test_first_margins_of_the_path_keep_the_smallest_loss_when_they_are_smaller():
    replay = stored(100, seed=5)
    search = margin_path._MarginSearch(replay, "first_place", 1)
    place = search.cheapest(0.0005, 0.5, (0, 0), (margin_path.NUM_LEVELS,) * 2)
    margins = search.margins(place)
    assert np.isfinite(margins).any()
    losses, cost = measure_margins(replay, margins, "first_place", 1)
    half, _ = measure_margins(replay, 0.5 * margins, "first_place", 1)
    assert half.mean() <= 0.0005
    assert search.measure(place, 0.5) == (half.mean(), cost)
    assert search.measure(place, 1.0) == (losses.mean(), cost)
    free = search.cheapest(0.0005, 1.0, (0, 0), (margin_path.NUM_LEVELS,) * 2)
    assert search.measure(free, 1.0)[1] < cost


def test_last_exit_is_measured_by_the_place_that_it_gives_to_the_ranker_s_first(replay):
    assert margin_path.measure_last_exit(replay, replay.scores[:, -1]) == 0
    second = replay.scores[:, -1].copy()
    starts = np.arange(0, len(second), 8)
    order = np.argsort(-second.reshape(-1, 8), axis=1)
    second[starts + order[:, 1]] += 1  # what the last exit puts second is the ranker's first
    assert margin_path.measure_last_exit(replay, second) == pytest.approx(0.5)


def test_bm25_is_a_stage_without_layers_before_the_others(replay):
    staged = replay.with_bm25()
    assert (staged.exit_layers, staged.scores.shape[1]) == ((0, 2, 4, 6), 4)
    np.testing.assert_array_equal(staged.scores[:, 1:], replay.scores)
    texts = replay.table["candidate"].to_pylist()
    rows = np.flatnonzero(replay.question_index == 7)
    expected = list_probabilities(
        replay.table["question"][int(rows[0])].as_py(), [texts[row] for row in rows]
    )
    np.testing.assert_array_equal(staged.scores[rows, 0], expected)
    # What it drops costs nothing but the classifiers.
    margins = np.array([0.0, np.inf, np.inf])
    _, flops = measure_margins(staged, margins, "first_place", 1)
    kept = staged.rank_by_margins([0, 3], [0.0]).stage_index == 1
    assert flops == pytest.approx(replay.num_tokens[kept].sum() / replay.num_tokens.sum(), rel=0.1)


def test_bm25_has_the_weight_that_brings_an_exit_nearest_to_the_last_one(replay):
    bm25 = log_odds(replay.with_bm25().scores[:, 0])
    random = np.random.default_rng(0)
    noise, meaning = random.normal(0, 1, (2, len(bm25)))
    exits = [noise, meaning, meaning + 5 * bm25, meaning + 5 * bm25]
    scores = (1 / (1 + np.exp(-np.stack(exits, 1)))).astype(np.float32)
    weights = fit_bm25_weights(replace(replay, exit_layers=(1, 2, 4, 6), scores=scores))
    assert list(weights) == [1, 2, 4, 6]
    assert weights[1] == MAX_BM25_WEIGHT
    assert weights[2] == pytest.approx(5, rel=0.1)
    assert weights[4] == pytest.approx(0, abs=0.1)
    assert weights[6] == 0
    negative = replace(replay, scores=1 / (1 + np.exp(bm25[:, None] * [1, 1, 5])))
    assert fit_bm25_weights(negative) == {2: 0.0, 4: 0.0, 6: 0.0}


def test_bm25_has_the_weight_that_brings_the_last_exit_nearest_to_the_labels(replay):
    stages = replay.with_bm25()
    bm25, starts = log_odds(stages.scores[:, 0]), np.arange(0, len(replay.scores), 8)
    meaning = np.random.default_rng(1).normal(0, 1, len(bm25))
    random = np.random.default_rng(2)

    def labelled(weight):
        """Positives drawn by the softmax of the sum, so that the weight is the best one."""
        labels = np.zeros(len(bm25), np.int8)
        for start in starts:
            sums = 3 * (meaning + weight * bm25)[start : start + 8]
            shares = np.exp(sums - sums.max())
            labels[start + random.choice(8, p=shares / shares.sum())] = 1
        return replace(
            replay,
            table=replay.table.set_column(4, "label", [labels]),
            scores=(1 / (1 + np.exp(-np.stack([meaning] * 3, 1)))).astype(np.float32),
        )

    assert fit_last_bm25_weight(labelled(6)) == pytest.approx(6, rel=0.5)
    assert fit_last_bm25_weight(labelled(0)) == pytest.approx(0, abs=2)
    assert fit_last_bm25_weight(labelled(-6)) == 0
    # Two positives of a question share its weight.
    once = labelled(6)
    half = once.table["label"].to_numpy() | (np.arange(len(bm25)) % 8 == 0)
    shared = replace(once, table=once.table.set_column(4, "label", [half]))
    target = half / np.repeat(half.reshape(-1, 8).sum(1), 8)
    last, rows = log_odds(once.scores[:, -1]), once.question_index
    expected = margin_path._fit_bm25_weight(last, bm25, target, rows)
    assert fit_last_bm25_weight(shared) == pytest.approx(expected)
    # Then the other exits imitate the sum.
    weights = fit_bm25_weights(labelled(0), 4.0)
    assert weights == {2: pytest.approx(4, rel=0.1), 4: pytest.approx(4, rel=0.1), 6: 4.0}


def test_exits_scores_are_lowered_by_weights_and_the_last_one_s_are_not(replay):
    weighted = replay.with_bm25({2: 3.0})
    np.testing.assert_array_equal(weighted.scores[:, 2:], replay.scores[:, 1:])
    values = log_odds(replay.with_bm25().scores[:, 0])
    best = np.maximum.reduceat(values, np.flatnonzero(np.diff(replay.question_index, prepend=-1)))
    expected = log_odds(replay.scores[:, 0]) - 3.0 * (best[replay.question_index] - values)
    np.testing.assert_allclose(log_odds(weighted.scores[:, 1]), expected, atol=1e-4)
    assert replay.take(slice(8, 24)).num_questions == 2


def staged_example() -> tuple[CascadeReplay, StagedScores]:
    """Two questions of four; the ranker's firsts are rows 0 and 5; positives are rows 1 and 5."""
    scores = np.array([0.9, 0.8, 0.2, 0.1, 0.3, 0.7, 0.6, 0.5], np.float32)
    table = tiny.candidates(2, each=4)
    table = table.set_column(4, "label", [np.array([0, 1, 0, 0, 0, 1, 0, 0], np.int8)])
    both = np.stack([scores, scores], 1)
    shape = EncoderShape(num_layers=2)
    staged = StagedScores(scores, np.array([0, 1, 1, 0, 1, 1, 1, 0]))
    return CascadeReplay(table, (1, 2), both, np.full(8, 9), shape), staged


def test_losses_by_hand():
    replay, staged = staged_example()
    # Row 0 was dropped, so two survivors stand above it; row 5 stays first.
    assert question_losses(replay, staged, "first_place").tolist() == [1 - 1 / 3, 0.0]
    # Row 1 rises from the second place to the first, which is no loss.
    assert question_losses(replay, staged, "reciprocal_rank").tolist() == [0.0, 0.0]
    assert question_losses(replay, staged, "top_k", 1).tolist() == [1.0, 0.0]
    assert question_losses(replay, staged, "top_k", 4).tolist() == [1.0, 1.0]
    lost = replace(staged, stage_index=np.array([1, 0, 1, 1, 1, 0, 1, 1]))
    # Row 1 falls from 2 to 4, row 5 from 1 to 4.
    assert question_losses(replay, lost, "reciprocal_rank").tolist() == [1 / 4, 3 / 4]


def test_path_goes_from_nothing_dropped_to_all_but_the_best_dropped(replay, path):
    assert np.isinf(path[0]).all()
    assert (path[-1] == 0).all()
    assert np.all(path[1:] <= path[:-1])
    losses, flops = measure_margins(replay, path[0], "first_place", 1)
    assert losses.sum() == 0
    assert flops == pytest.approx(1.0, abs=0.01)
    staged = replay.rank_by_margins([0, 1, 2], path[-1])
    assert np.bincount(staged.stage_index).tolist() == [60 * 7, 0, 60]
    assert measure_margins(replay, path[-1], "first_place", 1)[1] < 0.5


def test_cheapest_steps_come_first(replay, path):
    costs = [measure_margins(replay, margins, "first_place", 1)[1] for margins in path]
    losses = [measure_margins(replay, margins, "first_place", 1)[0].mean() for margins in path]
    half = costs[-1] + (costs[0] - costs[-1]) / 2
    loss_at_half = next(loss for loss, cost in zip(losses, costs) if cost <= half)
    assert loss_at_half < losses[-1] / 4


def test_margins_save_more_than_ratios_of_the_same_loss(replay, path):
    """Easy questions lose nearly all candidates early, and hard ones few."""
    by_margins = [measure_margins(replay, margins, "first_place", 1) for margins in path]
    for ratio in (0.2, 0.4, 0.6):
        staged = replay.rank([0, 1, 2], ratio)
        loss = question_losses(replay, staged, "first_place").mean()
        cost = replay.evaluate([0, 1, 2], ratio).relative_flops
        assert min(c for losses, c in by_margins if losses.mean() <= loss) < cost


def test_exit_without_a_margin_costs_nothing(replay):
    _, used = measure_margins(replay, np.array([1e9, 2.0]), "first_place", 1)
    _, unused = measure_margins(replay, np.array([np.inf, 2.0]), "first_place", 1)
    assert unused < used


@pytest.mark.parametrize("risk", ["first_place", "reciprocal_rank", "top_k"])
def test_fitted_margins_keep_the_bound_over_200_random_splits(risk, monkeypatch):
    """The mean loss on the other questions is within the bound plus its Monte Carlo error."""
    everything, max_loss = stored(300), 0.04
    path = fit_margin_path(stored(80, seed=1), risk, 1)
    monkeypatch.setattr(
        margin_path, "fit_margin_path", lambda _, *options: {(risk, 1): path}[options]
    )
    random = np.random.default_rng(0)
    losses = np.stack([measure_margins(everything, margins, risk, 1)[0] for margins in path])
    test_losses, costs = [], []
    for number in range(200):
        order = random.permutation(300)
        if number < 3:  # the same choice by the function that users call
            chosen = np.isin(everything.question_index, order[:100])
            part = select_questions(everything, chosen)
            layers, margins = fit_margins(part, part, risk, max_loss)
            assert margins.bound.mean_loss <= max_loss
        step = margin_path.select_step(losses[:, order[:100]], max_loss)
        if number < 3:
            finite = path[step][np.isfinite(path[step])]
            assert margins.values == tuple(finite)
            assert layers == (*np.array([2, 4])[np.isfinite(path[step])], 6)
        test_losses.append(losses[step, order[100:]].mean())
        costs.append(measure_margins(everything, path[step], risk, 1)[1])
    assert np.mean(test_losses) <= max_loss + 3 * np.std(test_losses) / np.sqrt(200)
    assert np.mean(costs) < 0.9  # the bound is not kept by dropping nothing


def select_questions(replay: CascadeReplay, rows: np.ndarray) -> CascadeReplay:
    return CascadeReplay(
        replay.table.filter(rows),
        replay.exit_layers,
        replay.scores[rows],
        replay.num_tokens[rows],
        replay.shape,
    )


def test_top_k_of_the_margins_is_that_of_the_risk(replay):
    staged = replay.rank_by_margins([0, 1, 2], [0.0, 0.0], 3)
    losses, _ = measure_margins(replay, np.zeros(2), "top_k", 3)
    assert losses.dtype == np.float64
    np.testing.assert_array_equal(losses, question_losses(replay, staged, "top_k", 3))
    assert losses.sum() > question_losses(replay, staged, "top_k").sum()
    one_left = replay.rank_by_margins([0, 1, 2], [0.0, 0.0])
    assert losses.sum() < question_losses(replay, one_left, "top_k", 3).sum()
    np.testing.assert_array_equal(
        question_losses(replay, one_left, "top_k"), question_losses(replay, one_left, "top_k", 1)
    )


def test_top_k_first_are_kept(replay):
    path = fit_margin_path(replay, "top_k", 3)
    staged = replay.rank_by_margins([0, 1, 2], path[-1], 3)
    assert np.bincount(staged.stage_index).tolist() == [60 * 5, 0, 60 * 3]
    _, margins = fit_margins(replay, stored(99, seed=2), "top_k", 0.01, top_k=3)
    assert margins.top_k == 3
    assert margins.bound.mean_loss == 0
    with pytest.raises(EvaluationError, match="needs 99 questions"):
        fit_margins(replay, stored(98, seed=2), "top_k", 0.01, top_k=3)


def test_gaps_are_those_of_all_but_the_first_to_the_top_k_th_best(replay):
    values = np.array([1.0, 4.0, 2.0, -1.0, 5.0, 0.5, 3.0])  # of 4, 1 and 2 candidates
    table = replay.table.take([0, 1, 2, 3, 8, 16, 17])
    scores = 1 / (1 + np.exp(-values[:, None].repeat(2, 1)))
    few = replace(replay, table=table, scores=scores)
    assert margin_path._gaps(few, 0, 1).tolist() == pytest.approx([3, 2, 5, 2.5])
    # The second best counts, and is not below itself; where there is no second, the best.
    assert margin_path._gaps(few, 0, 2).tolist() == pytest.approx([1, 0, 3, 0])


def test_steps_that_lose_nothing_come_before_those_that_save_twice_as_much():
    """Dropping after two layers saves twice as much as after four, and loses a question."""
    gaps, rows = np.linspace(0.2, 8, 40), np.arange(40) * 2
    values = np.zeros((80, 3))
    values[rows] = gaps[:, None]  # the first of each question is its answer
    values[78:, 0] = [0.0, 8.0]  # but not for the first exit of the question with the largest gap
    table = tiny.candidates(40, each=2).set_column(4, "label", [np.zeros(80, np.int8)])
    scores = 1 / (1 + np.exp(-values))
    shape = EncoderShape(num_layers=6)
    replay = CascadeReplay(table, (2, 4, 6), scores, np.full(80, 30), shape)
    path = fit_margin_path(replay, "first_place", 1)
    first = path[np.isfinite(path[:, 0]).argmax()]
    assert first[1] == 0.0
    assert measure_margins(replay, first, "first_place", 1)[0].sum() == 0.5


def test_shares_of_large_log_odds_are_finite():
    shares = margin_path._softmax(np.array([900.0, 900.0, -900.0, -899.0]), np.array([0, 0, 1, 1]))
    assert shares.tolist() == pytest.approx([0.5, 0.5, 1 / (1 + np.e), np.e / (1 + np.e)])


def test_weight_of_bm25_is_at_the_minimum_of_the_penalized_cross_entropy(monkeypatch):
    monkeypatch.setattr(margin_path, "BM25_WEIGHT_PENALTY", 0.1)
    random, question_index = np.random.default_rng(3), np.repeat(np.arange(20), 5)
    scores, bm25 = random.normal(size=(2, 100)) * [[1.0], [0.2]]
    target = margin_path._softmax(3 * (scores + 5 * bm25), question_index)

    def loss(factors):
        sums = factors[0] * scores + factors[1] * bm25
        entropy = -np.sum(target * np.log(margin_path._softmax(sums, question_index))) / 20
        return entropy + 0.1 * np.sum(factors**2) / 2

    slope, weight = minimize(loss, [1.0, 1.0], method="Nelder-Mead", options={"xatol": 1e-6}).x
    fitted = margin_path._fit_bm25_weight(scores, bm25, target, question_index)
    assert fitted == pytest.approx(weight / slope, rel=1e-3)
    assert fitted < 4.5  # so the penalty counts


def test_bound_says_what_was_asked_for_and_found():
    path_replay, calibration, costs = stored(60), stored(150, seed=3), []
    for confidence in (None, 0.9):
        options = (path_replay, calibration, "reciprocal_rank", 0.04, confidence, 1)
        layers, margins = fit_margins(*options)
        exits = [(2, 4, 6).index(layer) for layer in layers]
        staged = calibration.rank_by_margins(exits, margins.values)
        losses = question_losses(calibration, staged, "reciprocal_rank")
        point, bound = calibration.measure(exits, staged), margins.bound
        assert (bound.risk, bound.max_loss, bound.confidence) == options[2:5]
        assert bound.num_questions == 150
        assert bound.relative_flops == pytest.approx(point.relative_flops)
        # An earlier step may lose more: losses are made monotone.
        assert 0 < losses.mean() <= bound.mean_loss <= losses.mean() + 0.001
        costs.append(bound.relative_flops)
    assert costs[0] < costs[1]  # a surer bound costs more
