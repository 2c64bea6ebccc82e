from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from as2ray.errors import ConfigError
from as2ray.text.passage_windows import encode_passages
from as2ray.text.tokenization import PairTokenizer

QUESTION = "What is kovarin?"
SENTENCES = ["Badesso lala.", "Kovarin ne.", "Muri.", "Lala badesso kovarin.", "Ne."]


@pytest.fixture
def tokenizer(published, family) -> PairTokenizer:
    return PairTokenizer(published(family).backend_tokenizer.to_str(), 60, 24)


def pieces(windows):
    """Token ids of each window."""
    sizes = windows.sequences.lengths
    return np.split(windows.sequences.token_ids, np.cumsum(sizes)[:-1])


def test_one_sentence_is_tokenised_as_a_pair(tokenizer):
    for text in SENTENCES:
        pair = replace(tokenizer, single_separator=True).encode([QUESTION], [text])
        window = encode_passages(tokenizer, [QUESTION], [[text]])
        np.testing.assert_array_equal(window.sequences.token_ids, pair.token_ids)
        np.testing.assert_array_equal(window.sequences.token_types, pair.token_types)


def test_roberta_reads_one_separator_after_the_question(published):
    """<s> Q </s> S1 </s> S2 </s> (Two-in-One, section 4.1); 2 is </s>."""
    tokenizer = PairTokenizer(published("roberta").backend_tokenizer.to_str(), 60, 24)
    windows = encode_passages(tokenizer, [QUESTION], [SENTENCES[:2]])
    ids = windows.sequences.token_ids
    assert (ids == 2).sum() == 3
    assert not ((ids[1:] == 2) & (ids[:-1] == 2)).any()
    single = replace(tokenizer, single_separator=True).encode([QUESTION], SENTENCES[:1])
    assert (single.token_ids == 2).sum() == 2
    assert (tokenizer.encode([QUESTION], SENTENCES[:1]).token_ids == 2).sum() == 3


def test_question_is_cut_at_the_length_that_the_tokenizer_names(tokenizer):
    long = replace(tokenizer, max_length=400, max_question_length=300)
    question = " ".join(["kovarin"] * 80)
    num_tokens = long.tokenize_texts([question], 400).lengths[0]
    assert num_tokens > 64
    windows = encode_passages(long, [question], [SENTENCES[:1]])
    num_sentence_tokens = long.tokenize_texts(SENTENCES[:1], 400).lengths[0]
    num_special = 3
    assert windows.sequences.lengths[0] == num_tokens + num_sentence_tokens + num_special


def test_markers_stand_right_before_their_sentences(tokenizer):
    wide = PairTokenizer(tokenizer.tokenizer_json, 200, 24)
    windows = encode_passages(wide, [QUESTION], [SENTENCES])
    assert windows.window_passage.tolist() == [0]
    assert windows.marker_sentence.tolist() == [0, 1, 2, 3, 4]
    texts, ids = wide.tokenize_texts(SENTENCES, 200), windows.sequences.token_ids
    for number, position in enumerate(windows.marker_position):
        start, size = texts.starts[number], texts.lengths[number]
        after = ids[position + 1 : position + 1 + size]
        np.testing.assert_array_equal(after, texts.token_ids[start : start + size])
    assert len({int(ids[position]) for position in windows.marker_position}) == 1


def test_long_passage_is_read_in_windows_that_share_a_sentence(tokenizer):
    sizes = tokenizer.tokenize_texts(SENTENCES, 60).lengths
    head = tokenizer.encode([QUESTION], ["x"]).lengths[0] - 2
    room = int(head + 1 + sizes[:3].sum() + 2)  # three sentences and two markers between
    narrow = PairTokenizer(tokenizer.tokenizer_json, room, 12)
    windows = encode_passages(narrow, [QUESTION], [SENTENCES])
    assert windows.sequences.lengths.max() <= room
    first = windows.marker_sentence[windows.marker_window == 0].tolist()
    second = windows.marker_sentence[windows.marker_window == 1].tolist()
    assert first == [0, 1, 2]
    assert second[0] == 2
    assert set(windows.marker_sentence.tolist()) == set(range(5))


