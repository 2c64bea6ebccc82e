"""Combined scores on made-up questions whose best part is known."""

from dataclasses import replace

import numpy as np
import pytest

from as2ray.errors import CheckpointError
from as2ray.outputs import RankedCandidate
from as2ray.retrieval.answer_fitting import (
    PENALTY,
    _choose,
    _fit_logistic,
    _fit_weights,
    average_precision,
    fit_answer_model,
    fit_answer_scoring,
    fit_max_ranked,
    fit_min_similarity,
    fit_similarity_gap,
)
from as2ray.retrieval.answer_scoring import (
    DEFAULT_WEIGHTS,
    FILE,
    PARTS,
    AnswerModel,
    AnswerScoring,
    answer_features,
    default_scoring,
    logit_of,
    logits_of,
    standardize,
)


def make_questions(number, strength, seed=0, candidates=30, offset=0.6):
    """Questions with one answer each; `strength` is by how much each part favors it."""
    random = np.random.default_rng(seed)
    questions = []
    for _ in range(number):
        labels = np.zeros(candidates, np.int64)
        labels[random.integers(candidates)] = 1
        parts = {n: random.normal(size=candidates) + s * labels for n, s in strength.items()}
        parts["similarity"] = offset + 0.1 * parts["similarity"]
        parts["bm25"] = np.exp(parts["bm25"])
        questions.append((parts, labels))
    return questions


def mean_ap(scoring, questions):
    return np.mean([average_precision(scoring.score(p), y) for p, y in questions])


def test_sum_is_never_worse_than_its_best_part():
    fitted = make_questions(150, {"similarity": 3.0, "bm25": 0.0, "ranker": -1.0})
    scoring = fit_answer_scoring(fitted, 0.5)
    assert scoring.weights == {"similarity": 1.0}
    test = make_questions(300, {"similarity": 3.0, "bm25": 0.0, "ranker": -1.0}, seed=1)
    alone = AnswerScoring({"similarity": 1.0})
    assert mean_ap(scoring, test) == mean_ap(alone, test)
    assert mean_ap(AnswerScoring(dict.fromkeys(PARTS, 1.0)), test) < mean_ap(alone, test) - 0.1


def test_questions_are_divided_by_the_seed():
    questions = make_questions(12, {"similarity": 1.0, "bm25": 1.0}, candidates=6)
    first = fit_answer_scoring(questions, 0.5).dev_quality
    assert first == fit_answer_scoring(questions, 0.5).dev_quality
    others = [fit_answer_scoring(questions, 0.5, seed=seed).dev_quality for seed in (1, 2)]
    assert any(other != first for other in others)


def test_parts_that_know_different_things_are_summed_with_fitted_weights():
    strength = {"similarity": 2.0, "bm25": 1.0, "ranker": 2.0}
    scoring = fit_answer_scoring(make_questions(150, strength), 0.5)
    assert scoring.weights.keys() == strength.keys()
    assert scoring.weights["similarity"] > scoring.weights["bm25"]
    test = make_questions(300, strength, seed=1)
    for name in strength:
        assert mean_ap(scoring, test) > mean_ap(AnswerScoring({name: 1.0}), test) + 0.05
    assert set(scoring.dev_quality) == {
        *("similarity", "bm25", "ranker", "similarity + bm25", "similarity + ranker"),
        *("bm25 + ranker", "similarity + bm25 + ranker"),
    }


def test_ranker_that_adds_little_is_not_asked():
    strength = {"similarity": 3.0, "bm25": 1.0, "ranker": 0.2}
    scoring = fit_answer_scoring(make_questions(150, strength), 0.5)
    assert not scoring.uses_ranker
    assert "the ranker is not asked: it adds " in scoring.describe()
    strength["ranker"] = 3.0
    assert "not asked" not in fit_answer_scoring(make_questions(150, strength), 0.5).describe()


def test_ranker_needs_two_points_of_map_more_than_the_best_without_it():
    quality = {("similarity",): 0.60, ("bm25",): 0.40, ("similarity", "bm25"): 0.65}
    for gain, expected in ((0.0199, ("similarity", "bm25")), (0.0201, ("similarity", "ranker"))):
        with_ranker = {("ranker",): 0.5, ("similarity", "ranker"): 0.65 + gain}
        assert _choose(quality | with_ranker) == expected


