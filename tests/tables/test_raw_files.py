import gzip
import json

import pyarrow as pa
import pytest

from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.raw_files import (
    RawFileNotFoundError,
    find_file,
    iter_arrow,
    open_text,
    read_hub,
    read_json_file,
    read_json_lines,
    read_json_records,
    read_tsv,
    require_file,
    require_keys,
    value_errors,
)


def test_first_name_that_exists_is_found_plain_before_compressed(tmp_path):
    assert find_file(tmp_path, ["a", "b"]) is None
    for name in ("b.gz", "b", "a.gz"):
        (tmp_path / name).touch()
        assert find_file(tmp_path, ["a", "b"]) == tmp_path / name
    (tmp_path / "folder").mkdir()
    assert find_file(tmp_path, ["folder"]) is None
    assert find_file(tmp_path / "b", ["a"]) == require_file(tmp_path / "b", ["a"]) == tmp_path / "b"
    with pytest.raises(RawFileNotFoundError, match=r"no c or d \(or with \.gz\) in "):
        require_file(tmp_path, ["c", "d"])


def test_text_is_decompressed_and_only_a_line_feed_ends_a_line(tmp_path):
    text = "first\rstill first\u2028\r\nsécond\n"
    plain, packed = tmp_path / "a", tmp_path / "a.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + text.encode())
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        with open_text(path) as lines:
            assert list(lines) == ["first\rstill first\u2028\r\n", "sécond\n"]


def test_damaged_text_is_one_error_with_its_path(tmp_path):
    latin, cut = tmp_path / "latin", tmp_path / "cut.gz"
    latin.write_bytes("sécond".encode("latin-1"))
    cut.write_bytes(gzip.compress(b"text" * 1000)[:-9])
    for path in (latin, cut, tmp_path / "absent"):
        with (
            pytest.raises(CorpusError, match=f"{path} is damaged or not UTF-8"),
            open_text(path) as f,
        ):
            f.read()


def test_values_of_another_type_are_one_error_with_their_source():
    for raised in (ValueError, TypeError, AttributeError, KeyError, IndexError):
        expected = pytest.raises(CorpusError, match=rf"^line 3: {raised.__name__}: .*why")
        with expected, value_errors("line 3"):
            raise raised("why")
    with pytest.raises(CorpusError) as error, value_errors("source"):
        raise ValueError("x" * 1000)
    assert len(error.value.problem) == 300


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tab_separated_lines_are_strings_with_their_quotation_marks(
    tmp_path, monkeypatch, has_header, suffix
):
    monkeypatch.setattr(raw_files, "BLOCK_BYTES", 64)
    rows = [(str(number), f'"a {number}' if number % 2 else "") for number in range(20)]
    lines = [("id", "text")] * has_header + rows
    content = "".join("\t".join(line) + "\n" for line in lines).encode()
    path = tmp_path / f"file.tsv{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    tables = list(read_tsv(path, ["id", "text"], has_header))
    assert len(tables) > 1
    table = pa.concat_tables(tables)
    assert table.schema.types == [pa.string(), pa.string()]
    assert list(zip(*table.to_pydict().values())) == rows


def test_tab_separated_file_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "file.tsv"
    path.write_text("id\ttext\n1\ta\n")
    with pytest.raises(CorpusError, match=r"columns \['id', 'text'\]; expected \['id', 'label'\]"):
        list(read_tsv(path, ["id", "label"], True))
    path.write_text("1\ta\n2\n")
    with pytest.raises(CorpusError, match=r"file\.tsv is damaged.*Expected 2 columns, got 1"):
        list(read_tsv(path, ["id", "text"], False))


def test_json_lines_are_numbered_as_in_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": 1}\n\n \n[2]\n')
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (4, [2])]
    for text, problem in (
        ('1\n{"a": }\n', "line 2 is not JSON: Expecting value at character 6"),
        ("1\n\n" + "9" * 5000 + "\n", "line 3: Exceeds the limit"),
        ("[" * 200_000 + "\n", "line 1: "),
    ):
        path.write_text(text)
        with pytest.raises(CorpusError, match=f"{path}, {problem}"):
            list(read_json_lines(path))


