import pytest

from as2ray.corpora.annotated import SCHEMA
from as2ray.corpora.preparation import read_split
from as2ray.errors import CorpusError

ROW = {
    "question_id": "q",
    "question": "What is it?",
    "candidate_id": "q-0",
    "candidate": "It, he said.",
    "label": "1",
    "document_id": "d",
}


@pytest.fixture
def read(tmp_path):
    """Reads rows from a file: `read(row, ...)`."""

    def read(*rows: dict[str, str]):
        lines = [",".join(ROW), *(",".join(f'"{text}"' for text in row.values()) for row in rows)]
        (tmp_path / "dev.csv").write_text("\n".join(lines), encoding="utf-8")
        return read_split("annotated", "dev", tmp_path)

    return read


def test_annotated_rows_are_candidates_and_those_without_a_label_are_left_out(read):
    wrong, blank = {**ROW, "candidate_id": "q-1", "label": " 0 "}, {**ROW, "label": ""}
    table = read(ROW, blank, wrong)
    assert table.schema.equals(SCHEMA)
    assert table.to_pylist() == [{**ROW, "label": 1}, {**wrong, "label": 0}]


def test_annotated_row_of_another_label_is_refused_with_its_line(read):
    with pytest.raises(CorpusError, match=r"dev\.csv, line 3: label 'yes'; expected 0, 1"):
        read(ROW, {**ROW, "label": "yes"})


def test_annotated_row_with_an_open_quotation_mark_is_refused(read):
    with pytest.raises(CorpusError, match=r"dev\.csv, line 3: ',' expected after"):
        read(ROW, {**ROW, "candidate": 'It, "he said.'}, ROW)
    with pytest.raises(CorpusError, match=r"dev\.csv, line 3: unexpected end of data"):
        read(ROW, {**ROW, "document_id": 'd"'})


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_annotated_file_has_the_delimiter_of_its_header(tmp_path, delimiter):
    lines = [delimiter.join(ROW), delimiter.join(f'"{text}"' for text in ROW.values())]
    (tmp_path / "dev.csv").write_text("\n".join(lines), encoding="utf-8")
    assert read_split("annotated", "dev", tmp_path).to_pylist() == [{**ROW, "label": 1}]


def test_annotated_row_with_a_field_too_many_is_refused_but_not_an_empty_one(read):
    with pytest.raises(CorpusError, match=r"dev\.csv, line 3: more fields than the header has"):
        read(ROW, {**ROW, "candidate_id": "q-1", "more": "It"})
    assert read(ROW, {**ROW, "label": "", "more": ""}).num_rows == 1


def test_annotated_file_without_a_label_is_refused(read):
    with pytest.raises(CorpusError, match=r"dev\.csv: no row has a label.*\n.*0 or 1"):
        read({**ROW, "label": ""})


def test_annotated_file_without_a_column_is_refused_with_its_name(tmp_path):
    (tmp_path / "dev.csv").write_text("question,candidate,label\nq,c,1\n")
    problem = r"dev\.csv has no column question_id, candidate_id, document_id.*\n.*the first line"
    with pytest.raises(CorpusError, match=problem):
        read_split("annotated", "dev", tmp_path)


def test_annotated_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "dev.csv").write_bytes("question,candidate,label\nq,\u00fc,1\n".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"not UTF-8(.|\n)*a file of your own as UTF-8"):
        read_split("annotated", "dev", tmp_path)
