import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from as2ray.text.likeness import likeness, near_duplicates, words_of


def test_likeness_is_words_of_both_over_words_of_either():
    assert likeness(words_of("The cat, the CAT!"), words_of("a cat")) == pytest.approx(1 / 3)
    assert likeness(words_of("?"), words_of("")) == 1.0
    assert likeness(words_of("x"), words_of("")) == 0.0


texts = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=7).map(" ".join), max_size=12)


@settings(max_examples=150)
@given(texts, texts, st.sampled_from([0.1, 0.5, 0.7, 0.75, 0.8, 1.0]))
def test_near_duplicates_are_those_of_comparing_every_pair(one, other, least):
    expected = {
        (i, j, likeness(words_of(a), words_of(b)))
        for i, a in enumerate(one)
        for j, b in enumerate(other)
        # Two texts without a word are no duplicates of a question.
        if likeness(words_of(a), words_of(b)) >= least and words_of(a) and words_of(b)
    }
    assert set(near_duplicates(one, other, least)) == expected