VALUES = [{"text": "a, [b] ]", "number": 4.5}, [1, 2], "three,", None]


@pytest.mark.parametrize("block_size", [1, 7, 1 << 20])
@pytest.mark.parametrize("form", ["list", "indented", "lines", "lines after blanks"])
def test_json_values_are_read_one_at_a_time(tmp_path, block_size, form):
    lines = "\n".join(map(json.dumps, VALUES))
    text = {
        "list": json.dumps(VALUES),
        "indented": "\n " + json.dumps(VALUES, indent=1) + "\n",
        "lines": lines,
        "lines after blanks": "\n\t " + lines + "\n",
    }[form]
    (tmp_path / "file").write_text(text)
    assert list(read_json_records(tmp_path / "file", block_size)) == VALUES


def test_json_list_that_is_cut_is_refused_behind_its_whole_values(tmp_path):
    path = tmp_path / "file"
    for text, problem in (
        ('[{"a": 1}, {"a": 2},', "the JSON list does not end after 2 values"),
        ('[{"a": 1}, {"a": 2}, {"a"', "line 3 is not JSON"),
        ("[", "the JSON list does not end after 0 values"),
        ('{"a": 1}\n{"a"', "line 2 is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(CorpusError, match=f"{path}(, |: ){problem}"):
            list(read_json_records(path))
    for text in ("[1, " + "9" * 5_000 + "]", "[1, " + "[" * 100_000):
        path.write_text(text)
        with pytest.raises(CorpusError, match=f"{path}, value 2: "):
            list(read_json_records(path))
    for text in ("", "[]", " [ ] "):
        path.write_text(text)
        assert list(read_json_records(path)) == []


def test_json_file_is_one_value(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a":\n 1}')
    assert read_json_file(path) == {"a": 1}
    path.write_text('{"a":\n 1')
    with pytest.raises(CorpusError, match=r"line 2 is not JSON(.|\n)*fix: correct it"):
        read_json_file(path)


def test_keys_of_an_object_are_its_values_in_order():
    assert require_keys({"a": 1, "b": None, "c": 3}, ["c", "b"], "here") == (3, None)
    for record, content in (({"b": 1, "a": 2}, r"\['a', 'b'\]"), ([1], "list"), (None, "NoneType")):
        with pytest.raises(CorpusError, match=rf"^here: {content}, without \['c'"):
            require_keys(record, ["c"], "here")


def test_copy_of_a_hub_s_dataset_is_read_by_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(f'{{"a": {number}}}\n' for number in range(5)))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(raw_files.HUB_COPIES, str(tmp_path / "hub"))
    tables = list(read_hub("owner/name", "train", revision="ignored", batch_size=2))
    assert [table.num_rows for table in tables] == [2, 2, 1]
    assert pa.concat_tables(tables)["a"].to_pylist() == [0, 1, 2, 3, 4]
    with pytest.raises(CorpusError, match="the dataset owner/name cannot be read from the hub"):
        list(read_hub("owner/name", "test"))
    with pytest.raises(CorpusError, match="dataset owner/other@abc cannot be read"):
        list(read_hub("owner/other", "train", revision="abc"))


def test_dataset_of_the_hub_is_asked_for_at_its_revision(monkeypatch):
    calls = []

    def refuse(*arguments, **options):
        calls.append((*arguments, options))
        raise OSError("no hub")

    monkeypatch.delenv(raw_files.HUB_COPIES, raising=False)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(CorpusError, match="no hub"):
        list(read_hub("owner/name", "train", "small", "abc"))
    assert calls == [("owner/name", "small", {"split": "train", "revision": "abc"})]


def test_dataset_of_the_hub_that_needs_a_script_is_read_by_its_conversion(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "name.py").write_text("import datasets\n")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(raw_files.HUB_COPIES, str(tmp_path / "hub"))
    with pytest.raises(CorpusError, match="hub_revision=refs/convert/parquet"):
        list(read_hub("owner/name", "train"))


def test_dataset_gives_arrow_tables():
    from datasets import Dataset

    tables = list(iter_arrow(Dataset.from_dict({"a": [1, 2, 3]}), 2))
    assert [table.to_pydict() for table in tables] == [{"a": [1, 2]}, {"a": [3]}]