def test_quality_of_a_part_is_its_mean_over_all_questions():
    """Parts alone have no weights to fit, so folds make no difference."""
    questions = make_questions(23, {"similarity": 1.0, "bm25": 0.5})
    nothing = ({"similarity": np.zeros(2), "bm25": np.zeros(2)}, np.zeros(2, np.int64))
    scoring = fit_answer_scoring([*questions, nothing], 0.5, encoder="abc", max_similarity_gap=0.3)
    for name in ("similarity", "bm25"):
        expected = np.mean([average_precision(parts[name], labels) for parts, labels in questions])
        assert scoring.dev_quality[name] == pytest.approx(expected)
    assert (scoring.encoder, scoring.max_similarity_gap) == ("abc", 0.3)
    assert fit_answer_scoring([nothing], 0.5).dev_quality["similarity"] == 0.0


def test_written_questions_get_a_bound_halfway_to_others(with_strangers):
    questions, strangers = with_strangers
    own_parts = [parts for parts, _ in questions]
    min_similarity = fit_answer_scoring(questions, 0.5, strangers).min_similarity
    bounds = [
        fit_min_similarity(AnswerScoring({}), own_parts, strangers, is_written=w).min_similarity
        for w in (True, False)
    ]
    assert min_similarity == bounds[0] > bounds[1]
    assert fit_min_similarity(AnswerScoring({}), own_parts, strangers).min_similarity == bounds[1]


def test_gap_is_a_gap_of_a_question_and_none_without_answers():
    questions = make_questions(40, {"similarity": 1.0, "bm25": 0.0})
    gaps = [
        parts["similarity"].max() - parts["similarity"][labels > 0].max()
        for parts, labels in questions
    ]
    assert fit_similarity_gap(questions) in gaps
    assert fit_similarity_gap([(parts, 0 * labels) for parts, labels in questions]) is None


def test_one_candidate_is_ranked_where_it_is_always_the_answer():
    scoring, labels = AnswerScoring({"similarity": 0.1, "ranker": 1.0}), np.array([1, 0, 0])
    parts = {"bm25": np.zeros(3), "ranker": np.array([0.9, 0.0, 0.1])}
    for similarity, number in (([0.9, 0.1, 0.2], 1), ([0.0, 0.5, 0.9], 3)):
        question = {**parts, "similarity": np.array(similarity)}, labels
        assert fit_max_ranked(scoring, [question]) == number


def test_of_equally_good_sums_the_smallest_is_taken():
    quality = {("similarity", "bm25"): 0.6, ("bm25",): 0.5, ("similarity",): 0.6}
    assert _choose(quality) == ("similarity",)


def test_reason_why_a_ranker_is_not_asked_is_told():
    quality = {"similarity": 0.60, "similarity + ranker": 0.61, "answered": 1.0}
    scoring = AnswerScoring({"similarity": 1.0}, dev_quality=quality)
    reason = "the ranker is not asked: it adds +0.0100 MAP, and 0.02 is needed"
    assert scoring.explain_ranker() == reason
    assert reason in scoring.describe()
    unlabeled = default_scoring(None, has_ranker=False)
    assert "only where labeled questions show that it helps" in str(unlabeled.explain_ranker())
    assert default_scoring(None, has_ranker=True).explain_ranker() is None


def test_stage_zero_keeps_the_answers_of_all_but_few_questions():
    strength = {"similarity": 3.0, "bm25": 0.0, "ranker": 3.0}
    scoring = AnswerScoring({}, fit_similarity_gap(make_questions(300, strength)))
    test = make_questions(300, strength, seed=1)
    kept = [scoring.kept_rows(parts) for parts, _ in test]
    assert np.mean([y[rows].any() for rows, (_, y) in zip(kept, test)]) > 0.96
    assert np.mean([len(rows) for rows in kept]) < 0.9 * 30
    assert len(scoring.kept_rows({"bm25": np.ones(4)})) == 4


