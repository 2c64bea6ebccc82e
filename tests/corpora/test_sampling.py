"""Draws and numbers of a table that has no rows, or is asked for less than none."""

import pytest
import tiny

from as2ray.corpora.sampling import sample_questions
from as2ray.corpora.stats import compute_stats
from as2ray.errors import CorpusError
from as2ray.tables.schema import CANDIDATE_SCHEMA


@pytest.mark.parametrize("asked", [{"negatives": -1}, {"seed": -1}, {"questions": 0}])
def test_sample_of_less_than_none_is_refused(asked):
    with pytest.raises(CorpusError):
        sample_questions(tiny.candidates(4), **asked)


def test_sample_without_negatives_keeps_the_positives():
    assert set(sample_questions(tiny.candidates(4), max_negatives=0)["label"].to_pylist()) == {1}


def test_stats_of_an_empty_table_are_refused():
    with pytest.raises(CorpusError, match="without rows"):
        compute_stats(CANDIDATE_SCHEMA.empty_table())
