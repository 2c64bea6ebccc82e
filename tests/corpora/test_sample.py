"""Draws and numbers of a table that has no rows, or is asked for less than none."""

import pytest
import tiny

from as2ray.corpora.sample import sample
from as2ray.corpora.stats import stats
from as2ray.errors import CorpusError
from as2ray.records import CANDIDATES


@pytest.mark.parametrize("asked", [{"negatives": -1}, {"seed": -1}, {"questions": 0}])
def test_sample_of_less_than_none_is_refused(asked):
    with pytest.raises(CorpusError):
        sample(tiny.candidates(4), **asked)


def test_sample_without_negatives_keeps_the_positives():
    assert set(sample(tiny.candidates(4), negatives=0)["label"].to_pylist()) == {1}


def test_stats_of_an_empty_table_are_refused():
    with pytest.raises(CorpusError, match="without rows"):
        stats(CANDIDATES.empty_table())