def test_fewer_candidates_reach_the_ranker_where_others_lose_no_answers():
    strength = {"similarity": 3.0, "bm25": 2.0, "ranker": 2.0}
    scoring = fit_answer_scoring(make_questions(300, strength), 0.5)
    assert scoring.uses_ranker
    assert 1 < scoring.max_ranked < 25
    test = make_questions(300, strength, seed=1)
    quality = [
        np.mean([average_precision(-np.argsort(s.order(p)), y) for p, y in test])
        for s in (scoring, replace(scoring, max_ranked=None))
    ]
    assert quality[0] > quality[1] - 0.03
    parts, _ = test[0]
    rows = scoring.kept_rows(parts)
    cheap = AnswerScoring({k: v for k, v in scoring.weights.items() if k != "ranker"})
    best = np.argsort(-cheap.score(parts))[: scoring.max_ranked]
    assert rows.tolist() == sorted(best.tolist())
    assert f"at most {scoring.max_ranked} candidates" in scoring.describe()
    only_ranker = AnswerScoring({"ranker": 1.0}, max_ranked=5)
    assert len(only_ranker.kept_rows(parts)) == 5
    assert fit_max_ranked(AnswerScoring({"similarity": 1.0}), test) is None


def test_candidates_that_never_reach_the_ranker_follow_by_their_other_scores():
    parts = {
        "bm25": np.zeros(5),
        "similarity": np.array([0.1, 0.4, 0.2, 0.9, 0.8]),
        "ranker": np.array([9.0, 9.0, 9.0, 1.0, 2.0]),
    }
    scoring = AnswerScoring({"similarity": 0.1, "ranker": 1.0}, max_ranked=2)
    assert scoring.order(parts) == [4, 3, 1, 2, 0]


@pytest.fixture
def with_strangers():
    """Questions of which some are easy, and others on another subject."""
    known = make_questions(120, {"similarity": 4.0, "bm25": 1.0}, offset=0.5)
    hard = make_questions(60, {"similarity": 0.5, "bm25": 0.0}, seed=2, offset=0.5)
    strangers = make_questions(100, {"similarity": 0.0, "bm25": 0.0}, seed=3, offset=0.0)
    return [*known, *hard], [parts for parts, _ in strangers]


def test_first_answer_is_given_where_it_is_likely_to_be_right(with_strangers):
    questions, strangers = with_strangers
    scoring = fit_answer_scoring(questions, 0.7, strangers)
    model = scoring.answer_model
    assert model.measures["precision at half coverage"] > 1.4 * model.measures["precision"]
    assert model.measures["ECE"] < 0.1
    assert scoring.dev_quality["answered of other subjects"] <= 0.04

    def answers(parts):
        ranking = scoring.rank(parts)
        is_close = parts["similarity"].max() >= scoring.min_similarity
        return is_close and ranking.probability >= model.threshold

    again = make_questions(120, {"similarity": 4.0, "bm25": 1.0}, seed=5, offset=0.5)
    assert np.mean([answers(parts) for parts, _ in again]) > 0.8
    others = make_questions(100, {"similarity": 0.0, "bm25": 0.0}, seed=6, offset=0.0)
    assert np.mean([answers(parts) for parts, _ in others]) < 0.05


def test_model_learns_from_questions_whose_candidates_are_near_enough():
    questions = make_questions(60, {"similarity": 2.0, "bm25": 1.0})
    best = [parts["similarity"].max() for parts, _ in questions]
    lowest = sorted(best)[20]
    near = [question for question, similarity in zip(questions, best) if similarity >= lowest]
    scoring = AnswerScoring({"similarity": 1.0, "bm25": 0.5})
    expected = fit_answer_model(scoring, near, 0.7)
    names = [
        "precision",
        "precision at half coverage",
        "AURC",
        "ECE",
        "given",
        "precision of given",
    ]
    assert list(expected.measures) == names
    assert expected.measures["given"] >= 0.5
    assert 0.7 <= expected.measures["precision of given"] < 0.8
    assert fit_answer_scoring(near, 0.7) == fit_answer_scoring(near, 0.7, seed=0)
    assert fit_answer_scoring(near, 0.7) != fit_answer_scoring(near, 0.7, seed=1)
    bounded = replace(scoring, min_similarity=lowest)
    nothing = ({"similarity": np.zeros(0), "bm25": np.zeros(0)}, np.zeros(0, np.int64))
    assert fit_answer_model(bounded, [*questions, nothing], 0.7) == expected
    assert fit_answer_model(scoring, questions, 0.7) != expected
    assert fit_answer_model(scoring, near, 0.7, seed=0) == expected
    assert fit_answer_model(scoring, near, 0.7, seed=1) != expected
    words = [({"bm25": parts["bm25"]}, labels) for parts, labels in questions]
    assert fit_answer_model(AnswerScoring({"bm25": 1.0}, min_similarity=9.0), words, 0.7)


