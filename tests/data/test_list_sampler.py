from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tiny

from as2ray.data.list_reader import ListReader
from as2ray.data.list_sampler import ListSampler
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LIST_INDEX
from as2ray.text.tokenization import PairTokenizer


@pytest.fixture(scope="module")
def tokenizer(published) -> PairTokenizer:
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 40, 20)


@pytest.fixture
def pairs(corpus, tokenizer) -> PairReader:
    return PairReader(ParquetTable.open(corpus), tokenizer)


def labeled(*questions: list[int]) -> pa.Table:
    ids = [f"q{i}" for i, labels in enumerate(questions) for _ in labels]
    return pa.table({"question_id": ids, "label": [x for labels in questions for x in labels]})


def test_question_of_one_kind_alone_gives_no_list():
    sampler = ListSampler.from_tables([labeled([0, 1, 0], [1, 1], [0]), labeled([0, 0, 1])])
    assert len(sampler) == 2
    random = np.random.default_rng(0)
    lists = {tuple(sampler.sample(np.array([0, 1]), 2, random).ravel().tolist()) for _ in range(50)}
    assert lists == {(1, a, 8, b) for a in (0, 2) for b in (6, 7)}


def test_draw_takes_every_positive_and_negative_alike():
    sampler = ListSampler.from_tables([labeled([1, 0, 1, 0, 0, 1])])
    random = np.random.default_rng(1)
    rows = sampler.sample(np.zeros(6_000, np.int64), 2, random)
    for side, among in ((0, {0, 2, 5}), (1, {1, 3, 4})):
        counts = Counter(rows[:, side].tolist())
        assert counts.keys() == among
        assert all(abs(n - 2_000) < 200 for n in counts.values())


@pytest.mark.parametrize(
    ("list_size", "positives", "negatives"),
    [(2, 1, 1), (3, 1, 2), (4, 2, 2), (5, 2, 3), (6, 2, 4), (7, 2, 5), (9, 2, 5)],
)
def test_list_is_half_positives_where_both_kinds_last(list_size, positives, negatives):
    sampler = ListSampler.from_tables([labeled([0, 1, 0, 0, 1, 0, 0])])
    [rows] = sampler.sample(np.array([0]), list_size, np.random.default_rng(2))
    assert len(rows) == list_size
    sampled = rows[rows >= 0].tolist()
    assert len(set(sampled)) == len(sampled) == positives + negatives
    assert set(sampled[:positives]) <= {1, 4}
    assert set(sampled[positives:]) <= {0, 2, 3, 5, 6}


def test_positives_fill_the_places_of_negatives_that_are_missing():
    sampler = ListSampler.from_tables([labeled([1, 1, 0, 1, 1], [0, 1])])
    first, second = sampler.sample(np.array([0, 1]), 4, np.random.default_rng(3)).tolist()
    assert set(first[:3]) < {0, 1, 3, 4}
    assert first[3] == 2
    assert second == [6, 5, -1, -1]


def test_corpus_without_contrasts_is_refused(tmp_path):
    table = tiny.candidates(3, each=1)
    with pytest.raises(CorpusError, match="1 files with 3 candidates"):
        ListSampler.from_files(ParquetTable.open(tiny.write_corpus(tmp_path, table)).paths)


@pytest.mark.parametrize("list_size", [2, 4])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "max_batch_tokens"), [(1, 16, 8192), (3, 7, 160), (4, 3, 200)]
)
def test_dataset_of_lists_gives_each_question_once_whole_in_one_batch(
    pairs, world_size, batch_size, max_batch_tokens, list_size
):
    table = pairs.files.to_table()
    dataset = PackedDataset(
        *(ListReader(pairs, list_size), batch_size, max_batch_tokens),
        seed=5,
        world_size=world_size,
        shuffle_window=80,
    )
    question_counts: Counter[str] = Counter()
    for rank in range(world_size):
        for micro in replace(dataset, rank=rank).epoch(2):
            data = micro.batch.sequence_data
            if micro.is_empty:
                continue
            assert micro.batch.num_tokens <= max_batch_tokens
            left = dataset.reader.num_examples - micro.step * batch_size
            assert micro.num_examples == min(batch_size, left)
            for list_index in np.unique(data[LIST_INDEX]):
                in_list = data[LIST_INDEX] == list_index
                rows = data["row"][in_list]
                assert len(set(rows.tolist())) == len(rows) == list_size
                assert table["label"].to_numpy()[rows].sum() == data["label"][in_list].sum() == 1
                (question,) = set(table["question_id"].take(pa.array(rows)).to_pylist())
                question_counts[question] += 1
    assert len(question_counts) == 80
    assert set(question_counts.values()) == {1}


def rows_by_step(dataset: PackedDataset, epoch: int, start: int = 0) -> dict[int, list[int]]:
    step_rows: dict[int, list[int]] = {}
    for micro in dataset.epoch(epoch, start):
        step_rows.setdefault(micro.step, []).extend(micro.batch.sequence_data["row"].tolist())
    return {step: sorted(rows) for step, rows in step_rows.items()}


def test_dataset_of_lists_samples_anew_each_epoch_and_resumes(pairs):
    dataset = PackedDataset(ListReader(pairs), 9, shuffle_window=60)
    whole = rows_by_step(dataset, 0)
    assert sum(map(len, whole.values())) == 160
    assert rows_by_step(dataset, 0, 4) == {step: rows for step, rows in whole.items() if step >= 4}
    others = rows_by_step(dataset, 1), rows_by_step(replace(dataset, seed=1), 0)
    samples = [{r for rows in epoch.values() for r in rows} for epoch in (whole, *others)]
    assert samples[0] != samples[1]
    assert samples[0] != samples[2]


def test_list_that_may_not_fit_a_batch_is_refused(pairs):
    with pytest.raises(ConfigError, match=r"max_batch_tokens must be at least 80, .* not 79"):
        PackedDataset(ListReader(pairs), 9, 79)
