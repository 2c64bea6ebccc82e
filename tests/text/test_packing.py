from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.errors import ConfigError
from as2ray.text.packing import (
    Prefixes,
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


def test_sequences_of_equal_length_keep_their_order():
    sequences = sequences_of([2, 3, 2, 3, 2])
    [group] = split_by_tokens(sequences.lengths, 12)
    assert group.tolist() == [1, 3, 0, 2, 4]
    [many] = split_by_tokens(np.tile([1, 2], 50), 150)
    assert many.tolist() == [*range(1, 100, 2), *range(0, 100, 2)]
    assert [g.tolist() for g in split_by_tokens(sequences.lengths, 6)] == [[1, 3], [0, 2, 4]]
    batch = sequences.pack(np.array([4, 3, 0, 1]), {"row": np.arange(5)})
    assert batch.sequence_data["row"].tolist() == [3, 1, 4, 0]
    assert sequences.take(np.array([4, 1])).token_ids.tolist() == [400, 401, 100, 101, 102]
    assert sequences.take(np.array([4, 1])).token_types.tolist() == [0, 0, 1, 1, 1]


@pytest.fixture
def prefixed() -> TokenSequences:
    """Four sequences that begin with two prefixes: 7 8 9, and 5."""
    parts = [[7, 8, 9, 1], [5, 2, 2], [7, 8, 9, 3, 3, 3], [5, 4]]
    lengths = np.array([len(part) for part in parts], np.int32)
    ids = np.concatenate(parts).astype(np.int32)
    return TokenSequences(ids, ids % 2, lengths, Prefixes(np.array([0, 1, 0, 1]), np.array([3, 1])))


def test_prefixes_are_split_off_once(prefixed):
    prefixes, rest = prefixed.split_prefixes()
    assert (prefixes.token_ids.tolist(), prefixes.lengths.tolist()) == ([7, 8, 9, 5], [3, 1])
    assert prefixes.token_types.tolist() == [1, 0, 1, 1]
    assert (rest.token_ids.tolist(), rest.lengths.tolist()) == ([1, 2, 2, 3, 3, 3, 4], [1, 2, 3, 1])
    assert rest.token_types.tolist() == [1, 0, 0, 1, 1, 1, 0]
    assert {a.dtype for a in (prefixes.lengths, rest.lengths)} == {np.dtype("int32")}
    assert prefixes.prefixes is None
    assert rest.prefixes is prefixed.prefixes


def test_positions_go_on_behind_a_prefix_that_was_computed_apart(prefixed):
    rows = {"row": np.arange(4)}
    whole = prefixed.pack(np.arange(4), rows)
    assert whole.prefixes is None
    assert whole.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 0, 1]
    _, rest = prefixed.split_prefixes()
    states = replace(rest.prefixes, states="states")
    batch = replace(rest, prefixes=states).pack(np.array([3, 1, 2]), rows)
    assert batch.sequence_data["row"].tolist() == [2, 1, 3]
    assert batch.positions.tolist() == [3, 4, 5, 1, 2, 1]
    assert batch.prefixes.index.tolist() == [0, 1, 1]
    assert batch.prefixes.states == "states"


def test_prefixes_of_parts_are_numbered_through(prefixed):
    some = prefixed.take(np.array([1, 0]))
    assert some.prefixes.index.tolist() == [1, 0]
    joined = concatenate_sequences([some, prefixed])
    assert joined.prefixes.index.tolist() == [1, 0, 2, 3, 2, 3]
    assert joined.prefixes.lengths.tolist() == [3, 1, 3, 1]
    assert joined.token_types.tolist() == (joined.token_ids % 2).tolist()
    assert concatenate_sequences([prefixed, sequences_of([2])]).prefixes is None