def test_features_compare_the_first_candidate_with_others():
    parts = {
        "similarity": np.array([0.5, 0.9, 0.8, 0.7, 0.6, 0.1]),
        "bm25": np.array([8.0, 2.0, 0.0, 0.0, 1.0, 0.0]),
    }
    share, margin, bm25 = answer_features(parts, np.log([1.0, 5.0, 1.0, 1.0, 1.0, 1.0]))
    assert (share, margin, bm25) == pytest.approx((np.log(0.5), 0.9 - 0.7, 2 / 8))
    without_words = {"bm25": np.zeros(1)}
    assert answer_features(without_words, np.array([0.0])).tolist() == [0.0, 0.0, 0.0]


def test_one_division_into_folds_does_not_decide_what_can_be_reached():
    easy = make_questions(40, {"similarity": 2.0, "bm25": 1.0})
    questions = [*easy, *make_questions(30, {"similarity": 0.5, "bm25": 0.0}, seed=2)]
    scoring = AnswerScoring({"similarity": 1.0})
    models = [
        fit_answer_model(scoring, questions, 0.99, seed=seed, high_confidence=True)
        for seed in (0, 1)
    ]
    first, second = (model.measures["reachable precision"] for model in models)
    assert first == second  # 0.85 and 0.82 with a single division


def test_precision_that_no_threshold_reaches_gives_none(with_strangers):
    questions, strangers = with_strangers
    model = fit_answer_scoring(questions, 0.999, strangers, high_confidence=True).answer_model
    assert model.threshold is None
    assert 0.7 < model.measures["reachable precision"] < 0.999


def test_no_model_follows_from_answers_that_are_all_right():
    questions = make_questions(40, {"similarity": 90.0, "bm25": 0.0})
    assert fit_answer_scoring(questions, 0.5).answer_model is None


def test_standardized_scores_of_equal_candidates_are_zero():
    assert standardize(np.full(3, 7.0)).tolist() == [0.0, 0.0, 0.0]
    assert AnswerScoring({"ranker": 1.0}).score({"ranker": np.array([1.0])}).tolist() == [0.0]


def test_ties_are_broken_against_the_system():
    assert average_precision(np.zeros(4), np.array([1, 0, 0, 0])) == 0.25


def test_average_precision_is_the_mean_precision_at_each_answer():
    scores, labels = np.array([1.0, 3.0, 2.0, 0.5]), np.array([1, 1, 0, 0])
    assert average_precision(scores, labels) == pytest.approx((1 / 1 + 2 / 3) / 2)


MODEL = AnswerModel((1.0, 2.0, 3.0), -0.5, 0.25, {"precision": 0.5, "ECE": 0.125})


def test_description_tells_the_sum_its_quality_and_why_there_is_no_threshold():
    scoring = AnswerScoring(
        {"similarity": 1.23456, "ranker": 2.0},
        max_ranked=7,
        dev_quality={"similarity": 0.5, "answered": 1.0},
        answer_model=MODEL,
    )
    lines = [
        "score: 1.23 similarity + 2 ranker",
        "at most 7 candidates reach the ranker",
        "on dev: similarity 0.5000, answered 1.0000",
        "precision 0.5000, ECE 0.1250",
    ]
    assert scoring.describe().splitlines() == lines
    unsure = replace(scoring, answer_model=replace(MODEL, threshold=None))
    why = "no threshold reaches min_precision, so none was stored"
    assert unsure.describe().splitlines() == [*lines, why]
    plain = AnswerScoring({"bm25": 1.0}, dev_quality={"bm25": 0.5})
    _, quality, reason, why = plain.describe().splitlines()
    assert (quality, reason) == ("on dev: bm25 0.5000", "there is no ranker")
    assert why.startswith("no threshold was fitted, which needs right and wrong first answers")


