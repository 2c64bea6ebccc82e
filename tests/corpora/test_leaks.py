import pyarrow as pa
import pyarrow.compute as pc
import pytest

from as2ray.corpora.leaks import (
    check_leaks,
    near_duplicate_questions,
    remove_leaks,
    shared_questions,
)
from as2ray.corpora.stats import Distribution, compute_stats
from as2ray.errors import LeakError


def questions(*texts):
    return pa.table({"question": pa.array(texts, pa.string())})


A = questions("Who  is Ann?", "Who is Ann?", "What's new")
B = questions("who is ann ?", "Where?")
C = questions("Why?")


def test_shared_questions_ignore_case_blanks_and_final_punctuation():
    assert shared_questions(A, B) == ["who is ann"]
    assert shared_questions(A, C) == []
    assert shared_questions(questions("Un cafe\u0301?"), questions("un caf\u00e9")) == [
        "un caf\u00e9"
    ]


def test_check_leaks_tells_numbers_and_examples_of_every_pair():
    with pytest.raises(LeakError) as error:
        check_leaks({"train": A, "dev": B, "test": A})
    assert "1 questions in both 'train' and 'dev', such as ['who is ann']" in error.value.problem
    assert "2 questions in both 'train' and 'test'" in error.value.problem


def test_check_leaks_of_clean_splits_says_nothing():
    check_leaks({"train": A, "dev": C})


def test_drop_removes_every_spelling_of_a_leaked_question():
    assert remove_leaks(A, B, C)["question"].to_pylist() == ["What's new"]
    check_leaks({"train": remove_leaks(A, B), "dev": B})
    assert remove_leaks(A).equals(A)


def test_stats_count_what_a_measure_depends_on(table):
    made = table([0, 1, 0], [0, 0], [1])
    made = made.set_column(
        3, "candidate", pa.array(["a b", "a  b c", "a b", "x", "y", "only one here now"])
    )
    made = made.set_column(1, "question", pa.array(["who?"] * 3 + ["what is?"] * 2 + ["who?"]))
    found = compute_stats(made)
    assert (found.counts.num_questions, found.num_all_negative, found.num_all_positive) == (3, 1, 1)
    assert found.candidates_per_question.max == 3
    assert found.candidate_tokens.max == 4
    assert found.question_tokens.mean == pytest.approx(4 / 3)
    assert found.question_characters.max == 8
    assert (found.num_duplicate_sentences, found.num_conflicting_labels) == (1, 0)
    assert found.num_duplicate_questions == 1


def test_stats_are_mean_median_percentile_and_maximum(table):
    made = table(*([0] * size for size in (1, 2, 3, 14)))
    stats = compute_stats(made)
    assert stats.candidates_per_question == Distribution(5.0, 2.5, pytest.approx(12.35), 14)
    assert stats.positives_per_question == Distribution(0.0, 0.0, 0.0, 0)
    assert (stats.num_all_negative, stats.num_all_positive) == (4, 0)
    assert stats.candidate_characters.max == len("sentence 13 of 3.")
    assert stats.question_tokens == Distribution(2.0, 2.0, 2.0, 2)
    characters = compute_stats(made, lambda texts: pc.utf8_length(texts).to_numpy())
    assert characters.candidate_tokens == stats.candidate_characters
    assert characters.question_tokens == stats.question_characters


def test_stats_see_a_sentence_with_both_labels(table):
    made = table([0, 1])
    made = made.set_column(3, "candidate", pa.array(["same", "same"]))
    assert compute_stats(made).num_conflicting_labels == 1


def test_near_duplicates_are_leaks_from_a_similarity_on():
    train = questions("when was the old town hall built", "who is ann")
    dev = questions("when was the old town hall first built")
    check_leaks({"train": train, "dev": dev})
    with pytest.raises(LeakError, match="1 questions in both 'train' and 'dev'"):
        check_leaks({"train": train, "dev": dev}, 0.75)
    check_leaks({"train": train, "dev": dev}, 0.95)
    kept = remove_leaks(train, dev, min_similarity=0.75)
    assert kept["question"].to_pylist() == ["who is ann"]
    assert remove_leaks(train, dev).num_rows == 2


def test_near_duplicates_have_three_quarters_of_their_words_in_common_the_nearest_first():
    texts = questions("one two three", "one two three four", "one two")
    held_out = questions("one two three four")
    assert near_duplicate_questions(texts, held_out) == [
        ("one two three four", "one two three four", 1.0),
        ("one two three", "one two three four", 0.75),
    ]


def test_leaks_name_three_examples_in_their_order():
    table = questions("d?", "c?", "b?", "a?")
    with pytest.raises(LeakError, match=r"4 questions in both .*\['a', 'b', 'c'\]\n"):
        check_leaks({"train": table, "dev": table})
