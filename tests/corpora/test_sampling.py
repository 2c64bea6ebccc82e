"""Draws and numbers of a table that has no rows, or is asked for less than none."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import tiny

from as2ray.corpora.sampling import (
    balance_passages,
    flip_labels,
    sample_questions,
    select_split,
)
from as2ray.corpora.stats import compute_stats
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.schema import CANDIDATE_SCHEMA
from as2ray.text.bm25 import list_probabilities


@pytest.mark.parametrize("name", ["max_negatives", "seed", "num_questions"])
def test_sample_of_less_than_none_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        sample_questions(tiny.candidates(4), **{name: 0 if name == "num_questions" else -1})


def test_sample_of_more_questions_than_there_are_is_refused():
    with pytest.raises(CorpusError, match="cannot sample 5 of 4 questions"):
        sample_questions(tiny.candidates(4), 5)


def test_sample_without_negatives_keeps_the_positives():
    assert set(sample_questions(tiny.candidates(4), max_negatives=0)["label"].to_pylist()) == {1}


def test_splits_share_no_question_and_keep_their_share_and_their_order():
    table, shares = tiny.with_distinct_questions(tiny.candidates(20, each=2)), {"dev": 0.2}
    splits = {name: select_split(table, shares, name) for name in ("train", "dev")}
    ids = {name: split["question_id"].to_pylist() for name, split in splits.items()}
    assert {name: len(rows) for name, rows in ids.items()} == {"train": 32, "dev": 8}
    assert not set(ids["train"]) & set(ids["dev"])
    place = {name: number for number, name in enumerate(table["candidate_id"].to_pylist())}
    for split in splits.values():
        places = [place[name] for name in split["candidate_id"].to_pylist()]
        assert places == sorted(places)
    assert select_split(table, shares, "dev", seed=1)["question_id"].to_pylist() != ids["dev"]
    # Of more rows, most questions stay in their split.
    assert set(select_split(table.slice(0, 36), shares, "dev")["question_id"].to_pylist()) & {
        *ids["dev"]
    }


def test_equal_questions_are_in_one_split_and_each_split_has_one():
    table = tiny.with_distinct_questions(tiny.candidates(3, each=1))
    again = table.set_column(
        1, "question", [[f" {q.upper()}" for q in table["question"].to_pylist()]]
    )
    both = pa.concat_tables([table, again])
    shares = {"dev": 0.01, "test": 0.01}
    for split in ("train", "dev", "test"):
        assert len(select_split(both, shares, split)["question"].unique()) == 2
    with pytest.raises(CorpusError, match="3 questions are too few for the splits"):
        select_split(both, {**shares, "other": 0.01}, "dev")


def test_larger_sample_contains_the_smaller_one_where_it_is_nested():
    table = tiny.candidates(30, each=2)
    samples = [
        [*dict.fromkeys(sample_questions(table, n, seed=3, nested=True)["question_id"].to_pylist())]
        for n in (5, 12)
    ]
    assert [len(sample) for sample in samples] == [5, 12]
    assert set(samples[0]) < set(samples[1])
    other = sample_questions(table, 5, seed=4, nested=True)["question_id"].to_pylist()
    assert set(other) != set(samples[0])


def test_balanced_passages_are_all_relevant_ones_and_as_many_others_in_order():
    passages = pa.table({"passage_label": [0, 1, 0, 0, 1, 0, 0, 0], "number": range(8)})
    balanced = balance_passages(passages)
    assert balanced["passage_label"].to_pylist().count(1) == 2
    assert balanced.num_rows == 4
    numbers = balanced["number"].to_pylist()
    assert numbers == sorted(numbers)
    samples = {tuple(balance_passages(passages, s)["number"].to_pylist()) for s in range(9)}
    assert len(samples) > 1
    with pytest.raises(CorpusError, match="none of 1 passages is relevant"):
        balance_passages(passages.slice(0, 1))


def test_share_of_labels_is_flipped_by_the_seed():
    table = tiny.candidates(20)
    labels = table["label"].to_pylist()
    flipped = [flip_labels(table, 0.137, seed)["label"].to_pylist() for seed in (0, 0, 1)]
    changed = [[i for i, x in enumerate(each) if x != labels[i]] for each in flipped]
    assert [len(rows) for rows in changed] == [13, 13, 13]
    assert changed[0] == changed[1] != changed[2]
    assert {x for each in flipped for x in each} == {0, 1}
    assert flip_labels(table, 0.5, 0).drop_columns("label").equals(table.drop_columns("label"))


def test_stats_of_an_empty_table_are_refused():
    with pytest.raises(CorpusError, match="without rows"):
        compute_stats(CANDIDATE_SCHEMA.empty_table())


def test_hard_negatives_are_those_with_the_highest_bm25():
    table = tiny.candidates(8, each=9)
    sample = sample_questions(table, 5, 4, seed=3, hard_negatives=2)
    kept = set(sample["candidate_id"].to_pylist())
    num_random = 0
    for question in sample["question_id"].unique().to_pylist():
        rows = table.filter(pc.equal(table["question_id"], question)).to_pydict()
        words = list_probabilities(rows["question"][0], rows["candidate"])
        order = np.argsort(-words, kind="stable")
        negatives = [rows["candidate_id"][row] for row in order if not rows["label"][row]]
        assert kept.issuperset(negatives[:2])
        num_random += len(kept.intersection(negatives[2:]))
        positives = [n for n, label in zip(rows["candidate_id"], rows["label"]) if label]
        assert kept.issuperset(positives)
    assert num_random == 5 * 2
    other = sample_questions(table, 5, 4, seed=4, hard_negatives=2)
    assert set(other["candidate_id"].to_pylist()) != kept


def test_seeds_are_zero_by_default():
    table = tiny.with_distinct_questions(tiny.candidates(9, each=4))
    shares = {"dev": 0.3}
    assert sample_questions(table, 4, 1).equals(sample_questions(table, 4, 1, seed=0))
    assert not sample_questions(table, 4, 1).equals(sample_questions(table, 4, 1, seed=1))
    assert select_split(table, shares, "dev").equals(select_split(table, shares, "dev", seed=0))
    passages = pa.table({"passage_label": [1] * 4 + [0] * 40, "number": range(44)})
    assert balance_passages(passages).equals(balance_passages(passages, 0))
    assert not balance_passages(passages).equals(balance_passages(passages, 1))


def test_sample_is_without_repetition_and_at_most_the_negatives_asked_for():
    table = tiny.candidates(9, each=5)
    for nested in (False, True):
        sample = sample_questions(table, 9, 2, seed=5, nested=nested)
        assert len(sample["question_id"].unique()) == 9
        for question in sample["question_id"].unique().to_pylist():
            rows = sample.filter(pc.equal(sample["question_id"], question))
            assert rows["label"].to_pylist().count(0) == 2
    assert not sample_questions(table, 5).equals(sample_questions(table, 5, nested=True))
