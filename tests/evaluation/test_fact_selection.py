import numpy as np
import pyarrow as pa
import pytest

from as2ray.evaluation.fact_selection import FactSelectionConfig, max_sentence_score, select_facts
from as2ray.tables.schema import CANDIDATE_SCHEMA, OPTIONAL_COLUMNS, group_by_passage

# question, passage, title, number in it; the second sentence of passage B was blank.
ROWS = [
    ("q1", "A", "Ann", 0),
    ("q1", "A", "Ann", 1),
    ("q1", "B", "Bob", 0),
    ("q1", "B", "Bob", 2),
    ("q1", "C", "Cid", 0),
    ("q2", "A", "Ann", 0),
]
PASSAGE = np.array([0.2, 0.9, -0.5, -0.1])
SENTENCE = np.array([0.7, -0.3, -0.2, 0.1, 0.8, -0.6])


@pytest.fixture
def passages():
    made = [
        {
            "question_id": question,
            "question": f"{question}?",
            "candidate_id": f"{question}-{passage}-{number}",
            "candidate": f"{title} {number}.",
            "label": int(number == 0),
            "passage_id": passage,
            "title": title,
            "sentence_index": number,
            "passage_label": 1,
        }
        for question, passage, title, number in ROWS
    ]
    return group_by_passage(
        pa.Table.from_pylist(made, pa.schema([*CANDIDATE_SCHEMA, *OPTIONAL_COLUMNS]))
    )


def test_joint_takes_the_best_passages_and_their_sentences_above_the_threshold(passages):
    found = select_facts(passages, PASSAGE, SENTENCE)
    assert found.titles == {"q1": ["Bob", "Ann"], "q2": ["Ann"]}
    assert found.facts == {"q1": [("Bob", 2), ("Ann", 0)], "q2": []}
    assert select_facts(passages, PASSAGE, SENTENCE, FactSelectionConfig(top_k_passages=1)).titles[
        "q1"
    ] == ["Bob"]
    stricter = select_facts(passages, PASSAGE, SENTENCE, FactSelectionConfig(threshold=0.5))
    assert stricter.facts["q1"] == [("Ann", 0)]
    strict = select_facts(passages, PASSAGE, SENTENCE, FactSelectionConfig(threshold=0.7))
    assert strict.facts["q1"] == []


def test_sentences_alone_take_the_passages_of_the_best_sentences(passages):
    found = select_facts(
        passages, max_sentence_score(passages, SENTENCE), SENTENCE, FactSelectionConfig("sentences")
    )
    assert found.titles["q1"] == ["Cid", "Ann"]
    assert found.facts["q1"] == [("Cid", 0), ("Ann", 0)]


def test_passages_alone_take_the_first_sentence_of_the_best(passages):
    found = select_facts(passages, PASSAGE, SENTENCE, FactSelectionConfig("passages"))
    assert found.facts == {"q1": [("Bob", 0), ("Ann", 0)], "q2": [("Ann", 0)]}


def test_fallback_takes_the_best_sentence_where_none_is_above(passages):
    found = select_facts(
        passages, PASSAGE, SENTENCE, FactSelectionConfig(threshold=0.5, always_select_one=True)
    )
    assert found.facts == {"q1": [("Bob", 2), ("Ann", 0)], "q2": [("Ann", 0)]}


def test_selection_is_a_prediction_file_of_the_official_evaluator(passages):
    assert select_facts(passages, PASSAGE, SENTENCE).as_json() == {
        "answer": {},
        "sp": {"q1": [["Bob", 2], ["Ann", 0]], "q2": []},
    }
