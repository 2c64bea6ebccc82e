"""Tables of the user's own: every format gives the same rows, and mistakes name their lines."""

import gzip
import json
import logging
from hashlib import blake2b

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.hub_connection import HUB_TIMEOUT_S, connection_error
from as2ray.tables.loading import load_table
from as2ray.tables.schema import CANDIDATE_SCHEMA

ROWS = [
    {"q": "Who?", "text": 'Me, "myself"\nand I.', "y": "1"},
    {"q": "Why?", "text": "So.", "y": "0"},
    {"q": "Who?", "text": "It.", "y": "0"},
    {"q": "Why?", "text": "Because.", "y": "1"},
]
COLUMNS = {"question": "q", "candidate": "text", "label": "y"}


def write_delimited(path, delimiter, rows=ROWS):
    import csv

    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "wt", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_dataset(path):
    from datasets import Dataset

    Dataset.from_list([{**row, "y": int(row["y"])} for row in ROWS]).save_to_disk(path)
    return path


def sources(folder):
    import pandas
    from datasets import Dataset

    typed = [{**row, "y": bool(int(row["y"]))} for row in ROWS]
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "t.parquet")
    return {
        "csv": write_delimited(folder / "t.csv", ","),
        "semicolons": write_delimited(folder / "semicolons.csv", ";"),
        "tsv.gz": write_delimited(folder / "t.tsv.gz", "\t"),
        "jsonl": write_lines(folder / "t.jsonl", *map(json.dumps, typed)),
        "json": write_lines(folder / "t.json", json.dumps(typed)),
        "parquet": folder / "t.parquet",
        "folder": write_dataset(folder / "dataset"),
        "arrow": table,
        "pandas": pandas.DataFrame(typed),
        "dataset": Dataset.from_list(typed),
        "list": [{**row, "y": float(row["y"])} for row in ROWS],
    }


def test_every_format_gives_the_same_table(tmp_path):
    tables = {n: load_table(s, columns=COLUMNS) for n, s in sources(tmp_path).items()}
    first = tables["csv"]
    assert first["question_id"][0].as_py() == blake2b(b"Who?", digest_size=8).hexdigest()
    assert first.schema == CANDIDATE_SCHEMA
    assert first["question"].to_pylist() == ["Who?", "Who?", "Why?", "Why?"]  # adjacent
    assert first["candidate"].to_pylist() == [ROWS[i]["text"] for i in (0, 2, 1, 3)]
    assert first["label"].to_pylist() == [1, 0, 0, 1]
    assert {name for name, table in tables.items() if table != first} == set()


def test_ids_that_are_missing_do_not_change_when_rows_are_added():
    before = load_table(ROWS, columns=COLUMNS).to_pylist()
    added = load_table([{"q": "New?", "text": "So.", "y": 1}, *ROWS], columns=COLUMNS).to_pylist()
    assert [row for row in added if row["question"] != "New?"] == before
    twice = load_table([*ROWS, ROWS[0]], columns=COLUMNS)["candidate_id"].to_pylist()
    assert len(set(twice)) == 5


def test_given_ids_stay_and_shared_document_ids_get_that_of_their_question():
    rows = [
        {"qid": i % 2, "query": f"q{i % 2}?", "candidate_id": "d", "answer": str(i)} for i in (0, 1)
    ]
    table = load_table([{**row, "label": 1} for row in rows])
    assert table["question_id"].to_pylist() == ["0", "1"]
    assert table["candidate_id"].to_pylist() == ["0/d", "1/d"]


def test_candidates_table_stays_as_it_is(tmp_path):
    table = tiny.candidates(3).append_column("title", pa.array(["t"] * 15))
    assert load_table(table) == table
    assert load_table(tiny.write_corpus(tmp_path / "t", table)) == table
    with_score = table.append_column("score", pa.array([0.5] * 15))  # as `as2ray annotate` writes
    assert load_table(with_score) == table


def test_index_of_a_data_frame_is_a_column_if_it_has_the_name_of_one():
    table = tiny.candidates(2)
    frame = table.to_pandas()
    assert load_table(frame.set_index("question")) == load_table(frame) == table
    assert load_table(frame[::-1]).column_names == table.column_names


def test_graded_labels_need_the_lowest_grade_of_an_answer():
    rows = [
        {"question": "q?", "text": str(i), "label": grade} for i, grade in enumerate([0, 3, 2, 1])
    ]
    table = load_table(rows, min_positive_grade=2)
    assert (table["label"].to_pylist(), table["grade"].to_pylist()) == (
        *([0, 1, 1, 0], [0, 3, 2, 1]),
    )
    with_ids = [{**row, "question_id": "q", "candidate_id": row["text"]} for row in rows]
    renamed = [{**row, "candidate": row["text"]} for row in with_ids]
    for given in (with_ids, renamed):
        assert load_table(given, min_positive_grade=2)["grade"].to_pylist() == [0, 3, 2, 1]
    with pytest.raises(CorpusError, match="row 2: label '3' without min_positive_grade"):
        load_table(rows)


