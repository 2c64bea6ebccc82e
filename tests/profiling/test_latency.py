"""Rankers' times beside their sizes."""

import pytest
from pyarrow import parquet

from as2ray.checkpoints.loading import load
from as2ray.models.ensemble import EnsembleRanker
from as2ray.profiling.latency import measure_latencies


def test_every_ranker_has_its_size_and_its_time_against_the_first(checkpoint, corpus):
    rows = parquet.read_table(corpus)[:40]
    first, second = load(checkpoint()), load(checkpoint("electra"))
    found = measure_latencies(
        {"first": first, "both": EnsembleRanker([first, second])}, rows, num_repeats=3
    )
    sizes = [sum(p.numel() for p in ranker.parameters()) for ranker in (first, second)]
    assert found["first"].num_parameters == sizes[0]
    assert found["both"].num_parameters == sum(sizes)
    assert found["first"].slowdown is None
    assert found["both"].slowdown.median > 0.2  # one after the other; a busy machine tells little
    rates = found["both"].pairs_per_second
    assert found["both"].latency_us[0] == pytest.approx(sum(1e6 / rate for rate in rates) / 3)
    assert len(found["both"].pairs_per_second) == 3


def test_batches_have_as_many_pairs_as_they_should(checkpoint, corpus):
    rows, sizes = parquet.read_table(corpus)[:40], []
    ranker = load(checkpoint())
    predict = ranker.predict_sequences
    ranker.predict_sequences = lambda sequences, index: (
        sizes.append((len(sequences), len(index))),
        predict(sequences, index),
    )
    measure_latencies({"one": ranker}, rows, num_repeats=2, batch_size=16)
    assert sizes[:3] == [(16, 16), (16, 16), (8, 8)]
