import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import pytrec_eval
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import AP, RR, P, nDCG

from as2ray.checkpoints.loading import load
from as2ray.errors import ConfigError, EvaluationError
from as2ray.evaluation.measures import evaluate, mean_average_precision, validation_measures
from as2ray.evaluation.presets import PAPER_PRESETS, parse_measure
from as2ray.tables.filters import filter_mask
from as2ray.tables.fingerprint import fingerprint

DATA = Path(os.environ.get("AS2RAY_DATA", Path(__file__).parents[3] / "shared" / "data"))


def naive(labels: list[int], scores: list[float]) -> tuple[float, float]:
    """AP and RR of one question by the definition, ties against the system."""
    ranked = [label for _, label in sorted(zip(scores, labels), key=lambda r: (-r[0], r[1]))]
    at_hits = [sum(ranked[: i + 1]) / (i + 1) for i, label in enumerate(ranked) if label]
    first = ranked.index(1) + 1 if 1 in ranked else np.inf
    return (sum(at_hits) / len(at_hits) if at_hits else 0.0), 1 / first


def test_ranker_is_evaluated_by_the_scores_that_it_gives(checkpoint):
    table = tiny.candidates(12)
    ranker = load(checkpoint("bert", 2, initializer_range=0.3), dtype="fp32", device="cpu")
    measures = evaluate(table, ranker, ["AP", "RR"]).measures
    scores = ranker.predict_table(table).sort_keys
    assert measures == evaluate(table, scores, ["AP", "RR"]).measures
    assert measures != evaluate(table, -scores, ["AP", "RR"]).measures


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray]:
    labels = draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6)
    )
    rows = sum(map(len, labels))
    scores = draw(st.lists(st.integers(-3, 3), min_size=rows, max_size=rows))
    return labels, np.array(scores, np.float64)


def test_measures_of_known_ranking_equal_hand_computation(make_table):
    table = make_table([[0, 1, 1], [1, 0]])
    result = evaluate(table, [0.9, 0.8, 0.1, 0.3, 0.7], [AP, RR, P @ 1, nDCG @ 10])
    discounted = 1 / np.log2(3) + 1 / np.log2(4)
    ideal = 1 + 1 / np.log2(3)
    assert result.measures["AP"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1 / 2) / 2, abs=1e-15)
    assert result.measures["RR"] == 0.5
    assert result.measures["P@1"] == 0.0
    assert result.measures["nDCG@10"] == pytest.approx(
        (discounted / ideal + 1 / np.log2(3)) / 2, abs=1e-12
    )
    assert result.per_question["question_id"].to_pylist() == ["q0", "q1"]
    assert result.per_question["RR"].to_pylist() == [0.5, 0.5]


def test_constant_scorer_on_positives_first_gets_the_worst_of_its_ties(make_table):
    table = make_table([[1, 0, 0, 0], [1, 1, 0, 0]])
    result = evaluate(table, np.zeros(8), [AP, RR])
    assert result.measures["AP"] == pytest.approx((1 / 4 + (1 / 3 + 2 / 4) / 2) / 2, abs=1e-15)
    assert result.measures["RR"] == pytest.approx((1 / 4 + 1 / 3) / 2, abs=1e-15)


def test_ties_policies_order_the_same_scores_differently(make_table):
    table = make_table([[0, 1, 0]])
    by_policy = {
        ties: evaluate(table, np.zeros(3), [RR], ties=ties).measures["RR"]
        for ties in ("pessimistic", "by_id", "optimistic")
    }
    assert by_policy == pytest.approx({"pessimistic": 1 / 3, "by_id": 1 / 2, "optimistic": 1.0})


def test_filters_drop_the_questions_they_name(make_table):
    table = make_table([[0, 0], [1, 1], [1, 0]])
    scores = np.array([2.0, 1, 2, 1, 1, 2])
    for name, questions, mean in [
        ("raw", 3, (0 + 1 + 0.5) / 3),
        ("no_all_negative", 2, 0.75),
        ("clean", 1, 0.5),
    ]:
        result = evaluate(table, scores, [AP], question_filter=name)
        assert (result.counts.num_questions, result.measures["AP"]) == (questions, mean)
        assert filter_mask(table, name).sum() == questions * 2


