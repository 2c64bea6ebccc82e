import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import tiny

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.pruning import Pruning
from as2ray.evaluation.cascade_replay import (
    CascadeReplay,
    OperatingPoint,
    cheapest_point,
    pareto_front,
)
from as2ray.evaluation.margin_path import question_losses
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.pruning_report import explain_question, report_pruning
from as2ray.text.bm25 import list_probabilities


@pytest.fixture
def replay() -> CascadeReplay:
    table = tiny.candidates(20, each=8)
    noise = np.random.default_rng(0)
    label = table["label"].to_numpy()
    # Later exits are closer to the label.
    scores = [0.5 + (label - 0.5) * 0.2 * e + noise.normal(0, 0.1, len(label)) for e in (1, 2, 4)]
    tokens = noise.integers(10, 60, len(label))
    return CascadeReplay(
        table, (2, 4, 6), np.stack(scores, 1).astype(np.float32), tokens, EncoderShape(num_layers=6)
    )


def test_nothing_dropped_ranks_by_the_last_exit_and_costs_the_whole_encoder(replay):
    staged = replay.rank([0, 1, 2], 0.0)
    np.testing.assert_array_equal(np.argsort(staged.sort_keys), np.argsort(replay.scores[:, 2]))
    point = replay.evaluate([0, 1, 2], 0.0)
    assert point.relative_layers == 1.0
    assert point.relative_flops == pytest.approx(1.0, abs=0.01)  # but for the heads
    assert replay.evaluate([2], []).relative_flops <= point.relative_flops


def test_dropping_costs_less_and_never_brings_a_candidate_back(replay):
    points = [replay.evaluate([0, 1, 2], drop) for drop in (0.0, 0.3, 0.6, 0.9)]
    costs = [point.relative_flops for point in points]
    assert costs == sorted(costs, reverse=True)
    assert points[0].map > points[-1].map
    stage = replay.rank([0, 1, 2], 0.5).stage_index.reshape(20, 8)
    assert [(stage == s).sum(1).tolist() for s in range(3)] == [[4] * 20, [2] * 20, [2] * 20]


def test_hit_rate_counts_questions_whose_positive_reaches_the_last_exit(replay):
    labels = replay.table["label"].to_numpy().reshape(20, 8)
    assert replay.evaluate([0, 1, 2], 0.0).last_exit_hit_rate == 1.0
    stage = replay.rank([0, 1, 2], 0.6).stage_index.reshape(20, 8)
    by_hand = np.mean(((stage == 2) & (labels == 1)).any(1))
    assert 0 < by_hand < 1
    assert replay.evaluate([0, 1, 2], 0.6).last_exit_hit_rate == by_hand
    assert replay.take(slice(0, 8)).evaluate([0, 1, 2], 0.0).last_exit_hit_rate == 1.0
    # A question without a positive does not count.
    label = np.where(np.arange(160) < 8, 0, labels.ravel())
    table = replay.table.set_column(
        replay.table.column_names.index("label"), "label", [label.astype(np.int8)]
    )
    assert replace(replay, table=table).evaluate([0, 1, 2], 0.0).last_exit_hit_rate == 1.0


def test_point_has_the_measures_of_figure_2(replay):
    staged, rows = replay.rank([0, 1, 2], 0.5), replay.table
    measures = evaluate(rows, staged.sort_keys, ["AP", "RR", "P@1", "nDCG@10"]).measures
    assert replay.evaluate([0, 1, 2], 0.5).measures == pytest.approx(measures)


def test_exit_that_is_not_used_is_as_if_it_had_dropped_nothing(replay):
    used, unused = replay.evaluate([0, 1, 2], (0.5, 0.0)), replay.evaluate([0, 2], (0.5,))
    assert (unused.exit_layers, unused.drop_ratios) == ((2, 6), (0.5,))
    assert unused.map == used.map
    assert unused.relative_layers == pytest.approx(used.relative_layers)
    assert unused.relative_flops < used.relative_flops  # by a head


def test_replay_equals_the_network(checkpoint):
    from as2ray.checkpoints.initialization import init_ranker

    ranker = init_ranker(
        checkpoint("bert", None, initializer_range=0.3), max_length=60, exit_layers=[1, 2, 3]
    )
    ranker.dtype = "fp32"
    table = tiny.candidates(12, each=9)
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    tokens = ranker.tokenizer.encode(*texts).lengths
    shape = EncoderShape.from_config(ranker.network.config)
    replay = CascadeReplay(table, ranker.exit_layers, ranker.predict_exits(*texts), tokens, shape)
    for drop in (0.0, 0.4, (0.7, 0.2)):
        expected, replayed = ranker.predict_table(table, drop), replay.rank([0, 1, 2], drop)
        np.testing.assert_array_equal(replayed.stage_index, expected.stage_index)
        np.testing.assert_allclose(replayed.scores, expected.scores, atol=1e-5)


