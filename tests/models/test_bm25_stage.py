import json

import numpy as np
import pytest
import tiny

from as2ray.cascade.margins import Margins
from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError
from as2ray.models.bm25_stage import UNSCORED_SCALE, select_by_bm25
from as2ray.serving.engine import RerankEngine
from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError, RerankRequest
from as2ray.text.bm25 import BM25, POINTS_PER_LOGIT, list_probabilities

QUESTION = "who wrote the wide book"
CANDIDATES = [
    "the sea is wide",
    "she wrote the wide book",
    "nothing here",
    "he wrote a book",
    "a book",
    "rain falls",
]
ENTERS = [0, 1, 3]
"""Candidates within `MARGIN` of the best."""
MARGIN = 0.1


@pytest.fixture
def cascade(checkpoint):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3])
    ranker.dtype = "fp32"
    ranker.margins, ranker.bm25_margin = Margins((100.0,)), MARGIN
    return ranker


def test_list_is_scored_by_its_own_words():
    probabilities = list_probabilities(QUESTION, CANDIDATES)
    scores = BM25().build_index(CANDIDATES).get_scores(QUESTION)
    assert np.argmax(probabilities) == 1
    assert np.log(probabilities / (1 - probabilities)) * POINTS_PER_LOGIT == pytest.approx(
        scores, abs=1e-4
    )
    assert probabilities[[2, 5]].tolist() == [0.5, 0.5]
    assert list_probabilities(QUESTION, ["?", "!"]).tolist() == [0.5, 0.5]


def test_candidates_far_below_the_best_do_not_enter():
    selection = select_by_bm25(QUESTION, CANDIDATES, MARGIN)
    assert np.flatnonzero(selection.enters).tolist() == ENTERS
    assert select_by_bm25(QUESTION, CANDIDATES, 9.0).enters.all()
    assert select_by_bm25(QUESTION, [], MARGIN).enters.shape == (0,)


def test_those_that_enter_are_scored_as_alone_and_the_others_rank_below_by_bm25(cascade):
    ranking = cascade.rank(QUESTION, CANDIDATES)
    alone = cascade.rank(QUESTION, [CANDIDATES[i] for i in ENTERS], drop_ratios=0.0)
    assert [(ENTERS[r.index], r.score) for r in alone] == [(r.index, r.score) for r in ranking[:3]]
    dropped = ranking[len(ENTERS) :]
    expected = np.argsort(-list_probabilities(QUESTION, CANDIDATES), kind="stable").tolist()
    assert [r.index for r in dropped] == [i for i in expected if i not in ENTERS]
    assert {r.exit_layer for r in dropped} == {0}
    assert all(0 < r.score < UNSCORED_SCALE for r in dropped)


def test_questions_are_selected_each_by_itself_whatever_their_order(cascade):
    others = ["a book is wide", "who wrote", "the rain"]
    index = np.array([1, 0, 0, 1, 0, 1, 0, 0, 0])
    texts, questions = [iter(CANDIDATES), iter(others)], [QUESTION, "the rain"]
    candidates = [next(texts[i]) for i in index]
    staged = cascade.predict_pairs([questions[i] for i in index], candidates, index)
    for number, given in enumerate((CANDIDATES, others)):
        alone = cascade.predict_pairs(
            [questions[number]] * len(given), given, np.zeros(len(given), int)
        )
        assert staged.stage_index[index == number].tolist() == alone.stage_index.tolist()
        assert staged.scores[index == number] == pytest.approx(alone.scores, abs=1e-6)
    assert np.sum(staged.stage_index == NOT_SCORED) > 4


def test_drop_ratios_let_all_enter_and_set_ones_remove_the_margin(cascade, tmp_path):
    assert {r.exit_layer for r in cascade.rank(QUESTION, CANDIDATES, drop_ratios=0.0)} == {3}
    assert load(save(cascade, tmp_path / "saved"), device="cpu").bm25_margin == MARGIN
    cascade.drop_ratios = 0.0
    assert cascade.bm25_margin is None
    assert {r.exit_layer for r in cascade.rank(QUESTION, CANDIDATES)} == {3}


