import pyarrow as pa
import pytest

from as2ray.corpora import check_leaks, drop, shared_questions, stats
from as2ray.errors import LeakError


def questions(*texts):
    return pa.table({"question": pa.array(texts, pa.string())})


A = questions("Who  is Ann?", "Who is Ann?", "What's new")
B = questions("who is ann ?", "Where?")
C = questions("Why?")


def test_shared_questions_ignore_case_blanks_and_final_punctuation():
    assert shared_questions(A, B) == ["who is ann"]
    assert shared_questions(A, C) == []


def test_check_leaks_tells_numbers_and_examples_of_every_pair():
    with pytest.raises(LeakError) as error:
        check_leaks({"train": A, "dev": B, "test": A})
    assert "1 questions in both 'train' and 'dev', such as ['who is ann']" in error.value.came
    assert "2 questions in both 'train' and 'test'" in error.value.came


def test_check_leaks_of_clean_splits_says_nothing():
    check_leaks({"train": A, "dev": C})


def test_drop_removes_every_spelling_of_a_leaked_question():
    assert drop(A, B, C)["question"].to_pylist() == ["What's new"]
    check_leaks({"train": drop(A, B), "dev": B})
    assert drop(A).equals(A)


def test_stats_count_what_a_measure_depends_on(table):
    made = table([0, 1, 0], [0, 0], [1])
    made = made.set_column(
        3, "candidate", pa.array(["a b", "a  b c", "a b", "x", "y", "only one here now"])
    )
    made = made.set_column(1, "question", pa.array(["who?"] * 3 + ["what is?"] * 2 + ["who?"]))
    found = stats(made)
    assert (found.counts.questions, found.all_negative, found.all_positive) == (3, 1, 1)
    assert found.candidates_per_question.most == 3
    assert found.candidate_tokens.most == 4
    assert found.question_tokens.mean == pytest.approx(4 / 3)
    assert found.question_characters.most == 8
    assert (found.duplicate_sentences, found.conflicting_sentences) == (1, 0)
    assert found.texts_with_two_ids == 1


def test_stats_see_a_sentence_with_both_labels(table):
    made = table([0, 1])
    made = made.set_column(3, "candidate", pa.array(["same", "same"]))
    assert stats(made).conflicting_sentences == 1