def point(quality: float, cost: float) -> OperatingPoint:
    return OperatingPoint((1,), (), {"AP": quality}, cost, cost, 1.0)


def test_operating_point_survives_json(replay):
    evaluated = replay.evaluate([0, 2], 0.5)
    assert OperatingPoint(**json.loads(json.dumps(asdict(evaluated)))) == evaluated


def test_pareto_front_holds_what_nothing_beats():
    points = [point(*p) for p in [(0.5, 0.2), (0.6, 0.4), (0.55, 0.5), (0.7, 0.9), (0.7, 0.8)]]
    assert pareto_front(points) == [point(0.5, 0.2), point(0.6, 0.4), point(0.7, 0.8)]


def test_cheapest_is_of_enough_quality_or_the_best_there_is():
    points = [point(0.5, 0.2), point(0.6, 0.4), point(0.62, 0.5)]
    assert cheapest_point(points, 0.59) == cheapest_point(points, 0.6) == point(0.6, 0.4)
    assert cheapest_point(points, 0.9) == point(0.62, 0.5)


def test_of_equally_cheap_points_the_better_counts_and_of_equally_good_ones_the_cheaper():
    points = [point(0.5, 0.2), point(0.6, 0.2), point(0.6, 0.1), point(0.5, 0.1)]
    for ordered in (points, points[::-1]):
        assert cheapest_point(ordered, 0.4) == point(0.6, 0.1)
        assert cheapest_point(ordered[:2], 0.4) == max(ordered[:2], key=lambda p: p.map)
        assert cheapest_point(ordered, 0.9) == point(0.6, 0.1)
        assert pareto_front(ordered) == [point(0.6, 0.1)]


def test_exit_that_ranks_before_the_heads_does_not_cost_them(replay):
    shape = EncoderShape(num_layers=8, num_ranking_heads=3, layers_per_head=2)
    with_heads = replace(replay, shape=shape)
    plain = replace(replay, shape=replace(shape, num_ranking_heads=0, layers_per_head=0))
    assert with_heads.evaluate([0], 0.0).relative_layers == 2 / 8
    assert with_heads.evaluate([0, 1], 0.5) == plain.evaluate([0, 1], 0.5)
    assert with_heads.evaluate([0, 2], 0.0).relative_layers == (6 + 3 * 2) / 8
    assert (
        with_heads.evaluate([0, 2], 0.0).relative_flops
        > plain.evaluate([0, 2], 0.0).relative_flops + 0.5
    )


def test_budget_is_kept_for_every_question_and_more_time_costs_more(replay):
    every, previous_flops = [0, 1, 2], -1.0
    seconds = 1e-6 * replay.num_tokens
    layers = np.array([0, 2, 4, 6])
    for budget_s in (1e-4, 4e-4, 1e-3, 1e-2):
        staged = replay.rank_within(every, budget_s, 1e-6)
        used_s = np.bincount(replay.question_index, seconds * layers[staged.stage_index + 1])
        assert used_s.max() <= budget_s
        stages = staged.stage_index.reshape(20, 8)
        # The first ones that are given are scored, if there is no time for all.
        assert np.all(np.diff((stages >= 0).astype(int), axis=1) <= 0)
        flops = replay.measure(every, staged).relative_flops
        assert flops > previous_flops
        previous_flops = flops
    assert np.all(staged.stage_index == 2)
    np.testing.assert_array_equal(staged.scores, replay.scores[:, 2])


def test_question_is_explained_by_where_its_candidates_left_and_how_far_below_the_best(replay):
    every, margins = [0, 1, 2], (0.4, 0.2)
    staged = replay.rank_by_margins(every, margins)
    report = report_pruning(replay, "margins", every, staged)
    assert sum(report.left_shares) == pytest.approx(1.0)
    assert report.map == replay.measure(every, staged).map
    assert report.first_place_loss == question_losses(replay, staged, "first_place").mean()
    point = replay.measure(every, staged)
    assert report.exit_layers == point.exit_layers
    assert (report.name, report.relative_flops) == ("margins", point.relative_flops)
    unlabelled = replace(replay, table=replay.table.set_column(4, "label", [np.zeros(160, int)]))
    report = report_pruning(unlabelled, "margins", every, staged)
    assert report.map is None
    assert report.first_place_loss > 0
    explained = explain_question(replay, every, staged, 3)
    rows = np.flatnonzero(replay.question_index == 3)
    layers = {2: 0, 4: 1, 6: 2}
    assert len(explained) == 8
    assert [each.exit_layer for each in explained] == sorted(
        (each.exit_layer for each in explained), reverse=True
    )
    assert len({each.exit_layer for each in explained}) > 1
    texts = replay.table["candidate"].to_pylist()
    for each in explained:
        row = next(row for row in rows if texts[row] == each.candidate)
        assert staged.stage_index[row] == layers[each.exit_layer]
        assert each.label == replay.table["label"][row].as_py()
        assert each.score == staged.scores[row]
        if each.exit_layer < 6:
            assert each.gap > margins[layers[each.exit_layer]]
    assert explained[0].gap == 0.0
    none = replay.rank_within(every, 1e-9, 1.0)
    explained = explain_question(replay, every, none, 0)
    assert [(each.exit_layer, each.gap) for each in explained] == [(0, 0.0)] * 8
    assert [each.candidate for each in explained] == texts[:8]
    assert sum(report_pruning(replay, "none", every, none).left_shares) == 0.0


