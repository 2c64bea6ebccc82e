import numpy as np
import pyarrow as pa
import pytest

from as2ray.evaluation.selection import Selecting, best, select
from as2ray.records import CANDIDATES, OPTIONAL, by_passage

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
    return by_passage(pa.Table.from_pylist(made, pa.schema([*CANDIDATES, *OPTIONAL])))


def test_joint_takes_the_best_passages_and_their_sentences_above_the_threshold(passages):
    found = select(passages, PASSAGE, SENTENCE)
    assert found.titles == {"q1": ["Bob", "Ann"], "q2": ["Ann"]}
    assert found.facts == {"q1": [("Bob", 2), ("Ann", 0)], "q2": []}
    assert select(passages, PASSAGE, SENTENCE, Selecting(top=1)).titles["q1"] == ["Bob"]
    stricter = select(passages, PASSAGE, SENTENCE, Selecting(threshold=0.5))
    assert stricter.facts["q1"] == [("Ann", 0)]


def test_sentences_alone_take_the_passages_of_the_best_sentences(passages):
    found = select(passages, best(passages, SENTENCE), SENTENCE, Selecting("sentences"))
    assert found.titles["q1"] == ["Cid", "Ann"]
    assert found.facts["q1"] == [("Cid", 0), ("Ann", 0)]


def test_passages_alone_take_the_first_sentence_of_the_best(passages):
    found = select(passages, PASSAGE, SENTENCE, Selecting("passages"))
    assert found.facts == {"q1": [("Bob", 0), ("Ann", 0)], "q2": [("Ann", 0)]}


def test_fallback_takes_the_best_sentence_where_none_is_above(passages):
    found = select(passages, PASSAGE, SENTENCE, Selecting(threshold=0.5, fallback=True))
    assert found.facts == {"q1": [("Bob", 2), ("Ann", 0)], "q2": [("Ann", 0)]}


def test_selection_is_a_prediction_file_of_the_official_evaluator(passages):
    assert select(passages, PASSAGE, SENTENCE).as_json() == {
        "answer": {},
        "sp": {"q1": [["Bob", 2], ["Ann", 0]], "q2": []},
    }