def test_windows_have_a_separator_for_each_sentence_and_the_longest_is_cut_to_fit(published):
    tokenizer = PairTokenizer(published("bert").backend_tokenizer.to_str(), 60, 24)
    passage = [" ".join(["lala"] * number) for number in (2, 3, 4, 60)]
    word = tokenizer.tokenize_texts(["lala"], 60).lengths[0]
    prefix = tokenizer.encode([QUESTION], ["lala"]).lengths[0] - word - 1
    # Two and three words fit with their separators, three and four do not.
    narrow = replace(tokenizer, max_length=int(prefix + 6 * word + 2), max_question_length=6)
    windows = encode_passages(narrow, [QUESTION], [passage])
    sentences = [windows.marker_sentence[windows.marker_window == n].tolist() for n in range(3)]
    assert sentences == [[0, 1], [2], [3]]
    assert windows.marker_window.max() == 2
    separator = tokenizer.special_token_layout[-1][0]
    assert [(window == separator).sum() for window in pieces(windows)] == [3, 2, 2]
    assert windows.sequences.lengths[2] == narrow.max_length
    # A sentence that two windows share begins the second one without a further separator.
    narrow = replace(narrow, max_length=int(prefix + 7 * word + 2))
    windows = encode_passages(narrow, [QUESTION], [passage[:3]])
    assert windows.marker_sentence.tolist() == [0, 1, 1, 2]
    assert [(window == separator).sum() for window in pieces(windows)] == [3, 3]


def test_several_passages_keep_their_numbers(tokenizer):
    questions = [QUESTION, "Lala?"]
    windows = encode_passages(tokenizer, questions, [SENTENCES[:2], SENTENCES[2:]])
    assert windows.window_passage[windows.marker_window].tolist()[0] == 0
    by_passage = {
        p: set(windows.marker_sentence[windows.window_passage[windows.marker_window] == p])
        for p in (0, 1)
    }
    assert by_passage == {0: {0, 1}, 1: {2, 3, 4}}


def test_passage_without_sentences_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="1 passages without sentences, first index 1"):
        encode_passages(tokenizer, [QUESTION] * 2, [["Lala."], []])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    max_length=st.integers(20, 80),
)
def test_every_sentence_is_in_a_window_and_no_window_is_too_long(tokenizer, words, max_length):
    narrow = PairTokenizer(tokenizer.tokenizer_json, max_length, 10)
    passage = [" ".join(["lala"] * n) for n in words]
    windows = encode_passages(narrow, ["what is kovarin?"], [passage])
    assert set(windows.marker_sentence.tolist()) == set(range(len(words)))
    assert windows.sequences.lengths.max() <= max_length
    for number in range(len(windows.window_passage)):
        sentences = windows.marker_sentence[windows.marker_window == number]
        assert sentences.tolist() == list(range(sentences[0], sentences[-1] + 1))
        assert (
            windows.marker_position[windows.marker_window == number].max()
            < windows.sequences.lengths[number] - 1
        )


def test_batches_hold_every_window_once_the_longest_first(tokenizer):
    windows = encode_passages(tokenizer, [QUESTION] * 3, [SENTENCES[:1], SENTENCES, SENTENCES[:2]])
    lengths = windows.sequences.lengths
    batches = list(windows.iter_batches(int(lengths.max())))
    assert len(batches) > 1
    assert all(batch.num_tokens <= lengths.max() for batch in batches)
    together = [length for batch in batches for length in batch.lengths.tolist()]
    assert together == sorted(lengths.tolist(), reverse=True)


def test_packed_windows_keep_markers_passages_and_what_belongs_to_each(tokenizer):
    questions = [QUESTION, "Lala?", QUESTION]
    passages = [SENTENCES[:1], SENTENCES[1:], SENTENCES[:3]]
    windows = encode_passages(PairTokenizer(tokenizer.tokenizer_json, 200, 24), questions, passages)
    label = np.arange(8) * 10
    window_data, sentence_data = {"relevant": np.array([5, 6, 7])}, {"label": label}
    windows = replace(windows, window_data=window_data, sentence_data=sentence_data)
    batch = windows.pack(np.array([0, 2, 1]))
    order = batch.sequence_data["row"].tolist()
    assert batch.lengths.tolist() == sorted(batch.lengths.tolist(), reverse=True)
    assert batch.sequence_data["relevant"].tolist() == [5 + passage for passage in order]
    first = [0, 1, 5]
    expected = [first[p] + i for p in order for i in range(len(passages[p]))]
    assert batch.marker_data["sentence"].tolist() == expected
    assert batch.marker_data["label"].tolist() == [10 * number for number in expected]
    ids = batch.token_ids[batch.markers]
    assert len(set(ids.tolist())) == 1
    starts = np.cumsum(batch.lengths) - batch.lengths
    assert (batch.markers >= starts[batch.marker_data["window"]]).all()
    alone = windows.pack(np.array([1]))
    assert alone.marker_data["window"].tolist() == [0] * 4
    np.testing.assert_array_equal(
        alone.markers, windows.marker_position[windows.marker_window == 1]
    )