def test_ratios_are_rounded_as_the_replay_says(replay):
    nearest = replace(replay, rounding="nearest")
    for each, num_left in ((replay, 7), (nearest, 6)):  # 0.2 of 8 is 1.6
        stages = each.rank([0, 1], 0.2).stage_index.reshape(20, 8)
        assert (stages == 1).sum(1).tolist() == [num_left] * 20


def test_independent_rankers_cost_all_their_layers(replay):
    sequential = replace(replay, sequential=True)
    assert sequential.evaluate([0, 1, 2], 0.0).relative_layers == (2 + 4 + 6) / 6


def test_bm25_is_a_first_stage_of_each_question_s_own_candidates(replay):
    rows = replay.take(slice(0, 9))  # the second question has one candidate
    stages = rows.with_bm25()
    assert stages.exit_layers == (0, 2, 4, 6)
    assert stages.scores.dtype == np.float32
    np.testing.assert_array_equal(stages.scores[:, 1:], rows.scores)
    question, texts = (rows.table[name].to_pylist() for name in ("question", "candidate"))
    np.testing.assert_array_equal(stages.scores[:8, 0], list_probabilities(question[0], texts[:8]))
    np.testing.assert_array_equal(stages.scores[8:, 0], list_probabilities(question[8], texts[8:]))


def test_time_that_is_left_goes_to_the_best_candidates_of_the_exit_before(replay):
    first = replay.take(slice(0, 4))
    scores = np.array([[0.1, 0.9], [0.4, 0.8], [0.3, 0.7], [0.2, 0.6]], np.float32)
    first = replace(first, exit_layers=(2, 4), scores=scores, num_tokens=np.ones(4, np.int64))
    # Each layer takes a second: all pass two, which leaves 2.5 s for two layers of one of them.
    staged = first.rank_within([0, 1], 10.5, 1.0)
    assert staged.stage_index.tolist() == [0, 1, 0, 0]
    assert staged.scores.tolist() == pytest.approx([0.1, 0.8, 0.3, 0.2])
    assert staged.scores.dtype == np.float32
    # Four seconds are just enough for four layers.
    assert first.rank_within([0, 1], 4.0, 1.0).stage_index.tolist() == [1, -1, -1, -1]


def test_of_equal_scores_the_first_ones_go_on(replay):
    table = tiny.candidates(1, each=200)
    scores, ones = np.full((200, 2), 0.5, np.float32), np.ones(200, np.int64)
    equal = replace(replay, table=table, exit_layers=(2, 4), scores=scores, num_tokens=ones)
    stages = equal.rank_within([0, 1], 600.0, 1.0).stage_index
    assert np.flatnonzero(stages == 1).tolist() == list(range(np.sum(stages == 1)))
    assert 90 < np.sum(stages == 1) < 110


@pytest.mark.parametrize("with_bm25", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_what_margins_drop_stays_dropped_however_much_time_is_left(replay, with_bm25, top_k):
    every, margins = [0, 1, 2], np.array([[0.5, 0.3]])
    if with_bm25:
        replay = replay.with_bm25({2: 0.5})
        every, margins = [0, 1, 2, 3], np.array([[0.06, 0.4, 0.2]])
    pruning = Pruning(np.zeros_like(margins), margins, top_k)
    expected = replay.rank_by_margins(every, margins[0], top_k)
    assert len(set(expected.stage_index.tolist())) == len(every)
    staged = replay.rank_within(every, 10.0, 1e-6, pruning)
    np.testing.assert_array_equal(staged.stage_index, expected.stage_index)
    np.testing.assert_array_equal(staged.scores, expected.scores)
    hurried = replay.rank_within(every, 2e-4, 1e-6, pruning).stage_index
    assert hurried.mean() < expected.stage_index.mean()
    without = replay.rank_within(every, 1e-9, 1e-6, pruning)
    assert not without.scores.any()
    assert set(without.stage_index.tolist()) == {-1}
