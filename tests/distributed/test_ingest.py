"""Ray Data makes the same packed batches, in the same order, as a data set in one process."""

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest

from as2ray.data.list_reader import ListReader
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed.ingest import RayBatchSource, from_row, to_table
from as2ray.errors import CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer
from benchmarks.consuming import WorkerReport, compute_checksum, is_exact


@pytest.fixture
def tokenizer(checkpoint):
    return PairTokenizer.from_folder(checkpoint(), max_length=32, max_question_length=12)


@pytest.fixture
def create_dataset(corpus, tokenizer):
    def create(reader_type=PairReader, **changes):
        settings = {"global_batch_size": 24, "max_batch_tokens": 200, "shuffle_window": 96}
        reader = PairReader(ParquetTable.open(corpus), tokenizer)
        if reader_type is ListReader:
            reader = ListReader(reader)
        return PackedDataset(reader, **settings | changes)

    return create


def _same(a, b):
    assert (a.step, a.num_examples, a.is_last) == (b.step, b.num_examples, b.is_last)
    for name in ("token_ids", "token_types", "positions", "lengths"):
        np.testing.assert_array_equal(getattr(a.batch, name), getattr(b.batch, name))
    assert a.batch.sequence_data.keys() == b.batch.sequence_data.keys()
    for name, values in a.batch.sequence_data.items():
        np.testing.assert_array_equal(values, b.batch.sequence_data[name])


@pytest.mark.parametrize("reader_type", [PairReader, ListReader])
def test_rows_of_packed_batches_come_back_as_they_were(create_dataset, reader_type):
    micros = list(create_dataset(reader_type).epoch(0))
    rows = to_table(micros)
    for number, micro in enumerate(micros):
        _same(micro, from_row(rows, number))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (0, {}),
        (7, {}),
        (2, {"reader_type": ListReader, "shuffle_window": 48}),
        (6, {"num_shards": 5, "rank": 1, "world_size": 2}),
    ],
)
def test_epoch_from_ray_data_equals_the_stream(ray_local, create_dataset, start, more):
    made = list(RayBatchSource(create_dataset(**more)).epoch(1, start))
    expected = list(create_dataset(**more).epoch(1, start))
    assert len(made) == len(expected) > 1
    for a, b in zip(made, expected):
        _same(a, b)


def rows_of(micros):
    """Rows that came, in order; placeholders are -1."""
    return [int(row) for micro in micros for row in micro.batch.sequence_data["row"]]


@pytest.mark.slow
def test_ranks_from_ray_data_share_every_pair_once_and_stay_in_step(ray_local, create_dataset):
    # 400 pairs are 19 steps of 21 and one of 1: a rank without a pair there gets a placeholder.
    shares = [
        list(RayBatchSource(create_dataset(global_batch_size=21, rank=r, world_size=2)).epoch(0))
        for r in range(2)
    ]
    assert all([*dict.fromkeys(m.step for m in share)] == list(range(20)) for share in shares)
    assert not shares[0][-1].is_empty
    assert shares[1][-1].is_empty
    rows = np.array([row for share in shares for row in rows_of(share) if row >= 0])
    assert is_exact([WorkerReport(len(rows), 0, 20, compute_checksum(rows), 0, 0)], 400, 20)


@pytest.mark.slow
def test_order_from_ray_data_follows_seed_and_epoch(ray_local, create_dataset):
    first, again, other = (
        rows_of(RayBatchSource(create_dataset()).epoch(epoch)) for epoch in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other) == list(range(400))


@pytest.mark.slow
def test_ranks_resumed_in_mid_epoch_see_the_rest_and_nothing_twice(ray_local, create_dataset):
    # Step 6 lies inside a window of four steps: what was read ahead of it must not count.
    seen = []
    for rank in range(2):
        dataset = create_dataset(rank=rank, world_size=2)
        epoch = RayBatchSource(dataset).epoch(2)
        seen += rows_of(takewhile(lambda micro: micro.step < 6, epoch))
        epoch.close()  # as a worker that is killed leaves it
        seen += rows_of(RayBatchSource(dataset).epoch(2, 6))
    assert sorted(seen) == list(range(400))


@pytest.mark.slow
@pytest.mark.cluster
def test_corrupt_shard_ends_the_epoch_with_its_name(
    ray_local, create_dataset, corpus, tokenizer, tmp_path
):
    for path in corpus.glob("*.parquet"):
        content = bytearray(path.read_bytes())
        if path.name == "part-001.parquet":
            footer = int.from_bytes(content[-8:-4], "little") + 8
            content[100:-footer] = bytes(
                len(content) - 100 - footer
            )  # rows; what tells of them stays
        (tmp_path / path.name).write_bytes(content)
    broken = replace(create_dataset(), reader=PairReader(ParquetTable.open(tmp_path), tokenizer))
    with pytest.raises(CorpusError, match=r"part-001\.parquet(.|\n)*prepare the corpus again"):
        list(RayBatchSource(broken).epoch(0))


def test_epoch_past_its_end_is_empty(create_dataset):
    assert list(RayBatchSource(create_dataset()).epoch(0, create_dataset().steps)) == []