@pytest.mark.parametrize("drop_ratios", [None, (0.0,)])
def test_service_ranks_alike_and_counts_no_tokens_of_those_that_do_not_enter(cascade, drop_ratios):
    engine = RerankEngine(cascade, Limits())
    batch = [
        engine.tokenize(RerankRequest(QUESTION, texts, "m", drop_ratios=drop_ratios))
        for texts in (CANDIDATES, CANDIDATES[:1], CANDIDATES[2:])
    ]
    for tokenized, result in zip(batch, engine.rank(batch), strict=True):
        texts = tokenized.request.candidates
        expected = cascade.rank(QUESTION, texts, drop_ratios=drop_ratios)
        assert [(r.index, r.exit_layer) for r in result.ranking] == [
            (r.index, r.exit_layer) for r in expected
        ]
        assert [r.score for r in result.ranking] == pytest.approx(
            [r.score for r in expected], abs=1e-6
        )
        entered = [r.index for r in expected if r.exit_layer]
        pairs = cascade.tokenizer.encode([QUESTION] * len(entered), [texts[i] for i in entered])
        assert result.num_tokens == len(pairs.token_ids)


@pytest.mark.parametrize("last_weight", [0.0, 1.5])
def test_weights_of_bm25_lower_scores_in_each_way_of_ranking(cascade, tmp_path, last_weight):
    plain = cascade.rank(QUESTION, CANDIDATES)
    weights, gaps = (2.5, last_weight), select_by_bm25(QUESTION, CANDIDATES, np.inf).gaps
    cascade.margins = Margins((0.0,))  # all but the best leave after the first exit
    without_bm25 = {r.index: r for r in cascade.rank(QUESTION, CANDIDATES)}
    assert not cascade.uses_bm25
    cascade.bm25_weights = weights
    assert cascade.uses_bm25
    restored = load(save(cascade, tmp_path / "saved"), dtype="fp32", device="cpu")
    assert restored.bm25_weights == weights
    ranking = restored.rank(QUESTION, CANDIDATES)
    assert ranking[0].index == 1  # it has most words of the question
    logit = {r.index: np.log(r.score / (1 - r.score)) for r in ranking}
    for index, result in without_bm25.items():
        if result.exit_layer == 1 and index != 1:
            expected = np.log(result.score / (1 - result.score)) - 2.5 * gaps[index]
            assert logit[index] == pytest.approx(expected, abs=1e-4)
    in_time = restored.rank(QUESTION, CANDIDATES, budget_ms=60_000)
    engine = RerankEngine(restored, Limits())
    request = RerankRequest(QUESTION, CANDIDATES, "m")
    served = engine.rank([engine.tokenize(request) for _ in range(2)])
    others = [in_time, *(result.ranking for result in served)]
    for other in others:
        assert [(r.index, r.exit_layer) for r in other] == [
            (r.index, r.exit_layer) for r in ranking
        ]
        assert [r.score for r in other] == pytest.approx([r.score for r in ranking], abs=1e-6)
    with_ratio = restored.rank(QUESTION, CANDIDATES, drop_ratios=0.0)
    assert [r.index for r in with_ratio] != [r.index for r in ranking]
    cascade.drop_ratios = 0.0
    assert not cascade.uses_bm25
    assert {r.exit_layer for r in plain} == {0, 3}


def test_ratio_that_would_drop_nothing_is_refused_where_the_last_exit_is_the_only_one(checkpoint):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[3])
    ranker.dtype, ranker.bm25_margin = "fp32", MARGIN
    assert {r.index for r in ranker.rank(QUESTION, CANDIDATES) if r.exit_layer} == {*ENTERS}
    plain = ranker.rank(QUESTION, CANDIDATES, drop_ratios=0.0)
    assert {r.exit_layer for r in plain} == {3}
    message = "drop ratios 0.5 would drop nothing.*its margin of BM25 drops candidates"
    for budget_ms in (None, 60_000):
        with pytest.raises(ConfigError, match=message):
            ranker.rank(QUESTION, CANDIDATES, drop_ratios=0.5, budget_ms=budget_ms)
    with pytest.raises(RequestError, match=message):
        RerankEngine(ranker, Limits()).tokenize(
            RerankRequest(QUESTION, CANDIDATES, "m", drop_ratios=0.5)
        )
    with pytest.raises(ConfigError, match=message):
        ranker.drop_ratios = 0.5
    with pytest.raises(ConfigError, match="neither a number"):
        ranker.rank(QUESTION, CANDIDATES, drop_ratios="0.5")
    assert ranker.bm25_margin == MARGIN