def test_grades_count_as_relevance_only_when_asked(make_table):
    table = make_table([[1, 0, 0]], grades=[[3, 1, 2]])
    scores = [1.0, 3.0, 2.0]
    on_label = evaluate(table, scores, ["AP"]).measures
    on_grade = evaluate(table, scores, ["AP", "AP(rel=2)", "nDCG@10"], relevance="grade").measures
    assert on_label == pytest.approx({"AP": 1 / 3})
    assert on_grade["AP"] == pytest.approx(1.0)
    assert on_grade["AP(rel=2)"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    gained = 1 + 2 / np.log2(3) + 3 / 2
    assert on_grade["nDCG@10"] == pytest.approx(gained / (3 + 2 / np.log2(3) + 1 / 2), abs=1e-12)


def test_measures_of_grades_are_refused_for_labels(make_table):
    table = make_table([[1, 0, 0]], grades=[[3, 1, 2]])
    for measure in ("AP(rel=2)", AP(rel=2), "P(rel=3)@1"):
        with pytest.raises(EvaluationError, match="--relevance grade"):
            evaluate(table, [1.0, 3.0, 2.0], ["AP", measure])
    assert evaluate(table, [1.0, 3.0, 2.0], ["AP(rel=1)"]).measures == {"AP": 1 / 3}


@pytest.mark.parametrize("measures", [None, "AP", AP])
def test_what_is_no_list_of_measures_is_refused(measures, make_table):
    with pytest.raises(ConfigError, match=r"must be a list such as .*, not "):
        evaluate(make_table([[1, 0]]), [1.0, 0.0], measures)


def test_cut_reciprocal_rank_stops_at_its_cutoff(make_table):
    table = make_table([[0, 0, 1]])
    measures = evaluate(table, [3.0, 2.0, 1.0], ["RR@2", "RR@3"]).measures
    assert measures == pytest.approx({"RR@2": 0.0, "RR@3": 1 / 3})


def test_presets_evaluate_as_their_papers(make_table):
    table = make_table([[0, 0], [1, 1], [1, 0]])
    scores = np.arange(6.0)
    sizes = {
        name: evaluate(table, scores, **preset._asdict()).counts.num_questions
        for name, preset in PAPER_PRESETS.items()
    }
    assert sizes == {"tanda": 1, "cascade": 2, "cerberus": 2, "pseudo_labels": 3}


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([1.0], r"shape \[1\]"),
        ([[1.0, 2.0]], r"shape \[1, 2\]"),
        ([1.0, np.nan], "1 of 2 scores are not finite, first row 1: nan"),
        ([-np.inf, np.inf], "2 of 2 scores"),
        ("out/ranker", r"numbers, one per row, not 'out/ranker'(.|\n)*as2ray\.load"),
        (["1", "2"], r"not \['1', '2'\]"),
        ([1j, 2], "scores must be numbers"),
    ],
)
def test_scores_that_do_not_fit_are_refused_with_numbers(make_table, scores, said):
    with pytest.raises(EvaluationError, match=said):
        evaluate(make_table([[0, 1]]), scores)


@pytest.mark.parametrize("name", ["FOO", "P", "P@0", "AP(foo=1)", "AP@", "RBP", 3])
def test_unknown_measure_is_refused_by_name(name):
    with pytest.raises(EvaluationError, match="measure"):
        parse_measure(name)


