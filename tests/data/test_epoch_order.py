"""The order of an epoch: as ever with one shard, and with several the same for any ranks."""

import pickle
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from as2ray.data import packed_dataset
from as2ray.data.list_reader import ListReader
from as2ray.data.packed_dataset import ORDER_VERSION, EncodedExamples, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.data.passage_reader import PassageReader
from as2ray.errors import ConfigError
from as2ray.tables import parquet
from as2ray.tables.parquet import ParquetTable, write_part
from as2ray.tables.schema import LOGIT_COLUMNS, group_by_passage
from as2ray.text.packing import TokenSequences
from as2ray.text.tokenization import PairTokenizer
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import run_job
from as2ray.training.tracking import TrackingConfig


@dataclass(frozen=True)
class NumberReader:
    """Examples of one token each, which is the number of the example."""

    num_examples: int
    max_tokens: int = 1
    max_sequences: int = 1

    def sample_rows(self, examples, seed):
        return examples

    def encode(self, rows):
        ones = np.ones(len(rows), np.int32)
        return EncodedExamples(
            TokenSequences(rows.astype(np.int32), ones, ones), {"row": rows}, ones
        )


@pytest.fixture(scope="module")
def tokenizer(published) -> PairTokenizer:
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 40, 20)


def create_reader(kind, corpus, tokenizer, folder):
    files = ParquetTable.open(corpus)
    if kind == "passages":
        folder.mkdir()
        pq.write_table(group_by_passage(files.to_table()), folder / "part.parquet")
        return PassageReader(ParquetTable.open(folder), tokenizer)
    pairs = PairReader(files, tokenizer)
    return ListReader(pairs) if kind == "lists" else pairs


def digest(dataset: PackedDataset) -> str:
    """Hash of steps, rows and tokens of two epochs."""
    content = sha256()
    for epoch in (0, 1):
        for micro in dataset.epoch(epoch):
            data = micro.batch.sequence_data
            rows = data.get("row", data.get("passage_label"))
            content.update(f"{micro.step} {micro.num_examples} {micro.is_last} ".encode())
            content.update(rows.tobytes() + micro.batch.token_ids.tobytes())
    return content.hexdigest()[:16]


ORDER_OF_SHARDS = {
    ("numbers", 2, 1): "1dafa422e1cbeb65",
    ("numbers", 2, 3): "0f92ce9289b4cc73",
    ("lists", 5, 1): "83e5076cb5cf52b5",
    ("lists", 4, 2): "9b9a60dd397f03d9",
    ("pairs", 3, 4): "88ec76c8e8606035",
}
"""What all ranks read in `ORDER_VERSION` 1, by the number of shards and of ranks."""

ORDER_OF_ONE_SHARD = {
    ("pairs", 1): ["93d3ef2024fd261c"],
    ("pairs", 3): ["635942ad2d72c1ea", "e8abd0b8029923bd", "9dbb7a87d773a7ad"],
    ("lists", 1): ["dfd97cb309d86750"],
    ("lists", 3): ["f11fed0f1a91021e", "2a50bc4afd9f7a16", "e1788975390aa5e8"],
    ("passages", 1): ["139aed3c052f3a7e"],
    ("passages", 3): ["c9cee2b4684b2acb", "a98fa8597ceb2a22", "840fb0f999a8447f"],
    ("numbers", 1): ["35f9044846df9c0f"],
    ("numbers", 3): ["ec71da96bf935c18", "d97d5243e0d870c1", "6db689b79ef321e7"],
}
"""What each rank read in `ORDER_VERSION` 1, before there were shards."""


