from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from as2ray.data import packed_dataset as stream_module
from as2ray.data.packed_dataset import Stream, pack_pairs
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer


@pytest.fixture(scope="module")
def tokenizer(published) -> PairTokenizer:
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 40, 20)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """199 rows; the label of a row is its number."""
    made = tiny.candidates(40).slice(0, 199)
    numbers = pa.array(np.arange(199, dtype=np.float32))
    return made.set_column(4, "label", numbers)


@pytest.fixture(scope="module")
def files(table, tmp_path_factory) -> ParquetTable:
    folder = tmp_path_factory.mktemp("pairs")
    return ParquetTable.open(tiny.write_corpus(folder, table, files=3, row_group=20))


@pytest.fixture
def small_spans(monkeypatch):
    """Spans of 16 rows, so that 199 rows are several, and the last is not whole."""
    monkeypatch.setattr(stream_module, "SPAN", 16)


def rows_by_step(stream: Stream, epoch: int = 0, start: int = 0) -> dict[int, list[int]]:
    """Real rows of each step, in the order in which they come."""
    found: dict[int, list[int]] = {}
    for micro in stream.epoch(epoch, start):
        rows = micro.batch.sequence_data["row"].tolist()
        found.setdefault(micro.step, []).extend(r for r in rows if r >= 0)
    return found


def content(stream: Stream, epoch: int = 0, start: int = 0) -> list[tuple[object, ...]]:
    """All that comes, comparable."""
    return [
        (m.step, m.pairs, m.last, m.batch.sequence_data["row"].tolist(), m.batch.token_ids.tolist())
        for m in stream.epoch(epoch, start)
    ]


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 4),
    batch=st.integers(1, 70),
    window=st.integers(1, 250),
    rows=st.sampled_from([1, 2, 15, 16, 17, 64, 198, 199]),
    epoch=st.integers(0, 3),
)
def test_epoch_any_ranks_and_sizes_gives_every_pair_once(
    files, tokenizer, ranks, batch, window, rows, epoch
):
    # A PairFiles that knows of fewer rows reads only those.
    kept = _first_rows(files, rows)
    stream = Stream(kept, tokenizer, batch, max_tokens=120, window=window, ranks=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "SPAN", 16)
        shares = [rows_by_step(replace(stream, rank=r), epoch) for r in range(ranks)]
        alone = rows_by_step(replace(stream, ranks=1), epoch)
    assert all(list(share) == list(range(stream.steps)) for share in shares)
    together = {s: [r for share in shares for r in share[s]] for s in range(stream.steps)}
    assert sorted(r for step in together.values() for r in step) == list(range(rows))
    assert {s: sorted(r) for s, r in together.items()} == {s: sorted(r) for s, r in alone.items()}
    assert all(len(step) == batch for step in list(together.values())[:-1])


def _first_rows(files: ParquetTable, rows: int) -> ParquetTable:
    ends = np.minimum(np.cumsum(files.row_counts), rows)
    return ParquetTable(files.paths, tuple(np.diff(ends, prepend=0).tolist()))


