"""The order of an epoch: unchanged for one shard, the same steps on any number of ranks for many."""

from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import pyarrow.parquet as pq
import pytest

from as2ray.data import packed_dataset
from as2ray.data.list_reader import ListReader
from as2ray.data.packed_dataset import EncodedExamples, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.data.passage_reader import PassageReader
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import group_by_passage
from as2ray.text.packing import TokenSequences
from as2ray.text.tokenization import PairTokenizer


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


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["pairs", "lists", "passages", "numbers"])
def test_epoch_of_one_shard_has_the_order_of_version_1(
    kind, world_size, corpus, tokenizer, tmp_path, monkeypatch
):
    if kind == "numbers":
        dataset = PackedDataset(NumberReader(100_000), 150, seed=7)
    else:
        monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
        reader = create_reader(kind, corpus, tokenizer, tmp_path / kind)
        dataset = PackedDataset(reader, 13, 200, seed=3, shuffle_window=64)
    ranks = [replace(dataset, rank=rank, world_size=world_size) for rank in range(world_size)]
    print((kind, world_size), [digest(rank) for rank in ranks])
