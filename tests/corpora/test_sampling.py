"""Draws and numbers of a table that has no rows, or is asked for less than none."""

import pytest
import tiny
from pydantic import ValidationError

from as2ray.corpora.sampling import sample_questions
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


def test_stats_of_an_empty_table_are_refused():
    with pytest.raises(CorpusError, match="without rows"):
        compute_stats(CANDIDATE_SCHEMA.empty_table())