def test_epoch_shares_of_a_step_differ_by_at_most_one_pair(files, tokenizer):
    shares = [rows_by_step(Stream(files, tokenizer, 30, rank=r, ranks=4)) for r in range(4)]
    for step in range(7):
        sizes = [len(share[step]) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.usefixtures("small_spans")
def test_epoch_same_seed_and_number_comes_in_the_same_order(files, tokenizer):
    stream = Stream(files, tokenizer, 16, window=64, seed=3)
    assert content(stream, 2) == content(stream, 2)


@pytest.mark.usefixtures("small_spans")
def test_epoch_another_number_or_seed_comes_in_another_order(files, tokenizer):
    stream = Stream(files, tokenizer, 16, window=64, seed=3)
    orders = [content(stream, 0), content(stream, 1), content(replace(stream, seed=4), 0)]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@pytest.mark.usefixtures("small_spans")
def test_epoch_is_mixed_over_the_whole_corpus(files, tokenizer):
    first = rows_by_step(Stream(files, tokenizer, 64, window=64))[0]
    assert max(first) - min(first) > 100
    assert first != sorted(first)


@pytest.mark.usefixtures("small_spans")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("window", [16, 48, 1000])
def test_epoch_from_any_step_on_equals_the_tail(files, tokenizer, ranks, window):
    for rank in range(ranks):
        stream = Stream(files, tokenizer, 16, 64, window=window, rank=rank, ranks=ranks)
        whole = content(stream, 1)
        for start in range(stream.steps + 1):
            assert content(stream, 1, start) == [m for m in whole if m[0] >= start]


def test_epoch_more_ranks_than_pairs_of_a_step_gives_placeholders(files, tokenizer):
    stream = Stream(files, tokenizer, batch=2, window=4, rank=2, ranks=3)
    micros = list(stream.epoch(0))
    assert len(micros) == stream.steps == 100
    for micro in micros:
        assert micro.empty
        assert micro.last
        assert micro.batch.sequence_data["row"].tolist() == [-1]
        assert micro.batch.sequence_data["label"].shape == (1,)
        assert micro.batch.num_tokens == 1
    assert [m.pairs for m in micros] == [2] * 99 + [1]


def test_epoch_share_over_the_token_budget_comes_in_several_batches(files, tokenizer):
    micros = list(Stream(files, tokenizer, batch=64, max_tokens=100).epoch(0))
    assert all(m.batch.num_tokens <= 100 for m in micros)
    assert [m.pairs for m in micros if m.last] == [64, 64, 64, 7]
    assert len(micros) > 8


def test_emptied_batch_keeps_step_and_columns_and_weighs_nothing(files, tokenizer):
    [micro] = list(Stream(files, tokenizer, batch=199).epoch(0))
    emptied = micro.emptied()
    assert emptied.empty
    assert not micro.empty
    assert set(emptied.batch.sequence_data) == set(micro.batch.sequence_data)
    assert (emptied.step, emptied.pairs) == (micro.step, micro.pairs)


def test_epoch_labels_and_tokens_travel_with_their_rows(files, table, tokenizer):
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    expected = tokenizer.encode(*texts)
    ends = np.cumsum(expected.lengths)
    for micro in Stream(files, tokenizer, batch=50, max_tokens=200).epoch(0):
        batch, start = micro.batch, 0
        assert batch.sequence_data["label"].tolist() == batch.sequence_data["row"].tolist()
        for row, length in zip(batch.sequence_data["row"], batch.lengths):
            wanted = expected.token_ids[ends[row] - expected.lengths[row] : ends[row]]
            assert batch.token_ids[start : start + length].tolist() == wanted.tolist()
            start += length


def test_epoch_list_columns_travel_as_matrices(table, tokenizer, tmp_path):
    logits = np.arange(2 * 199, dtype=np.float32).reshape(-1, 2)
    wide = table.append_column("teacher", pa.array(logits.tolist(), pa.list_(pa.float32())))
    files = ParquetTable.open(tiny.write_corpus(tmp_path, wide, files=2))
    for rank in range(3):
        stream = Stream(files, tokenizer, 2, columns=("label", "teacher"), rank=rank, ranks=3)
        for micro in stream.epoch(0):
            given = micro.batch.sequence_data["teacher"]
            assert given.shape == (len(micro.batch), 2)
            if not micro.empty:
                assert given.tolist() == logits[micro.batch.sequence_data["row"]].tolist()


def test_read_rows_over_files_and_groups_come_in_the_order_asked(files, table):
    numbers = np.random.default_rng(0).integers(0, 199, 80)
    got = files.read(numbers, ["candidate", "label"])
    assert got["label"].to_pylist() == numbers.tolist()
    assert got["candidate"].to_pylist() == table["candidate"].take(pa.array(numbers)).to_pylist()


def test_read_a_column_that_a_file_lacks_is_refused_by_name(files):
    with pytest.raises(CorpusError, match="teacher"):
        files.read(np.arange(3), ["candidate", "teacher"])


def test_find_takes_folders_and_files_in_order(files, table, tmp_path):
    extra = tmp_path / "extra.parquet"
    pq.write_table(table.slice(0, 7), extra)
    found = ParquetTable.open([extra, *files.paths[:1]])
    assert found.row_counts == (7, files.rows[0])
    assert len(found) == 7 + files.rows[0]


def test_find_truncated_file_is_refused_by_name(tmp_path, table):
    path = tiny.write_corpus(tmp_path, table) / "part-000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorpusError, match=r"part-000\.parquet"):
        ParquetTable.open(tmp_path)


@pytest.mark.parametrize("rows", [None, 0])
def test_find_nothing_to_read_is_refused(tmp_path, table, rows):
    if rows is not None:
        pq.write_table(table.slice(0, rows), tmp_path / "empty.parquet")
    with pytest.raises(CorpusError, match="0 rows"):
        ParquetTable.open(tmp_path)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 8, "max_tokens": 39}])
def test_stream_settings_out_of_range_are_refused(files, tokenizer, wrong):
    with pytest.raises(ConfigError, match="batch="):
        Stream(files, tokenizer, **wrong)


def test_pack_pairs_numbers_the_pairs_as_given(tokenizer, table):
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    batches = list(pack_pairs(tokenizer, *texts, max_tokens=200))
    assert sorted(r for b in batches for r in b.sequence_data["row"]) == list(range(199))
    assert all(b.num_tokens <= 200 for b in batches)
    alone = tokenizer.encode([texts[0][5]], [texts[1][5]])
    batch = next(b for b in batches if 5 in b.sequence_data["row"])
    place = batch.sequence_data["row"].tolist().index(5)
    start = int(batch.lengths[:place].sum())
    assert batch.token_ids[start : start + alone.lengths[0]].tolist() == alone.token_ids.tolist()


def test_table_of_a_file_that_is_damaged_inside_is_refused_by_name(tmp_path, table):
    folder = tiny.write_corpus(tmp_path / "pairs", table)
    files, path = ParquetTable.open(folder), folder / "part-000.parquet"
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)
    for read in (files.to_table, lambda: files.take(np.arange(3), ["question"])):
        with pytest.raises(CorpusError, match=r"part-000\.parquet"):
            read()


def test_files_of_one_table_with_other_columns_are_refused(tmp_path):
    for name, kind in (("a", pa.int8()), ("b", pa.string())):
        values = pa.array([1]).cast(kind)
        pq.write_table(pa.table({"label": values}), tmp_path / f"{name}.parquet")
    files = ParquetTable.open(tmp_path)
    with pytest.raises(CorpusError, match="2 Parquet files of one table"):
        files.to_table()
    with pytest.raises(CorpusError, match="2 Parquet files of one table"):
        files.take(np.arange(2), ["label"])