def test_wrong_options_are_refused(make_table):
    table, scores = make_table([[0, 0]]), [1.0, 2.0]
    with pytest.raises(EvaluationError, match="no question left of 1 questions / 2 pairs"):
        evaluate(table, scores, question_filter="clean")
    with pytest.raises(ConfigError, match=r"Arrow table, not str(.|\n)*as2ray\.load_table"):
        evaluate("test.csv", scores)
    with pytest.raises(ConfigError, match=r"'label'\] lacks \['candidate_id'\]"):
        evaluate(table.select(["question_id", "label"]), scores)
    with pytest.raises(EvaluationError, match="no measures"):
        evaluate(table, scores, [])
    with pytest.raises(ConfigError, match="filter 'all'"):
        evaluate(table, scores, question_filter="all")
    with pytest.raises(ConfigError, match="ties 'lucky'"):
        evaluate(table, scores, ties="lucky")
    with pytest.raises(EvaluationError, match="no column 'grade'"):
        evaluate(table, scores, relevance="grade")
    with pytest.raises(EvaluationError, match="0 question"):
        evaluate(table.slice(0, 0), [])
    with pytest.raises(EvaluationError, match="0 question ids"):
        mean_average_precision([], [], [])
    with pytest.raises(EvaluationError, match="1 question ids and 2 labels"):
        mean_average_precision(["q"], [0, 1], [1.0, 2.0])


@settings(max_examples=60)
@given(scored())
def test_ap_and_rr_equal_naive_oracle_and_quick_metric(make_table, case):
    labels, scores = case
    table = make_table(labels)
    ends = np.cumsum([len(of_question) for of_question in labels])[:-1]
    expected = [naive(ls, s.tolist()) for ls, s in zip(labels, np.split(scores, ends))]
    result = evaluate(table, scores, [AP, RR, "P@1", "nDCG@10"])
    quick = validation_measures(table["question_id"], table["label"], scores)
    np.testing.assert_allclose(
        [result.per_question["AP"], result.per_question["RR"]], list(zip(*expected)), atol=1e-12
    )
    assert quick == pytest.approx(result.measures, abs=1e-12)


@settings(max_examples=40)
@given(scored(), st.randoms(use_true_random=False), st.sampled_from(["pessimistic", "by_id"]))
def test_measures_do_not_depend_on_order_of_rows(make_table, case, random, ties):
    labels, scores = case
    table, order = make_table(labels), list(range(len(scores)))
    random.shuffle(order)
    shuffled = table.take(pa.array(order))
    straight = evaluate(table, scores, ["AP", "RR", "P@1", "nDCG@3"], ties=ties)
    mixed = evaluate(shuffled, scores[order], ["AP", "RR", "P@1", "nDCG@3"], ties=ties)
    assert mixed.per_question.sort_by("question_id") == straight.per_question.sort_by("question_id")
    columns = [shuffled[name] for name in ("question_id", "label")]
    quick = mean_average_precision(*columns, scores[order], shuffled["candidate_id"], ties=ties)
    assert quick == pytest.approx(straight.measures["AP"], abs=1e-12)


def test_quick_metric_orders_equal_scores_by_id_if_asked():
    columns = ["q"] * 3, [0, 1, 0], [0.0] * 3, ["b", "c", "a"]
    assert validation_measures(*columns, ties="by_id")["RR"] == pytest.approx(1 / 3)
    assert validation_measures(*columns, ties="optimistic")["RR"] == 1.0


@pytest.mark.filterwarnings("error")
def test_quick_measures_of_questions_with_no_positive_and_with_many():
    labels = [0, 0, *[1] * 12]
    ids = ["none"] * 2 + ["many"] * 12
    measures = validation_measures(ids, labels, np.arange(14.0))
    assert measures == {"AP": 0.5, "RR": 0.5, "P@1": 0.5, "nDCG@10": pytest.approx(0.5)}


@settings(max_examples=40)
@given(scored())
def test_measures_do_not_depend_on_monotone_transform(make_table, case):
    labels, scores = case
    table = make_table(labels)
    assert evaluate(table, scores).per_question == evaluate(table, np.exp(scores)).per_question