BAD_LINES = (
    "question,text,label",
    '"Who\nis it?",me,1',  # lines 2 and 3
    "Who?,,1",
    "Who?,it,maybe",
    "Who?,it",
    ",it,0",
    "",
    "Who?,it,",
    "Who?,it,TRUE",
    f"Who?,{'x' * 100_001},0",
)


def test_bad_rows_are_counted_and_the_first_five_shown_with_their_lines(tmp_path, caplog):
    path = write_lines(tmp_path / "bad.csv", *BAD_LINES)
    with pytest.raises(CorpusError) as error:
        load_table(path)
    assert str(error.value).splitlines() == [
        f"{path}: 6 of 8 lines cannot be used; correct them, or allow them with max_bad_records 6",
        "  line 4: no text as candidate",
        "  line 5: label 'maybe' is neither a number nor true, false, yes, no",
        "  line 6: 2 fields, and the header has 3",
        "  line 7: no text as question",
        "  line 9: label ''",
    ]
    with caplog.at_level(logging.WARNING):
        table = load_table(path, max_bad_records=6)
    assert table["candidate"].to_pylist() == ["me", "it"]
    [warning] = caplog.messages
    assert warning.startswith(
        f"{path}: 6 of 8 lines cannot be used and are left out\n  line 4: no text "
    )
    assert warning.endswith("  line 9: label ''")


@pytest.mark.parametrize("ids", [["a", "b", "c"], None])
def test_candidate_with_both_labels_is_kept_and_told(caplog, ids):
    rows = {"question": ["Who?"] * 3, "text": ["I.", "I.", "It."], "label": [1, 0, 0]}
    table = load_table(pa.table(rows | ({"candidate_id": ids} if ids else {})))
    assert table["label"].to_pylist() == [1, 0, 0]
    [warning] = caplog.messages
    assert warning.endswith(" 1 candidates have both labels, such as 'I.' of the question 'Who?'")


def test_lines_after_one_that_cannot_be_read_are_read(tmp_path):
    long = f"q?,{'x' * 200_000},0"
    path = write_lines(tmp_path / "t.csv", "question,text,label", "q?,a,1", long, "q?,b,0")
    assert load_table(path, max_bad_records=1)["candidate"].to_pylist() == ["a", "b"]


def test_quotation_marks_of_a_tsv_are_plain_unless_they_enclose_fields(tmp_path):
    texts = ['"So," he said.', "It.", '"Yes."', 'A 5" pipe.', '"Open', 'It is 5"']
    lines = [f"q?\t{text}\t{i % 2}" for i, text in enumerate(texts)]
    path = write_lines(tmp_path / "t.tsv", "question\ttext\tlabel", *lines)
    assert load_table(path)["candidate"].to_pylist() == texts
    two_marks = write_lines(tmp_path / "two.tsv", "question\ttext\tlabel", *lines[4:])
    assert load_table(two_marks)["candidate"].to_pylist() == texts[4:]
    rows = [{"question": "q?", "text": f"{text}\n.", "label": 1} for text in texts]
    written = write_delimited(tmp_path / "written.tsv", "\t", rows)
    assert load_table(written)["candidate"].to_pylist() == [f"{text}\n." for text in texts]


def test_quotation_mark_that_is_not_closed_names_its_line_and_counts_the_lines_after_it(tmp_path):
    lines = [f"q?,{i},1" for i in range(9)]
    path = write_lines(tmp_path / "t.csv", "question,text,label", 'q?,"5 inches,0', *lines)
    with pytest.raises(CorpusError) as error:
        load_table(path, max_bad_records=9)
    assert str(error.value).splitlines()[:3] == [
        f"{path}: 10 of 10 lines cannot be used",
        "  line 2: a quotation mark is not closed (unexpected end of data)",
        "  line 3: read as part of line 2",
    ]
    write_lines(path, "question,text,label", *lines[:2], 'q?,"5 inches,0', *lines, 'q?,"a, b",0')
    with pytest.raises(CorpusError, match=r"11 of 13 lines(.|\n)*line 4: a quotation mark is not"):
        load_table(path)
    assert load_table(path, max_bad_records=11)["candidate"].to_pylist() == ["0", "1"]


