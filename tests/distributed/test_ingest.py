"""Ray Data makes the same packed batches, in the same order, as the stream in one process."""

import numpy as np
import pytest

from as2ray.distributed.ingest import RayEpochs, from_row, to_table
from as2ray.text.paired_stream import PairedStream
from as2ray.text.stream import PairFiles, Stream
from as2ray.text.tokens import PairTokenizer


@pytest.fixture
def stream(corpus, checkpoint):
    tokenizer = PairTokenizer.from_folder(checkpoint(), max_length=32, max_question=12)

    def make(kind=Stream, **changes):
        settings = {"batch": 24, "max_tokens": 200, "window": 96} | changes
        return kind(PairFiles.find(corpus), tokenizer, **settings)

    return make


def _same(a, b):
    assert (a.step, a.pairs, a.last) == (b.step, b.pairs, b.last)
    for name in ("token_ids", "token_types", "positions", "lengths"):
        np.testing.assert_array_equal(getattr(a.batch, name), getattr(b.batch, name))
    assert a.batch.of_sequence.keys() == b.batch.of_sequence.keys()
    for name, values in a.batch.of_sequence.items():
        np.testing.assert_array_equal(values, b.batch.of_sequence[name])


@pytest.mark.parametrize("kind", [Stream, PairedStream])
def test_rows_of_packed_batches_come_back_as_they_were(stream, kind):
    micros = list(stream(kind).epoch(0))
    rows = to_table(micros)
    for number, micro in enumerate(micros):
        _same(micro, from_row(rows, number))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "more"), [(0, {}), (7, {}), (2, {"kind": PairedStream, "window": 48})]
)
def test_epoch_from_ray_data_equals_the_stream(ray_local, stream, start, more):
    made = list(RayEpochs(stream(**more)).epoch(1, start))
    expected = list(stream(**more).epoch(1, start))
    assert len(made) == len(expected) > 1
    for a, b in zip(made, expected):
        _same(a, b)


@pytest.mark.slow
def test_ranks_from_ray_data_share_every_pair_once(ray_local, stream):
    rows = [
        int(row)
        for rank in range(2)
        for micro in RayEpochs(stream(rank=rank, ranks=2)).epoch(0)
        for row in micro.batch.of_sequence["row"]
    ]
    assert sorted(r for r in rows if r >= 0) == list(range(len(stream().files)))


def test_epoch_past_its_end_is_empty(stream):
    assert list(RayEpochs(stream()).epoch(0, stream().steps)) == []