def test_weight_of_the_last_exit_alone_lowers_its_scores(cascade):
    cascade.drop_ratios = 0.0
    assert {r.exit_layer for r in cascade.rank(QUESTION, CANDIDATES)} == {3}
    whole = {r.index: r.score for r in cascade.rank(QUESTION, CANDIDATES)}
    cascade.bm25_weights = (0.0, 1.5)
    ranking = cascade.rank(QUESTION, CANDIDATES)
    gaps = select_by_bm25(QUESTION, CANDIDATES, np.inf).gaps
    logit = {r.index: np.log(r.score / (1 - r.score)) for r in ranking}
    for index, score in whole.items():
        expected = np.log(score / (1 - score)) - 1.5 * gaps[index]
        assert logit[index] == pytest.approx(expected, abs=1e-4)
    cascade.bm25_weights = (2.5,)  # as a checkpoint from before the last exit could have one
    assert cascade.bm25_weights == (2.5, 0.0)


def test_calibration_is_fitted_to_the_scores_that_a_ranking_gives(cascade):
    table = tiny.candidates(12)
    cascade.margins, cascade.bm25_weights = Margins((0.0,)), (30.0,)
    result = cascade.calibrate(table)
    cascade.calibration = ()
    left, labels = [], []
    for start in range(0, len(table), 5):
        part = table[start : start + 5].to_pydict()
        gaps = select_by_bm25(part["question"][0], part["candidate"], np.inf).gaps
        exits = cascade.predict_exits(part["question"], part["candidate"])[:, 0].astype(float)
        left += list(1 / (1 + np.exp(30.0 * gaps) * (1 - exits) / exits))
        labels += part["label"]
    assert result.before[0].brier == pytest.approx(np.mean((np.array(left) - labels) ** 2))


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 3.0), (-1.0,), (float("nan"),)])
def test_weights_that_do_not_fit_the_exits_are_refused(cascade, tmp_path, weights):
    with pytest.raises(ConfigError, match="weights of BM25"):
        cascade.bm25_weights = weights
    if len(weights) == 3:
        saved = save(cascade, tmp_path / "saved")
        config = json.loads((saved / "config.json").read_text())
        config["as2ray"]["bm25_weights"] = weights
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="3 weights of BM25 for 2 exits; give one"):
            load(saved, device="cpu")


def test_without_time_all_candidates_keep_their_order_and_bm25_is_not_asked(cascade, monkeypatch):
    cascade.rank(QUESTION, CANDIDATES, budget_ms=1_000)  # measures the speed
    monkeypatch.setattr(type(cascade), "select_by_bm25", None)  # cannot be called
    ranking = cascade.rank(QUESTION, CANDIDATES, budget_ms=1e-6)
    assert [r.index for r in ranking] == list(range(len(CANDIDATES)))
    assert {(r.exit_layer, r.score) for r in ranking} == {(0, 0.0)}


def test_bm25_is_left_out_where_it_was_measured_to_be_too_slow(cascade):
    cascade.rank(QUESTION, CANDIDATES, budget_ms=1_000)
    assert 0 < cascade.speed.bm25_s < 0.01
    budget_ms = 60_000
    entered = [r for r in cascade.rank(QUESTION, CANDIDATES, budget_ms=budget_ms) if r.exit_layer]
    assert len(entered) == len(ENTERS)
    cascade.speed.bm25_s = 0.6 * budget_ms / 1e3 / len(CANDIDATES)
    every = cascade.rank(QUESTION, CANDIDATES, budget_ms=budget_ms)
    assert all(r.exit_layer for r in every)


def test_budget_is_spent_on_those_that_enter(cascade):
    ranking = cascade.rank(QUESTION, CANDIDATES, budget_ms=60_000)
    expected = cascade.rank(QUESTION, CANDIDATES)
    assert [(r.index, r.exit_layer) for r in ranking] == [(r.index, r.exit_layer) for r in expected]
    every = cascade.rank(QUESTION, CANDIDATES, drop_ratios=0.0, budget_ms=60_000)
    assert {r.exit_layer for r in every} == {3}