def test_labels_may_be_words_and_a_file_without_a_good_row_is_not_to_be_allowed():
    rows = [{"question": "q?", "text": text, "label": text} for text in ("Yes", "no", "TRUE", "0")]
    assert load_table(rows)["label"].to_pylist() == [1, 0, 1, 0]
    with pytest.raises(CorpusError) as error:
        load_table([{"question": "q?", "text": "t", "label": "relevant"}])
    assert "1 of 1 rows cannot be used\n" in str(error.value)
    table = pa.Table.from_pylist([{"question": "q?", "text": "t", "label": n} for n in ("1", "?")])
    with pytest.raises(CorpusError, match=r"1 of 2 rows(.|\n)*row 2: label '\?'"):
        load_table(table)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("question,text,label\n", "has no lines but its columns' names"),
        ("question,text,label\rq?,a,1\r", "line 1: new-line character"),
        (f"question,text,label\n{'x' * 200_000},a,1\n", "line 2: field larger than field limit"),
        ("question,text,label\nq?,a,inf\n", "line 2: label 'inf' is neither"),
    ],
)
def test_file_without_a_usable_line_is_one_error(tmp_path, text, problem):
    (tmp_path / "t.csv").write_text(text, newline="")
    with pytest.raises(CorpusError, match=problem):
        load_table(tmp_path / "t.csv", min_positive_grade=2)


def test_bad_json_lines_are_bad_records(tmp_path):
    good = json.dumps({"question": "q?", "text": "t", "label": 1})
    path = write_lines(tmp_path / "t.jsonl", good, "{", "", "[1]", '{"question": "q?"}')
    with pytest.raises(
        CorpusError,
        match=r"3 of 4 lines(.|\n)*line 2: no JSON object(.|\n)*line 4(.|\n)*line 5: label None",
    ):
        load_table(path)
    assert load_table(path, max_bad_records=3).num_rows == 1


def test_value_of_a_record_that_is_no_text_is_a_bad_record():
    row = {"question": "q?", "text": "t", "label": np.int64(1), "more": ["a", object()]}
    values = [float("nan"), ["t"], {"t": 1}, None, float("inf")]
    with pytest.raises(CorpusError, match=r"5 of 6 rows(.|\n)*row 2: no text as candidate"):
        load_table([row, *({**row, "text": value} for value in values)])
    numbers = [
        {**row, "text": value} for value in (3, np.float32(0.5), np.True_, 1.0, np.str_("t"))
    ]
    texts = load_table(numbers)["candidate"].to_pylist()
    assert texts == ["3", "0.5", "true", "1.0", "t"]


def test_record_with_half_a_character_is_a_bad_record(tmp_path):
    good = {"question": "q?", "text": "t", "label": 1}
    lines = [json.dumps(row) for row in ({**good, "text": "\ud83d broken"}, good, {"\ud83d": 1})]
    path = write_lines(tmp_path / "t.jsonl", *lines)
    with pytest.raises(CorpusError, match=r"2 of 3 lines(.|\n)*line 1: broken characters: .utf-8"):
        load_table(path)
    assert load_table(path, max_bad_records=2).num_rows == 1


def test_names_of_columns_are_recognized_whatever_their_capitals():
    row = {"Question ID": "1", "Query": "no", "Question": "q?", "Sentence": "s", "Label": 1}
    table = load_table([row])
    assert table["question_id"].to_pylist() == ["1"]
    assert table["question"].to_pylist() == ["q?"]
    exact = load_table([{**row, "question": "why?"}])
    assert exact["question"].to_pylist() == ["why?"]
    with pytest.raises(CorpusError, match=r"none of \['sentence'\]"):
        load_table([row], columns={"candidate": "sentence"})


def test_table_without_a_name_is_not_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match="there is no table ''"):
        load_table("")


def test_question_id_with_two_questions_is_a_bad_record():
    row = {"question_id": "1", "question": "q?", "text": "t", "label": 1}
    with pytest.raises(CorpusError, match="row 2: another question"):
        load_table([row, {**row, "question": "other?"}])


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("train.cvs", {}, r"there is no table .*\n  fix: did you mean 'train.csv'\?"),
        ("", {}, r"no Parquet files\n  fix: give a file: .*csv"),
        ("train.csv", {"columns": {"qestion": "q"}}, "did you mean 'question'"),
        (
            "train.csv",
            {"columns": {"question": "qq"}},
            r"did you mean 'q'\? .*columns {\"question\": ",
        ),
        ("train.csv", {}, r"\['q', 'text', 'y'\], and none of \['question', 'query'\]"),
        ("notes.doc", {}, r"notes\.doc is none of \.csv, .*, \.json, \.parquet, and no folder"),
        (
            "train.csv",
            {"columns": {"label": "z"}},
            r"train\.csv has the columns \['q', 'text', 'y'\]",
        ),
        ("latin.csv", {}, r"damaged or not UTF-8(.|\n)*save it as UTF-8"),
        ("empty.csv", {}, "has the columns"),
    ],
)
def test_mistake_in_a_source_is_one_sentence_with_its_fix(tmp_path, source, options, problem):
    write_delimited(tmp_path / "train.csv", ",")
    (tmp_path / "notes.doc").write_text("a")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "latin.csv").write_bytes("q,text,y\nWo?,hier,f\xfcr".encode("latin1"))
    with pytest.raises(CorpusError, match=problem) as error:
        load_table(tmp_path / source, **options)
    assert len(str(error.value).splitlines()) <= 3


