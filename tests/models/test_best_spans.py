import numpy as np

from as2ray.models.span_extraction import MAX_ANSWER_TOKENS, best_spans
from as2ray.text.packing import PackedBatch


def test_best_span_lies_in_its_sentence_and_ends_after_it_begins():
    # Two windows: [C] q [S] a b [S] c d e [S]  and  [C] q [S] f [S]
    ids = np.zeros(15, np.int32)
    marks = np.array([2, 5, 12])
    of_mark = {"window": np.array([0, 0, 1]), "sentence": np.array([4, 5, 9])}
    batch = PackedBatch(ids, ids, ids, np.array([10, 5], np.int32), {}, marks, of_mark)
    logits = np.zeros((15, 2), np.float32)
    logits[[3, 4], [1, 0]] = 5.0, 5.0  # would end before it begins
    logits[6, 0], logits[8, 1] = 2.0, 3.0
    logits[[0, 1, 2, 5, 9]] = 50.0  # no token of a sentence
    found = dict(best_spans(logits, batch))
    assert found[4][0] == 5.0
    assert found[4][1] <= found[4][2]
    assert found[5] == (5.0, 0, 2)
    assert found[9] == (0.0, 0, 0)


def test_span_is_no_longer_than_an_answer():
    ids = np.zeros(60, np.int32)
    of_mark = {"window": np.array([0]), "sentence": np.array([0])}
    batch = PackedBatch(ids, ids, ids, np.array([60], np.int32), {}, np.array([2]), of_mark)
    logits = np.zeros((60, 2), np.float32)
    logits[3, 0], logits[58, 1] = 1.0, 1.0
    [(_, (_, first, last))] = best_spans(logits, batch)
    assert last - first < MAX_ANSWER_TOKENS


def test_longest_span_has_as_many_tokens_as_an_answer_may_have():
    ids = np.zeros(60, np.int32)
    of_mark = {"window": np.array([0]), "sentence": np.array([0])}
    batch = PackedBatch(ids, ids, ids, np.array([60], np.int32), {}, np.array([2]), of_mark)
    for num_tokens in (MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS + 1):
        logits = np.zeros((60, 2), np.float32)
        logits[3, 0], logits[2 + num_tokens, 1] = 1.0, 1.0
        [(_, (score, _, _))] = best_spans(logits, batch)
        assert score == (2.0 if num_tokens == MAX_ANSWER_TOKENS else 1.0)
