"""Draws and numbers of a table that has no rows, or is asked for less than none."""

import pyarrow as pa
import pytest
import tiny
from pydantic import ValidationError

from as2ray.corpora.sampling import sample_questions, select_split
from as2ray.corpora.stats import compute_stats
from as2ray.errors import CorpusError
from as2ray.tables.schema import CANDIDATE_SCHEMA


@pytest.mark.parametrize("name", ["max_negatives", "seed", "num_questions"])
def test_sample_of_less_than_none_is_refused(name):
    with pytest.raises(ValidationError, match=name):
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


def test_stats_of_an_empty_table_are_refused():
    with pytest.raises(CorpusError, match="without rows"):
        compute_stats(CANDIDATE_SCHEMA.empty_table())