def test_source_that_is_no_path_is_named_by_its_type():
    with pytest.raises(CorpusError, match=r"^the list has the columns \['a'\]"):
        load_table([{"a": 1}])
    with pytest.raises(CorpusError, match=r"^the int is no table"):
        load_table(3)
    with pytest.raises(CorpusError, match=r"^the dict has the splits \['dev', 'train'\]"):
        load_table({"train": [], "dev": []})


def test_data_set_of_splits_names_them(tmp_path):
    from datasets import Dataset, DatasetDict

    splits = DatasetDict({"train": Dataset.from_list(ROWS)})
    splits.save_to_disk(tmp_path / "d")
    with pytest.raises(CorpusError, match="splits"):
        load_table(splits)
    with pytest.raises(CorpusError, match="d/train"):
        load_table(tmp_path / "d")
    assert load_table(tmp_path / "d/train", columns=COLUMNS).num_rows == 4


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (["entailment", "not_entailment"], True),
        (["answer", "No"], True),
        (["1", "0"], True),
        (["0", "1"], False),
        (["no", "yes"], False),
        (["bad", "notable"], False),
    ],
)
def test_class_of_answers_with_the_name_of_no_answer_is_refused(names, is_refused, tmp_path):
    from datasets import ClassLabel, Dataset

    rows = [{"question": "q?", "text": str(label), "label": label} for label in (0, 1)]
    dataset = Dataset.from_list(rows).cast_column("label", ClassLabel(names=names))
    pq.write_table(dataset.data.table, tmp_path / "t.parquet")
    for source in (dataset, tmp_path / "t.parquet"):
        if is_refused:
            with pytest.raises(CorpusError, match=rf"1 of 'label' would be .* named '{names[1]}'"):
                load_table(source)
        else:
            assert load_table(source)["label"].to_pylist() == [0, 1]


def test_folder_with_parquet_files_may_have_others_and_one_without_is_refused(tmp_path):
    (tmp_path / "part").mkdir()
    write_delimited(tmp_path / "notes.csv", ",")
    with pytest.raises(CorpusError, match=r"has no Parquet files(.|\n)*notes\.csv"):
        load_table(tmp_path)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    assert load_table(tmp_path, columns=COLUMNS).num_rows == 4


def test_data_set_of_the_hub_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("AS2RAY_HUB", str(tmp_path))
    (tmp_path / "me/answers").mkdir(parents=True)
    write_lines(tmp_path / "me/answers/train.jsonl", *map(json.dumps, ROWS))
    assert load_table("hub:me/answers", columns=COLUMNS).num_rows == 4
    with pytest.raises(CorpusError, match="cannot be read from the hub"):
        load_table("hub:me/answers:test")


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("https://huggingface.co", ("huggingface.co", 443)),
        ("http://mirror", ("mirror", 80)),
        ("http://mirror:8080/hub", ("mirror", 8080)),
    ],
)
def test_hub_is_tried_at_the_port_of_its_address(endpoint, address, monkeypatch):
    tried = []

    def refuse(*arguments):
        tried.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr("as2ray.tables.hub_connection.create_connection", refuse)
    monkeypatch.setattr("as2ray.tables.hub_connection.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert connection_error() == "no network"
    assert tried == [(address, HUB_TIMEOUT_S)]


def test_hub_is_not_tried_offline():
    assert connection_error() == "HF_HUB_OFFLINE is set"


def test_data_set_is_not_sought_for_half_a_minute_where_no_hub_can_be_reached(monkeypatch):
    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr("as2ray.tables.hub_connection.create_connection", refuse)
    monkeypatch.setattr("as2ray.tables.hub_connection.getproxies", dict)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it tries again"))
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", False)
    with pytest.raises(CorpusError, match="cannot be read from the hub"):
        load_table("hub:nobody/nothing:train")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"columns": "q"}, "columns 'q' must be a dictionary"),
        ({"columns": ["q", "text", "y"]}, "must be a dictionary"),
        ({"columns": {"question": 5}}, "must be a dictionary of names"),
        ({"min_positive_grade": "2"}, "min_positive_grade='2' must be a number"),
        ({"max_bad_records": "2"}, "max_bad_records='2' an integer"),
        ({"max_bad_records": -1}, "max_bad_records=-1 an integer of at least 0"),
    ],
)
def test_argument_of_another_type_is_refused(argument, problem):
    with pytest.raises(ConfigError, match=problem):
        load_table(ROWS, **argument)
