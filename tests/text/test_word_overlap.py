import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from as2ray.text.word_overlap import find_near_duplicates, jaccard, word_set


def test_likeness_is_words_of_both_over_words_of_either():
    assert jaccard(word_set("The cat, the CAT!"), word_set("a cat")) == pytest.approx(1 / 3)
    assert jaccard(word_set("?"), word_set("")) == 1.0
    assert jaccard(word_set("x"), word_set("")) == 0.0
    assert word_set("cafe\u0301") == word_set("Caf\u00e9") == {"caf\u00e9"}


texts = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=7).map(" ".join), max_size=12)


@settings(max_examples=150)
@given(texts, texts, st.sampled_from([0.1, 0.5, 0.7, 0.75, 0.8, 1.0]))
def test_near_duplicates_are_those_of_comparing_every_pair(one, other, least):
    expected = {
        (i, j, jaccard(word_set(a), word_set(b)))
        for i, a in enumerate(one)
        for j, b in enumerate(other)
        # Two texts without a word are no duplicates of a question.
        if jaccard(word_set(a), word_set(b)) >= least and word_set(a) and word_set(b)
    }
    assert set(find_near_duplicates(one, other, least)) == expected
