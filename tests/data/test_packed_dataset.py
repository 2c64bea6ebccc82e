from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from as2ray.data import packed_dataset
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS
from as2ray.text.packing import pack_sequences
from as2ray.text.tokenization import PairTokenizer


@pytest.fixture(scope="module")
def tokenizer(published) -> PairTokenizer:
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 40, 20)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return tiny.numbered_rows()


@pytest.fixture(scope="module")
def files(table, tmp_path_factory) -> ParquetTable:
    folder = tmp_path_factory.mktemp("pairs")
    return ParquetTable.open(tiny.write_corpus(folder, table, files=3, row_group=20))


@pytest.fixture(scope="module")
def reader(files, tokenizer) -> PairReader:
    return PairReader(files, tokenizer)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, so that 199 rows are several, and the last is not whole."""
    monkeypatch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)


def rows_by_step(dataset: PackedDataset, epoch: int = 0, start: int = 0) -> dict[int, list[int]]:
    """Real rows of each step, in the order in which they come."""
    step_rows: dict[int, list[int]] = {}
    for micro in dataset.epoch(epoch, start):
        rows = micro.batch.sequence_data["row"].tolist()
        step_rows.setdefault(micro.step, []).extend(r for r in rows if r >= 0)
    return step_rows


def content(dataset: PackedDataset, epoch: int = 0, start: int = 0) -> list[tuple[object, ...]]:
    """All that comes, comparable."""
    return [
        (
            *(micro.step, micro.num_examples, micro.is_last),
            micro.batch.sequence_data["row"].tolist(),
            micro.batch.token_ids.tolist(),
        )
        for micro in dataset.epoch(epoch, start)
    ]


@settings(max_examples=40)
@given(
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 70),
    window=st.integers(1, 250),
    rows=st.sampled_from([1, 2, 15, 16, 17, 64, 198, 199]),
    epoch=st.integers(0, 3),
)
def test_epoch_any_ranks_and_sizes_gives_every_pair_once(
    files, tokenizer, world_size, batch_size, window, rows, epoch
):
    # A ParquetTable that knows of fewer rows reads only those.
    reader = PairReader(_first_rows(files, rows), tokenizer)
    dataset = PackedDataset(reader, batch_size, 120, shuffle_window=window, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_dataset, "SHUFFLE_BLOCK", 16)
        shares = [rows_by_step(replace(dataset, rank=r), epoch) for r in range(world_size)]
        alone = rows_by_step(replace(dataset, world_size=1), epoch)
    assert all(list(share) == list(range(dataset.steps)) for share in shares)
    together = {s: [r for share in shares for r in share[s]] for s in range(dataset.steps)}
    assert sorted(r for step in together.values() for r in step) == list(range(rows))
    assert {s: sorted(r) for s, r in together.items()} == {s: sorted(r) for s, r in alone.items()}
    assert all(len(step) == batch_size for step in list(together.values())[:-1])


def _first_rows(files: ParquetTable, rows: int) -> ParquetTable:
    ends = np.minimum(np.cumsum(files.row_counts), rows)
    return ParquetTable(files.paths, tuple(np.diff(ends, prepend=0).tolist()))


def test_epoch_shares_of_a_step_differ_by_at_most_one_pair(reader):
    shares = [rows_by_step(PackedDataset(reader, 30, rank=r, world_size=4)) for r in range(4)]
    for step in range(7):
        sizes = [len(share[step]) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.usefixtures("small_blocks")
def test_epoch_same_seed_and_number_comes_in_the_same_order(reader):
    dataset = PackedDataset(reader, 16, shuffle_window=64, seed=3)
    assert content(dataset, 2) == content(dataset, 2)


@pytest.mark.usefixtures("small_blocks")
def test_epoch_another_number_or_seed_comes_in_another_order(reader):
    dataset = PackedDataset(reader, 16, shuffle_window=64, seed=3)
    orders = [content(dataset, 0), content(dataset, 1), content(replace(dataset, seed=4), 0)]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@pytest.mark.usefixtures("small_blocks")
def test_epoch_is_mixed_over_the_whole_corpus(reader):
    first = rows_by_step(PackedDataset(reader, 64, shuffle_window=64))[0]
    assert max(first) - min(first) > 100
    assert first != sorted(first)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("window", [16, 48, 1000])
def test_epoch_from_any_step_on_equals_the_tail(reader, world_size, window):
    dataset = PackedDataset(reader, 16, 64, shuffle_window=window, world_size=world_size)
    for rank in range(world_size):
        share = replace(dataset, rank=rank)
        whole = content(share, 1)
        for start in range(share.steps + 1):
            assert content(share, 1, start) == [m for m in whole if m[0] >= start]


def test_epoch_more_ranks_than_pairs_of_a_step_gives_placeholders(reader):
    dataset = PackedDataset(reader, 2, shuffle_window=4, rank=2, world_size=3)
    micros = list(dataset.epoch(0))
    assert len(micros) == dataset.steps == 100
    for micro in micros:
        assert micro.is_empty
        assert micro.is_last
        assert micro.batch.sequence_data["row"].tolist() == [-1]
        assert micro.batch.sequence_data["label"].shape == (1,)
        assert micro.batch.num_tokens == 1
    assert [m.num_examples for m in micros] == [2] * 99 + [1]


def test_epoch_share_over_the_token_budget_comes_in_several_batches(reader):
    micros = list(PackedDataset(reader, 64, max_batch_tokens=100).epoch(0))
    assert all(m.batch.num_tokens <= 100 for m in micros)
    assert [m.num_examples for m in micros if m.is_last] == [64, 64, 64, 7]
    assert len(micros) > 8


def test_emptied_batch_keeps_step_and_columns_and_weighs_nothing(reader):
    [micro] = list(PackedDataset(reader, 199).epoch(0))
    emptied = micro.emptied()
    assert emptied.is_empty
    assert not micro.is_empty
    assert set(emptied.batch.sequence_data) == set(micro.batch.sequence_data)
    assert (emptied.step, emptied.num_examples) == (micro.step, micro.num_examples)


def test_epoch_labels_and_tokens_travel_with_their_rows(reader, table, tokenizer):
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    expected = tokenizer.encode(*texts)
    ends = np.cumsum(expected.lengths)
    for micro in PackedDataset(reader, 50, max_batch_tokens=200).epoch(0):
        batch, start = micro.batch, 0
        assert batch.sequence_data["label"].tolist() == batch.sequence_data["row"].tolist()
        for row, length in zip(batch.sequence_data["row"], batch.lengths):
            wanted = expected.token_ids[ends[row] - expected.lengths[row] : ends[row]]
            assert batch.token_ids[start : start + length].tolist() == wanted.tolist()
            start += length


def test_epoch_list_columns_travel_as_matrices(table, tokenizer, tmp_path):
    logits = np.arange(2 * 199, dtype=np.float32).reshape(-1, 2)
    wide = table.append_column("teacher", pa.array(logits.tolist(), pa.list_(pa.float64())))
    files = ParquetTable.open(tiny.write_corpus(tmp_path, wide, files=2))
    reader = PairReader(files, tokenizer, columns=("label", "teacher"))
    for rank in range(3):
        for micro in PackedDataset(reader, 2, rank=rank, world_size=3).epoch(0):
            given = micro.batch.sequence_data["teacher"]
            assert (given.shape, given.dtype) == ((len(micro.batch), 2), np.float32)
            if not micro.is_empty:
                assert given.tolist() == logits[micro.batch.sequence_data["row"]].tolist()


def test_mean_length_is_that_of_all_pairs_or_of_as_many_spread_over_them(reader, table, tokenizer):
    lengths = tokenizer.encode(*(table[c].to_pylist() for c in ("question", "candidate"))).lengths
    dataset = PackedDataset(reader, 9)
    assert dataset.mean_length() == pytest.approx(lengths.mean())
    assert dataset.mean_length(3) == pytest.approx(lengths[[0, 99, 198]].mean())


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be at least 1, not 0"),
        (
            {"global_batch_size": 8, "max_batch_tokens": 39},
            "max_batch_tokens must be at least 40, .* not 39",
        ),
    ],
)
def test_dataset_settings_out_of_range_are_refused(reader, wrong, problem):
    with pytest.raises(ConfigError, match=problem):
        PackedDataset(reader, **wrong)


def test_pairs_have_the_weight_of_their_table(files, tokenizer):
    reader = PairReader(files, tokenizer, weights=((60, 1.0), (1, 0.5), (138, 0.25)))
    weights = reader.encode(np.array([198, 0, 59, 60, 61])).columns["weight"]
    assert weights.tolist() == [0.25, 1.0, 1.0, 0.5, 0.25]
    assert weights.dtype == np.float32
    assert "weight" not in PairReader(files, tokenizer).encode(np.array([0])).columns


@pytest.fixture
def teachers(table, tmp_path) -> list[ParquetTable]:
    """Two teachers; the logits of a row are its number, and its number and a thousand."""
    folders = []
    for teacher in range(2):
        logits = [pa.array(np.arange(199.0) + 10_000 * teacher + 1_000 * i) for i in range(2)]
        columns = dict(zip(LOGIT_COLUMNS, logits))
        stored = pa.table({"candidate_id": table["candidate_id"], **columns})
        folders.append(tiny.write_corpus(tmp_path / str(teacher), stored, files=2, row_group=30))
    return [ParquetTable.open(folder) for folder in folders]


def test_pairs_have_the_logits_of_their_teachers(files, table, tokenizer, teachers, tmp_path):
    encoded = PairReader(files, tokenizer, teachers=tuple(teachers)).encode(np.array([198, 3]))
    assert encoded.columns[TEACHER_LOGITS].tolist() == [
        [198, 1198, 10_198, 11_198],
        [3, 1003, 10_003, 11_003],
    ]
    assert encoded.columns["label"].tolist() == [198, 3]
    labels = table.set_column(4, "label", table["label"].cast(pa.int8(), safe=False))
    files = ParquetTable.open(tiny.write_corpus(tmp_path / "small", labels))
    columns = PairReader(files, tokenizer).encode(np.array([3])).columns
    assert columns["label"].dtype == np.float32


def test_logits_of_another_table_are_refused(files, tokenizer, table, tmp_path):
    ids = table["candidate_id"].to_pylist()
    ids[7] = "another"
    stored = pa.table({"candidate_id": ids, **dict.fromkeys(LOGIT_COLUMNS, np.zeros(199))})
    teacher = ParquetTable.open(tiny.write_corpus(tmp_path / "teacher", stored))
    reader = PairReader(files, tokenizer, teachers=(teacher,))
    reader.encode(np.array([6, 8]))
    candidate_id = table["candidate_id"][7]
    for rows in ([6, 7], [7, 6]):
        with pytest.raises(
            CorpusError, match=f"row 7 is candidate {candidate_id}, its logits are of another"
        ):
            reader.encode(np.array(rows))


def test_teacher_logits_of_another_number_of_pairs_are_refused(files, tokenizer):
    with pytest.raises(CorpusError, match=r"logits of \[20\] pairs, the table has 199 pairs"):
        PairReader(files, tokenizer, teachers=(_first_rows(files, 20),))


def test_packed_pairs_keep_their_numbers_and_tokens(tokenizer, table):
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    batches = list(pack_sequences(tokenizer.encode(*texts), 200))
    assert sorted(r for b in batches for r in b.sequence_data["row"]) == list(range(199))
    assert all(b.num_tokens <= 200 for b in batches)
    alone = tokenizer.encode([texts[0][5]], [texts[1][5]])
    batch = next(b for b in batches if 5 in b.sequence_data["row"])
    place = batch.sequence_data["row"].tolist().index(5)
    start = int(batch.lengths[:place].sum())
    assert batch.token_ids[start : start + alone.lengths[0]].tolist() == alone.token_ids.tolist()
