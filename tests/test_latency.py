"""Rankers' times beside their sizes."""

import pytest
from pyarrow import parquet

from as2ray.checkpoint import load
from as2ray.latency import latencies
from as2ray.models.ensemble import EnsembleRanker


def test_every_ranker_has_its_size_and_its_time_against_the_first(checkpoint, corpus):
    rows = parquet.read_table(corpus)[:40]
    first, second = load(checkpoint()), load(checkpoint("electra"))
    found = latencies({"first": first, "both": EnsembleRanker([first, second])}, rows, repeats=3)
    sizes = [sum(p.numel() for p in ranker.parameters()) for ranker in (first, second)]
    assert found["first"].parameters == sizes[0]
    assert found["both"].parameters == sum(sizes)
    assert found["first"].slower is None
    assert found["both"].slower.median > 0.2  # one after the other; a busy machine tells little
    rates = found["both"].rates
    assert found["both"].microseconds[0] == pytest.approx(sum(1e6 / rate for rate in rates) / 3)
    assert len(found["both"].rates) == 3
