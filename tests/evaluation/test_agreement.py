import numpy as np
import pyarrow as pa
import pytest

from as2ray.errors import EvaluationError
from as2ray.evaluation.agreement import (
    head_teacher_agreement,
    list_vote_cases,
    measure_majority_agreement,
    top_candidates,
)


@pytest.fixture
def table() -> pa.Table:
    """4 questions of 3 candidates; the first two of each answer, but the last's only the first."""
    return pa.table(
        {
            "question_id": [f"q{i // 3}" for i in range(12)],
            "candidate_id": [f"c{i:02}" for i in range(12)],
            "label": pa.array([1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0], pa.int8()),
        }
    )


def choosing(*places: int) -> np.ndarray:
    """Scores that put the candidate at this place of each question first."""
    scores = np.zeros(12)
    for question, place in enumerate(places):
        scores[3 * question + place] = 1.0
    return scores


def test_first_choices_are_the_rows_ranked_first(table):
    rows, right = top_candidates(table, choosing(0, 2, 1, 1))
    assert rows.tolist() == [0, 5, 7, 10]
    assert right.tolist() == [True, False, True, False]


@pytest.mark.filterwarnings("error")
def test_agreement_counts_the_same_right_answer_over_the_heads_right_ones(table):
    heads = {"one": choosing(0, 1, 0, 2), "never": choosing(2, 2, 2, 2)}
    teachers = {"same": choosing(0, 1, 2, 0), "other right one": choosing(1, 1, 1, 0)}
    found = head_teacher_agreement(table, heads, teachers)
    assert found[0] == pytest.approx([2 / 3, 1 / 3])
    assert np.isnan(found[1]).all()


def test_votes_count_questions_by_how_many_teachers_are_right(table):
    teachers = {
        "a": choosing(0, 0, 0, 1),
        "b": choosing(1, 0, 2, 1),
        "c": choosing(0, 2, 2, 1),
    }
    found = measure_majority_agreement(table, choosing(0, 2, 1, 0), teachers)  # right on 0, 2 and 3
    assert found.num_questions == (1, 1, 1, 1)
    assert found.num_right == (1, 1, 0, 1)
    assert found.all_right == (1, 1)
    assert found.majority_right == (0, 1)
    assert found.minority_right == (1, 1)


def test_votes_on_which_all_teachers_are_wrong_are_counted_for_every_number(table):
    teachers = dict.fromkeys("abc", choosing(2, 2, 2, 2))
    counts = measure_majority_agreement(table, choosing(0, 0, 0, 2), teachers)
    assert counts.num_questions == (4, 0, 0, 0)
    assert counts.num_right == (3, 0, 0, 0)
    assert all(type(number) is int for number in counts.num_right)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_one_teacher_and_an_even_number_have_no_majority(table, number):
    teachers = dict.fromkeys("abcd"[:number], choosing(0, 0, 0, 0))
    with pytest.raises(EvaluationError, match=f"{number} teachers"):
        measure_majority_agreement(table, choosing(0, 0, 0, 0), teachers)


def test_vote_cases_have_the_confidence_of_both_sides(table):
    teachers = {
        "a": choosing(0, 0, 2, 1) * 0.6,
        "b": choosing(1, 0, 2, 1) * 0.8,
        "c": choosing(0, 2, 1, 0) * 0.99,
    }
    # All are right on the first; the student follows the majority on the second and overrides it
    # on the others.
    cases = list_vote_cases(table, choosing(0, 1, 0, 0), teachers)
    assert [(c.num_teachers_right, c.student_is_right, c.num_questions) for c in cases] == [
        (3, True, 1),
        (2, True, 1),
        (1, True, 2),
    ]
    assert [c.majority_confidence for c in cases] == pytest.approx([2.39 / 3, 0.7, 0.7])
    assert cases[0].minority_confidence is None
    assert [c.minority_confidence for c in cases[1:]] == pytest.approx([0.99, 0.99])


def test_two_of_five_teachers_are_a_minority_and_none_right_is_no_vote_against(table):
    places = {"a": (0, 2), "b": (0, 2), "c": (2, 2), "d": (2, 2), "e": (2, 2)}
    confidence = {"a": 0.6, "b": 0.7, "c": 0.8, "d": 0.9, "e": 1.0}
    teachers = {t: choosing(*places[t], 0, 0) * confidence[t] for t in places}
    by_number = {c.num_teachers_right: c for c in list_vote_cases(table, choosing(0), teachers)}
    assert list(by_number) == [5, 2, 0]
    assert by_number[2].majority_confidence == pytest.approx(0.9)
    assert by_number[2].minority_confidence == 0.7
    assert by_number[0].majority_confidence == pytest.approx(0.8)
    assert by_number[0].minority_confidence is None
