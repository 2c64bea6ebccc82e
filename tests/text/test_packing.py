import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.errors import ConfigError
from as2ray.text.packing import (
    TokenSequences,
    concatenate_sequences,
    pack_sequences,
    ragged_arange,
    split_by_tokens,
)

LENGTHS = st.lists(st.integers(1, 30), max_size=40)


def sequences_of(lengths: list[int]) -> TokenSequences:
    """Sequence i holds i*100, i*100+1, ..., and the type i % 2."""
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    inside = ragged_arange(np.asarray(lengths, np.int32))
    return TokenSequences(numbers * 100 + inside, numbers % 2, np.asarray(lengths, np.int32))


def test_ragged_arange_counts_inside_each_length():
    assert ragged_arange(np.array([2, 0, 3], np.int32)).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(np.array([], np.int32)).tolist() == []


@given(LENGTHS, st.integers(30, 100))
def test_split_by_tokens_any_lengths_keeps_all_sequences_within_the_budget(lengths, budget):
    sizes = np.asarray(lengths, np.int32)
    groups = list(split_by_tokens(sizes, budget))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(0 < sizes[group].sum() <= budget for group in groups)
    in_order = [sizes[i] for group in groups for i in group]
    assert in_order == sorted(lengths, reverse=True)


@given(LENGTHS, st.integers(30, 100))
def test_split_by_tokens_any_lengths_wastes_less_than_half_of_the_budget(lengths, budget):
    groups = list(split_by_tokens(np.asarray(lengths, np.int32), budget))
    assert len(groups) <= 2 * sum(lengths) // budget + 1


def test_split_by_tokens_sequence_over_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"31 tokens does not fit a batch of 30"):
        list(split_by_tokens(np.array([5, 31, 7]), 30))


@given(LENGTHS, st.randoms())
def test_pack_any_choice_keeps_the_content_of_each_sequence(lengths, random):
    sequences = sequences_of(lengths)
    which = random.sample(range(len(lengths)), random.randint(0, len(lengths)))
    columns = {"row": np.arange(len(lengths)), "pair": np.arange(2 * len(lengths)).reshape(-1, 2)}
    batch = sequences.pack(np.asarray(which, np.int64), columns)
    assert batch.lengths.tolist() == sorted((lengths[i] for i in which), reverse=True)
    assert batch.num_tokens == batch.lengths.sum()
    assert len(batch) == len(which)
    starts = np.cumsum(batch.lengths) - batch.lengths
    for number, start, length in zip(batch.sequence_data["row"], starts, batch.lengths):
        inside = slice(start, start + length)
        assert length == lengths[number]
        assert batch.token_ids[inside].tolist() == [number * 100 + i for i in range(length)]
        assert batch.token_types[inside].tolist() == [number % 2] * length
        assert batch.positions[inside].tolist() == list(range(length))
    assert sorted(batch.sequence_data["row"]) == sorted(which)
    assert (batch.sequence_data["pair"][:, 0] == 2 * batch.sequence_data["row"]).all()


def test_pack_arrays_are_int32():
    batch = sequences_of([3, 5]).pack(np.array([0, 1]), {})
    arrays = (batch.token_ids, batch.token_types, batch.positions, batch.lengths)
    assert {str(a.dtype) for a in arrays} == {"int32"}


def test_concatenate_parts_keeps_their_order():
    whole, parts = sequences_of([3, 1, 2]), [sequences_of([3]), sequences_of([3, 1, 2])]
    joined = concatenate_sequences(parts)
    assert joined.lengths.tolist() == [3, 3, 1, 2]
    assert joined.token_ids[3:].tolist() == whole.token_ids.tolist()


@given(LENGTHS, st.integers(30, 100))
def test_pack_sequences_numbers_the_sequences_within_the_budget(lengths, budget):
    batches = list(pack_sequences(sequences_of(lengths), budget))
    assert sorted(r for b in batches for r in b.sequence_data["row"]) == list(range(len(lengths)))
    for batch in batches:
        assert 0 < batch.num_tokens <= budget
        assert batch.lengths.tolist() == [lengths[row] for row in batch.sequence_data["row"]]