def test_scoring_is_read_as_it_was_written_and_damaged_files_are_refused(tmp_path):
    assert AnswerScoring.read(tmp_path) is None
    scoring = AnswerScoring({"bm25": 0.5}, 0.25, 9, 0.125, {"bm25": 0.5}, MODEL, "0123")
    scoring.write(tmp_path)
    assert AnswerScoring.read(tmp_path) == scoring
    replace(scoring, answer_model=replace(MODEL, coefficients=(1.0,))).write(tmp_path)
    with pytest.raises(CheckpointError, match="has 1 coefficients for the features share, margin"):
        AnswerScoring.read(tmp_path)
    (tmp_path / FILE).write_text('{"weights": {"bm25": -1}}')
    with pytest.raises(CheckpointError, match=r"is damaged: .*bm25"):
        AnswerScoring.read(tmp_path)


def test_kept_are_the_most_similar_and_of_those_the_best_without_the_ranker():
    parts = {
        "similarity": np.array([0.5, 0.75, 1.0, 0.25]),
        "bm25": np.array([9.0, 0.0, 0.0, 9.0]),
    }
    weights = {"similarity": 0.001, "bm25": 1.0, "ranker": 5.0}
    assert AnswerScoring(weights, 0.5).kept_rows(parts).tolist() == [0, 1, 2]
    assert AnswerScoring(weights, 0.5, 2).kept_rows(parts).tolist() == [0, 2]
    assert AnswerScoring(weights, None, 2).kept_rows(parts).tolist() == [0, 3]
    assert AnswerScoring(weights, 0.5, 3).kept_rows(parts).tolist() == [0, 1, 2]
    empty = {name: np.zeros(0) for name in parts}
    assert len(AnswerScoring(weights, 0.5, 2).kept_rows(empty)) == 0


def test_ranking_has_shares_layers_and_the_scores_of_the_ranker_for_those_it_was_given():
    parts = {"bm25": np.zeros(4), "similarity": np.array([0.9, 0.1, 0.8, 0.7])}
    weights = {"similarity": 1.0, "ranker": 2.0}
    scoring = AnswerScoring(weights, max_similarity_gap=0.3, answer_model=MODEL)
    ranking = [
        RankedCandidate(index, score, "", layer)
        for index, score, layer in ((1, 0.75, 4), (0, 0.5, 4), (2, 0.25, 2))
    ]
    combined = scoring.rank(parts, ranking)
    kept = {
        "similarity": parts["similarity"][[0, 2, 3]],
        "ranker": np.log([1.0, 3.0, 1 / 3]),
        "bm25": np.zeros(3),
    }
    sums = standardize(kept["similarity"]) + 2 * standardize(kept["ranker"])
    shares = np.exp(sums) / np.exp(sums).sum()
    assert combined.rows == [2, 0, 3, 1]
    np.testing.assert_allclose(combined.scores, [shares[0], 0.0, shares[1], shares[2]])
    assert combined.exit_layers == [4, 0, 4, 2]
    np.testing.assert_array_equal(combined.ranker_scores, [0.5, np.nan, 0.75, 0.25])
    features = answer_features(kept, sums)
    assert combined.probability == pytest.approx(float(MODEL.probability(features)))
    alone = replace(scoring, weights={"ranker": 1.0}).rank(parts, ranking)
    assert alone.scores.tolist() == [0.5, 0.0, 0.75, 0.25]


