import numpy as np
import pytest

from as2ray.errors import ConfigError, EvaluationError
from as2ray.tables.ranking_order import (
    ranking_order,
    read_relevance,
    table_ranking_order,
    validate_scores,
)


@pytest.mark.parametrize(
    ("ties", "order"),
    [
        ("pessimistic", [4, 1, 2, 0, 3, 5]),
        ("optimistic", [4, 2, 0, 1, 3, 5]),
        ("by_id", [4, 2, 1, 0, 3, 5]),
    ],
)
def test_rows_are_ordered_by_question_score_ties_and_id(ties, order):
    question = np.array([0, 0, 0, 1, 0, 1])
    score = np.array([0.5, 0.5, 0.5, 0.9, 0.6, 0.1])
    relevance = np.array([1, 0, 1, 0, 1, 1], np.int8)
    candidate_rank = np.array([3, 2, 1, 4, 5, 6])
    assert ranking_order(question, score, relevance, candidate_rank, ties).tolist() == order
    if ties == "pessimistic":
        assert ranking_order(question, score, relevance, candidate_rank).tolist() == order
    # Without ids the order of the rows.
    rows = ranking_order(question, score, np.zeros(6, np.int8), ties=ties)
    assert rows.tolist() == [4, 0, 1, 2, 3, 5]


def test_unknown_order_of_ties_is_refused():
    with pytest.raises(ConfigError, match="order of ties 'lucky'"):
        ranking_order(np.zeros(1, int), np.zeros(1), np.zeros(1, int), ties="lucky")


def test_rows_of_a_table_are_ordered_by_its_relevance_and_ids(make_table):
    table = make_table([[1, 0, 0], [0, 1]], grades=[[1, 3, 2], [1, 1]])
    scores = np.zeros(5)
    assert table_ranking_order(table, scores).tolist() == [1, 2, 0, 3, 4]
    assert table_ranking_order(table, scores, "optimistic").tolist() == [0, 1, 2, 4, 3]
    by_grade = table_ranking_order(table, scores, relevance="grade")
    assert by_grade.tolist() == [0, 2, 1, 3, 4]
    backwards = table.take([2, 1, 0, 4, 3])
    assert table_ranking_order(backwards, scores, "by_id").tolist() == [2, 1, 0, 4, 3]


def test_relevance_is_read_of_a_column_that_is_there(make_table):
    assert read_relevance(make_table([[1, 0]]), "label").tolist() == [1, 0]
    with pytest.raises(EvaluationError, match="no column 'grade'"):
        read_relevance(make_table([[1, 0]]), "grade")


def test_scores_are_one_finite_number_of_each_row():
    assert validate_scores([1, 2], 2).dtype == np.float64
    for scores, problem in (
        ([1.0], r"shape \[1\]; a table of 2 rows"),
        ([[1.0, 2.0]], r"shape \[1, 2\]"),
        ([1.0, np.nan], "1 of 2 scores are not finite, first row 1: nan"),
        ([-np.inf, np.inf], "2 of 2 scores are not finite, first row 0: -inf"),
    ):
        with pytest.raises(EvaluationError, match=problem):
            validate_scores(scores, 2)