@pytest.mark.parametrize(("kind", "world_size"), ORDER_OF_ONE_SHARD)
def test_epoch_of_one_shard_has_the_order_of_version_1(
    kind, world_size, corpus, tokenizer, tmp_path, monkeypatch
):
    if kind == "numbers":
        dataset = PackedDataset(NumberReader(100_000), 150, seed=7)
    else:
        monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
        reader = create_reader(kind, corpus, tokenizer, tmp_path / kind)
        dataset = PackedDataset(reader, 13, 200, seed=3, shuffle_window=64)
    digests = [digest(rank) for rank in all_ranks(dataset, world_size)]
    assert ORDER_VERSION == 1
    assert digests == ORDER_OF_ONE_SHARD[kind, world_size]


@pytest.mark.parametrize(("kind", "num_shards", "world_size"), ORDER_OF_SHARDS)
def test_epoch_of_several_shards_has_the_order_of_version_1(
    kind, num_shards, world_size, corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    is_numbers = kind == "numbers"
    reader = NumberReader(997) if is_numbers else create_reader(kind, corpus, tokenizer, tmp_path)
    dataset = PackedDataset(reader, 13, 200, seed=3, shuffle_window=64, num_shards=num_shards)
    assert ORDER_VERSION == 1
    digests = "".join(digest(rank) for rank in all_ranks(dataset, world_size))
    order = sha256(digests.encode()).hexdigest()[:16]
    assert order == ORDER_OF_SHARDS[kind, num_shards, world_size]


def all_ranks(dataset: PackedDataset, world_size: int) -> list[PackedDataset]:
    return [replace(dataset, rank=rank, world_size=world_size) for rank in range(world_size)]


def read_steps(dataset: PackedDataset, epoch: int = 0, start: int = 0) -> dict[int, list[int]]:
    """Token ids of each step, in the order in which they come."""
    steps: dict[int, list[int]] = {}
    for micro in dataset.epoch(epoch, start):
        tokens = [] if micro.is_empty else micro.batch.token_ids.tolist()
        steps.setdefault(micro.step, []).extend(tokens)
    return steps


def join_ranks(dataset: PackedDataset, world_size: int, epoch: int = 0) -> dict[int, list[int]]:
    """Token ids of each step over all ranks, sorted."""
    shares = [read_steps(rank, epoch) for rank in all_ranks(dataset, world_size)]
    assert all(list(share) == list(range(dataset.steps)) for share in shares)
    return {step: sorted(chain.from_iterable(s[step] for s in shares)) for step in shares[0]}


@pytest.mark.parametrize("num_shards", [8, 5])
@pytest.mark.parametrize("batch_size", [96, 150])
def test_steps_of_several_shards_are_the_same_for_any_ranks(num_shards, batch_size, monkeypatch):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 128)
    reader = NumberReader(10_001)
    dataset = PackedDataset(reader, batch_size, shuffle_window=2_048, num_shards=num_shards)
    alone = join_ranks(dataset, 1)
    assert sorted(chain.from_iterable(alone.values())) == list(range(10_001))
    assert {len(step) for step in list(alone.values())[:-1]} == {batch_size}
    for world_size in (2, 3, 4, 8, 20):
        assert join_ranks(dataset, world_size) == alone