def test_measures_without_ties_equal_pytrec_eval(make_table):
    random = np.random.default_rng(0)
    labels = [random.integers(0, 2, random.integers(1, 30)).tolist() for _ in range(40)]
    table = make_table(labels)
    scores = random.permutation(table.num_rows).astype(np.float64)
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for row, score in zip(table.to_pylist(), scores.tolist()):
        qrels.setdefault(row["question_id"], {})[row["candidate_id"]] = row["label"]
        run.setdefault(row["question_id"], {})[row["candidate_id"]] = score
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank", "P_5", "ndcg_cut_10"})
    expected = theirs.evaluate(run)
    ours = evaluate(table, scores, ["AP", "RR", "P@5", "nDCG@10"])
    for row in ours.per_question.to_pylist():
        of_question = expected[row["question_id"]]
        assert row["AP"] == of_question["map"]
        assert row["RR"] == of_question["recip_rank"]
        assert row["P@5"] == of_question["P_5"]
        assert row["nDCG@10"] == of_question["ndcg_cut_10"]


def test_quick_measures_of_long_lists_equal_those_by_ir_measures(make_table):
    random = np.random.default_rng(1)
    labels = [random.integers(0, 2, random.integers(8, 16)).tolist() for _ in range(20)]
    table = make_table([*labels, [0] * 9 + [1, 1]])
    scores = np.concatenate([random.random(sum(map(len, labels))), -np.arange(11.0)])
    expected = evaluate(table, scores, ["AP", "RR", "P@1", "nDCG@10"]).measures
    columns = table["question_id"], table["label"], scores
    assert validation_measures(*columns) == pytest.approx(expected, abs=1e-12)


def test_result_shows_its_means_questions_and_filter(make_table):
    result = evaluate(make_table([[1, 0], [0, 0]]), [1.0, 0.0, 1.0, 0.0], [AP])
    assert repr(result) == "AP 0.5000: 2 questions (raw), ties pessimistic"
    both = evaluate(make_table([[1, 0]], grades=[[0, 3]]), [1.0, 0.0], [AP, RR], relevance="grade")
    assert repr(both).startswith("AP 0.5000, RR 0.5000: 1 questions")
    assert both.relevance == "grade"
    assert both._repr_html_().count("</tr><tr>") == 2
    html = result._repr_html_()
    assert html.startswith("<table><tr><th>measure</th><th>mean</th>")
    assert "<td>AP</td><td>0.5000</td><td><svg" in html
    assert html.endswith("<p>2 questions / 4 pairs / 1 positives (raw)</p>")


def test_quick_metric_takes_numbers_as_ids():
    assert mean_average_precision([7, 7, 3], [0, 1, 1], np.float32([1, 2, 0])) == 1.0


def test_constant_scorer_on_trecqa_is_far_below_one(make_table):
    path = DATA / "trecqa" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"no real data at {path}: set AS2RAY_DATA")
    labels = [
        [candidate["label"] for candidate in json.loads(line)["candidates"]]
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    table = make_table(labels)
    constant = np.zeros(table.num_rows)
    result = evaluate(table, constant, **PAPER_PRESETS["tanda"]._asdict())
    assert str(result.counts) == "68 questions / 1,442 pairs / 248 positives"
    assert result.measures["AP"] == pytest.approx(0.2074, abs=1e-4)
    assert (
        evaluate(table, constant, [AP], question_filter="clean", ties="optimistic").measures["AP"]
        == 1.0
    )


def test_equal_scores_are_ordered_by_the_relevance_that_is_measured(make_table):
    table = make_table([[1, 0]], grades=[[0, 3]])
    assert evaluate(table, [0.0, 0.0], [RR], relevance="grade").measures["RR"] == 0.5


def test_fingerprint_is_of_the_table_before_the_filter(make_table):
    table = make_table([[1, 0], [0]])
    results = [evaluate(table, [0.0] * 3, question_filter=name) for name in ("raw", "clean")]
    assert results[0].counts != results[1].counts
    assert {result.fingerprint for result in results} == {fingerprint(table)}
