from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.errors import EvaluationError
from as2ray.evaluation.supporting_facts import consistency_gap, measure_facts, normalize_answer


class Known(NamedTuple):
    facts: tuple
    answer: str = "x"


def one(known, found, **how) -> dict[str, float]:
    """The measures of one question."""
    how = {name: {"q": value} for name, value in how.items()}
    row = measure_facts({"q": known}, {"q": found}, **how).to_pylist()[0]
    return {name: value for name, value in row.items() if name != "question_id"}


def test_facts_of_a_known_prediction_equal_the_hand_computation():
    found = one(Known((("A", 0), ("B", 1))), [("A", 0), ("A", 2), ("B", 0)])
    assert found["SP precision"] == pytest.approx(1 / 3)
    assert found["SP recall"] == pytest.approx(1 / 2)
    assert found["SP F1"] == pytest.approx(0.4)
    assert (found["SP EM"], found["passage EM"]) == (0.0, 1.0)


def test_duplicate_facts_and_colliding_titles_fall_together():
    found = one(Known((("A", 0), ("A", 0), ("B", 1))), [("B", 1), ("A", 0), ("A", 0)])
    assert (found["SP F1"], found["SP EM"], found["passage EM"]) == (1.0, 1.0, 1.0)


def test_question_without_a_prediction_counts_as_missed():
    gold = {"q": Known((("A", 0),)), "r": Known((("B", 0),), "yes")}
    table = measure_facts(gold, {"q": [("A", 0)]}, answers={"q": "x"})
    for name in table.column_names[1:]:
        assert table[name].to_pylist() == [1.0, 0.0], name


def test_no_predicted_fact_has_no_precision():
    found = one(Known((("A", 0),)), [])
    assert set(found.values()) == {0.0}


def test_passages_may_be_predicted_beside_the_facts():
    known = Known((("A", 0), ("B", 0)))
    assert one(known, [("A", 0)])["passage EM"] == 0.0
    assert one(known, [("A", 0)], titles=["B", "A"])["passage EM"] == 1.0
    assert one(known, [("A", 0)], titles=["B", "A", "C"])["passage EM"] == 0.0
    gold = {"q": known, "r": known}
    table = measure_facts(gold, {"r": [("A", 0), ("B", 0)]}, titles={"q": ["A", "B"]})
    assert table["passage EM"].to_pylist() == [1.0, 0.0]  # without an entry none is predicted


@pytest.mark.parametrize(
    ("found", "known", "f1", "em"),
    [
        ("The Zoo!", "zoo", 1.0, 1.0),
        ("a big zoo", "zoo", 2 / 3, 0.0),
        ("zoo zoo", "zoo", 2 / 3, 0.0),
        ("yes", "no", 0.0, 0.0),
        ("yes sir", "yes", 0.0, 0.0),
        ("yes", "yes sir", 0.0, 0.0),
        ("no", "no", 1.0, 1.0),
        ("noanswer", "noanswer given", 0.0, 0.0),
        ("zoo", "the", 0.0, 0.0),
    ],
)
def test_answers_are_measured_as_squad_s_are(found, known, f1, em):
    row = one(Known((("A", 0),), known), [("A", 0)], answers=found)
    assert row["F1"] == pytest.approx(f1)
    assert row["EM"] == em
    assert row["joint F1"] == pytest.approx(f1)
    assert (row["recall"] > 0) == (row["precision"] > 0) == (f1 > 0)
    assert row["SP F1"] == row["passage EM"] == 1.0


def test_joint_multiplies_precision_and_recall_apart():
    known = Known((("A", 0), ("B", 0)), "red zoo")
    row = one(known, [("A", 0)], answers="red")
    assert row["joint precision"] == pytest.approx(1.0)
    assert row["joint recall"] == pytest.approx(0.25)
    assert row["joint F1"] == pytest.approx(0.4)
    assert row["joint EM"] == 0.0


@pytest.mark.parametrize("answer", ["zoo", "red"])
@pytest.mark.parametrize("fact", [("A", 0), ("A", 1)])
def test_joint_exact_match_needs_the_answer_and_the_facts(answer, fact):
    row = one(Known((("A", 0),), "zoo"), [fact], answers=answer)
    assert row["joint EM"] == (answer == "zoo" and fact == ("A", 0))


facts = st.sets(st.tuples(st.sampled_from("AB"), st.integers(0, 2)))


@given(facts.filter(bool), facts)
def test_facts_measure_sets_as_sets(known, found):
    row = one(Known(tuple(known)), found)
    same = len(known & found)
    assert row["SP precision"] == pytest.approx(same / len(found) if found else 0.0)
    assert row["SP recall"] == pytest.approx(same / len(known))
    assert row["SP EM"] == float(known == found)


def test_prediction_of_an_unknown_question_is_refused():
    with pytest.raises(
        EvaluationError, match="1 predictions for questions that are not among the 1 annotated"
    ):
        measure_facts({"q": Known(())}, {"other": []})


def test_normalise_and_gap():
    assert normalize_answer("  An  apple, the Pear. ") == "apple pear"
    assert consistency_gap(np.array([1.0, -1.0]), np.array([0.5, 0.0])) == 0.75