@pytest.mark.parametrize(("is_logit", "lowest"), [(False, 0.0), (True, -3.0)])
def test_ranker_alone_gives_a_score_to_those_too_that_never_reached_it(is_logit, lowest):
    scoring = AnswerScoring({"ranker": 1.0}, max_ranked=2)
    parts = {"bm25": np.array([1.0, 4.0, 2.0, 3.0])}
    scores = {1: 2.0, 0: -3.0} if is_logit else {1: 0.9, 0: 0.25}
    ranking = [RankedCandidate(i, s, "", None, is_logit) for i, s in scores.items()]
    combined = scoring.rank(parts, ranking)
    assert combined.rows == [3, 1, 2, 0]
    assert combined.scores.tolist() == [lowest, scores[0], lowest, scores[1]]
    assert np.isnan(combined.ranker_scores).tolist() == [True, False, True, False]


def test_logits_of_a_ranking_never_rise_though_the_dropped_scored_higher():
    ranking = [RankedCandidate(i, score, "") for i, score in ((2, 0.5), (0, 0.75), (1, 0.25))]
    np.testing.assert_allclose(logits_of(ranking), [0.0, np.log(1 / 3), 0.0], atol=1e-12)
    ranking = [replace(one, is_logit=True) for one in ranking]
    assert logits_of(ranking).tolist() == [0.5, 0.25, 0.5]
    assert logit_of(np.array([0.0, 1.0])) == pytest.approx([-13.8155, 13.8155], abs=1e-3)


def test_without_labels_all_parts_have_the_default_weights():
    scoring = default_scoring("0123", has_ranker=True)
    assert scoring == AnswerScoring(DEFAULT_WEIGHTS, encoder="0123")
    assert [*default_scoring(None, has_ranker=False).weights] == ["similarity", "bm25"]


def test_bound_of_the_subject_is_halfway_between_written_questions_and_others():
    own, others = (
        [{"similarity": np.array([x])} for x in values] for values in ([0.6, 0.8], [0.1, 0.2])
    )
    bounds = [
        fit_min_similarity(AnswerScoring({}), own, others, is_written=is_written).min_similarity
        for is_written in (False, True)
    ]
    assert bounds == pytest.approx([0.197, (0.197 + 0.6) / 2])


def test_few_questions_are_all_near_enough():
    own, others = (
        [{"similarity": np.array([x])} for x in values] for values in ([0.4, 0.8], [0.9])
    )
    scoring = fit_min_similarity(AnswerScoring({}), own, others)
    assert (scoring.min_similarity, scoring.dev_quality["answered"]) == (0.4, 1.0)


def test_fitted_weights_maximize_the_probability_of_the_answers():
    from scipy.optimize import minimize

    questions = make_questions(60, {"similarity": 1.0, "bm25": 0.3})

    def loss(weights):
        terms = []
        for parts, labels in questions:
            x = np.stack([standardize(parts[name]) for name in ("similarity", "bm25")], 1)
            probabilities = np.exp(x @ weights) / np.exp(x @ weights).sum()
            terms.append(-np.log(probabilities[labels > 0].sum()))
        return np.mean(terms) + 1e-3 * (weights @ weights)

    expected = minimize(loss, np.ones(2), method="Nelder-Mead", options={"xatol": 1e-6}).x
    fitted = _fit_weights(questions, ("similarity", "bm25"))
    assert list(fitted.values()) == pytest.approx(expected.tolist(), abs=1e-3)


def test_fitted_coefficients_maximize_the_probability_of_right_answers():
    from scipy.optimize import minimize

    random = np.random.default_rng(0)
    x = random.normal(size=(80, 2)) * (2.0, 0.5) + (3.0, -1.0)
    y = x @ (1.0, 2.0) - 1.0 + random.normal(size=80) > 0
    spread, signs = x.std(0), np.where(y, 1.0, -1.0)

    def loss(model):
        *coefficients, intercept = model
        chances = np.log1p(np.exp(-signs * (x @ coefficients + intercept)))
        return chances.sum() + PENALTY / 2 * np.square(coefficients * spread).sum()

    settings = {"xatol": 1e-7, "fatol": 1e-9}
    expected = minimize(loss, np.zeros(3), method="Nelder-Mead", options=settings).x
    fitted = _fit_logistic(x, y)
    assert [*fitted.coefficients, fitted.intercept] == pytest.approx(expected.tolist(), abs=1e-3)