@pytest.mark.parametrize("kind", ["pairs", "lists", "passages"])
def test_steps_of_shards_are_the_same_for_pairs_lists_and_passages(
    kind, corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    reader = create_reader(kind, corpus, tokenizer, tmp_path / kind)
    dataset = PackedDataset(reader, 13, 200, seed=3, shuffle_window=64, num_shards=4)
    alone = join_ranks(dataset, 1, epoch=1)
    assert join_ranks(dataset, 2, epoch=1) == join_ranks(dataset, 3, epoch=1) == alone
    assert join_ranks(dataset, 2, epoch=0) != alone


@given(
    num_examples=st.integers(1, 300),
    batch_size=st.integers(1, 70),
    window=st.integers(1, 250),
    num_shards=st.integers(1, 9),
    world_size=st.integers(1, 9),
    epoch=st.integers(0, 2),
)
def test_every_example_comes_once_in_steps_that_ranks_do_not_change(
    num_examples, batch_size, window, num_shards, world_size, epoch
):
    dataset = PackedDataset(
        NumberReader(num_examples), batch_size, shuffle_window=window, num_shards=num_shards
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
        steps = join_ranks(dataset, world_size, epoch)
        assert steps == join_ranks(dataset, 1, epoch)
    assert sorted(chain.from_iterable(steps.values())) == list(range(num_examples))
    assert all(len(step) == batch_size for step in list(steps.values())[:-1])


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_window_of_a_step_is_the_one_that_it_begins_in(num_shards, monkeypatch):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    dataset = PackedDataset(NumberReader(499), 21, shuffle_window=96, num_shards=num_shards)
    windows = [{m.step for m in dataset.read_window(1, w)} for w in range(dataset.num_windows)]
    assert len(windows) > 4
    for step in range(dataset.steps):
        first = next(number for number, steps in enumerate(windows) if step in steps)
        assert dataset.find_window(1, step) == first


@pytest.mark.parametrize("num_shards", [2, 5])
def test_windows_of_shards_hold_whole_spans(num_shards, monkeypatch):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    dataset = PackedDataset(NumberReader(499), 21, shuffle_window=96, num_shards=num_shards)
    windows = [
        {token // 16 for m in dataset.read_window(1, w) for token in m.batch.token_ids.tolist()}
        for w in range(dataset.num_windows)
    ]
    assert sum(map(len, windows)) == len(set().union(*windows)) == 32
    # Whole spans of each shard, up to 96 examples; the last window has the rest.
    assert {len(spans) for spans in windows[:-1]} == {96 // (16 * num_shards) * num_shards}


@pytest.mark.parametrize(("num_shards", "world_size"), [(3, 1), (4, 2), (2, 3)])
def test_epoch_of_shards_from_any_step_on_equals_the_tail(num_shards, world_size, monkeypatch):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    dataset = PackedDataset(NumberReader(499), 21, shuffle_window=96, num_shards=num_shards)
    # Windows end within steps: one of 96 examples does not hold whole steps of 21.
    window_steps = [{m.step for m in dataset.read_window(1, w)} for w in range(dataset.num_windows)]
    assert any(first & second for first, second in pairwise(window_steps))
    for rank in all_ranks(dataset, world_size):
        whole = read_steps(rank, 1)
        for start in range(rank.steps + 1):
            tail = {step: tokens for step, tokens in whole.items() if step >= start}
            assert read_steps(rank, 1, start) == tail


def test_step_that_two_windows_share_is_last_once():
    dataset = PackedDataset(NumberReader(50_000), 150, num_shards=8)
    for rank in all_ranks(dataset, 2):
        micros = list(rank.epoch(0))
        assert len(micros) > dataset.steps
        assert [m.step for m in micros if m.is_last] == list(range(dataset.steps))


@pytest.mark.parametrize("world_size", [2, 3, 7, 8, 12, 16])
def test_ranks_have_even_shares_of_a_step(world_size):
    dataset = PackedDataset(NumberReader(8 * 4 * 512), 240, num_shards=8)
    shares = [read_steps(rank) for rank in all_ranks(dataset, world_size)]
    for step in range(dataset.steps - 1):
        sizes = [len(share[step]) for share in shares]
        assert max(sizes) - min(sizes) <= 3


def test_order_of_shards_mixes_the_corpus_anew_each_epoch():
    dataset = PackedDataset(NumberReader(100_000), 256, num_shards=16)
    first, second = (np.array(read_steps(dataset, epoch)[0]) for epoch in (0, 1))
    assert len(np.intersect1d(first, second)) < 30
    spans = np.unique(first // 1_024)  # 100,000 examples are at least four spans of each shard
    assert len(spans) == 32


DECODED_BOUNDS = {1: 1.1, 4: 1.1, 16: 1.1, 64: 1.1, 3: 1.1, 48: 1.6}
"""Decoded rows per row that 64 shards use, by the number of ranks."""


@pytest.fixture(scope="module")
def aligned_reader(tokenizer, tmp_path_factory) -> PairReader:
    """5,000 pairs in three parts, and a teacher's logits in chunks; row groups of 16 rows."""
    folder, teacher = (tmp_path_factory.mktemp(name) for name in ("pairs", "teacher"))
    table = tiny.candidates(1_000)
    logits = {name: np.zeros(table.num_rows, np.float32) for name in LOGIT_COLUMNS}
    logits_table = pa.table({"candidate_id": table["candidate_id"], **logits})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROW_GROUP_SIZE", 16)
        for start, end in pairwise((0, 1_605, 3_210, 5_000)):
            write_part(table.slice(start, end - start), folder / f"{start:04}.parquet", start)
        for start in range(0, 5_000, 1_024):
            write_part(logits_table.slice(start, 1_024), teacher / f"{start:04}.parquet")
    files = ParquetTable.open(folder)
    return PairReader(files, tokenizer, teachers=(ParquetTable.open(teacher),))


@pytest.mark.parametrize("world_size", DECODED_BOUNDS)
def test_ranks_decode_about_the_rows_that_they_use(world_size, aligned_reader, monkeypatch):
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
    decoded, read_row_group = Counter(), pq.ParquetFile.read_row_group

    def count_rows(self, group, columns):
        kind = "pairs" if "question" in columns else "logits"
        decoded[kind] += self.metadata.row_group(group).num_rows
        return read_row_group(self, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", count_rows)
    dataset = PackedDataset(aligned_reader, 64, num_shards=64, shuffle_window=256)
    rows = [
        row
        for rank in all_ranks(dataset, world_size)
        for micro in rank.epoch(0)
        for row in micro.batch.sequence_data["row"].tolist()
        if row >= 0
    ]
    assert sorted(rows) == list(range(5_000))
    assert decoded.keys() == {"pairs", "logits"}
    assert max(decoded.values()) / 5_000 <= DECODED_BOUNDS[world_size]


def test_list_reader_does_not_carry_its_corpus_in_its_pickle(tokenizer, tmp_path):
    ids = [f"q{row // 100}" for row in range(200_000)]
    labels = np.arange(200_000) % 100 == 7
    pq.write_table(pa.table({"question_id": ids, "label": labels}), tmp_path / "part.parquet")
    reader = ListReader(PairReader(ParquetTable.open(tmp_path), tokenizer))
    empty_size = len(pickle.dumps(reader))
    assert reader.num_examples == 2_000
    # A bit of each row, and three numbers of each question.
    assert len(pickle.dumps(reader)) - empty_size < 200_000 / 8 + 3 * 8 * 2_000 + 1_000
    copy = pickle.loads(pickle.dumps(reader))
    rows = copy.sample_rows(np.arange(2_000), [1])
    np.testing.assert_array_equal(rows, reader.sample_rows(np.arange(2_000), [1]))
    assert set(rows[:, 0] % 100) == {7}


def test_training_reads_the_shards_of_its_config(checkpoint, corpus, tmp_path):
    datasets: list[PackedDataset] = []

    def record(dataset: PackedDataset) -> PackedDataset:
        datasets.append(dataset)
        return dataset

    settings = {"epochs": 1, "global_batch_size": 50, "precision": "fp32", "num_data_shards": 3}
    job = TrainingJob(
        ModelSpec(str(checkpoint("bert", None)), max_length=40),
        *((str(corpus),), {"dev": str(corpus)}, TrainingConfig(**settings)),
        tracking=TrackingConfig(tensorboard=False),
    )
    run_job(job, tmp_path, LocalCheckpointStore(tmp_path), record)
    assert [dataset.num_shards for dataset in datasets] == [3]
    with pytest.raises(ConfigError, match="num_data_shards"):
        TrainingConfig(num_data_shards=0)
