import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.errors import CorpusError
from as2ray.tables.parquet import ROW_GROUP_SIZE, ParquetTable, write_part


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return tiny.numbered_rows()


@pytest.fixture(scope="module")
def files(table, tmp_path_factory) -> ParquetTable:
    folder = tmp_path_factory.mktemp("pairs")
    return ParquetTable.open(tiny.write_corpus(folder, table, files=3, row_group=20))


def test_read_rows_over_files_and_groups_come_in_the_order_asked(files, table):
    numbers = np.random.default_rng(0).integers(0, 199, 80)
    taken = files.take(numbers, ["candidate", "label"])
    assert taken["label"].to_pylist() == numbers.tolist()
    assert taken.column_names == ["candidate", "label"]
    assert taken["candidate"].to_pylist() == table["candidate"].take(pa.array(numbers)).to_pylist()


def test_read_a_column_that_a_file_lacks_is_refused_by_name(files):
    with pytest.raises(CorpusError, match="teacher"):
        files.take(np.arange(3), ["candidate", "teacher"])


def test_find_takes_folders_and_files_in_order(files, table, tmp_path):
    extra = tmp_path / "extra.parquet"
    pq.write_table(table.slice(0, 7), extra)
    both = ParquetTable.open([extra, *files.paths[:1]])
    assert both.row_counts == (7, files.row_counts[0])
    assert len(both) == 7 + files.row_counts[0]


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


def test_find_a_table_that_is_not_there_is_refused_as_missing(tmp_path):
    with pytest.raises(CorpusError, match=r"there is no table .*nowhere$"):
        ParquetTable.open(tmp_path / "nowhere")


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
    with pytest.raises(CorpusError, match="2 Parquet files have different columns"):
        files.to_table()
    with pytest.raises(CorpusError, match="2 Parquet files have different columns"):
        files.take(np.arange(2), ["label"])


def test_row_groups_of_parts_begin_at_multiples_of_their_size_in_the_whole_table(tmp_path):
    rows, first_row = pa.table({"row": np.arange(2 * ROW_GROUP_SIZE)}), 3 * ROW_GROUP_SIZE - 5
    for first, sizes in ((first_row, [5, ROW_GROUP_SIZE, ROW_GROUP_SIZE - 5]), (0, [2_048] * 2)):
        write_part(rows, tmp_path / "part.parquet", first)
        metadata = pq.read_metadata(tmp_path / "part.parquet")
        assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == sizes
        assert metadata.row_group(0).column(0).compression == "ZSTD"
        assert pq.read_table(tmp_path / "part.parquet") == rows
    write_part(rows, tmp_path / "default.parquet")
    assert pq.read_metadata(tmp_path / "default.parquet").num_row_groups == 2


def test_files_of_several_folders_are_read_in_order(files, table, tmp_path):
    assert files.to_table()["label"] == table["label"]
    inner = tiny.write_corpus(tmp_path / "a" / "b", table.slice(0, 7))
    both = ParquetTable.open([tmp_path, str(inner)])
    assert both.row_counts == (7, 7)
    assert all(path.endswith("a/b/part-000.parquet") for path in both.paths)
