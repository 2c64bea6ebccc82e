from collections import Counter

import pyarrow as pa
import pytest

from as2ray.corpora.reader_utils import (
    assign_question_ids,
    assign_split_by_hash,
    candidate_schema,
    group_adjacent,
    group_on_disk,
    parse_labels,
    read_columns,
    select_columns,
    set_column,
    whole_questions,
)
from as2ray.errors import CorpusError
from as2ray.tables.schema import CANDIDATE_SCHEMA


def asked(*questions):
    """One row for each letter, with its number."""
    rows = [question for letters in questions for question in letters]
    table = pa.table({"question": rows, "row": range(len(rows))})
    sizes = [len(letters) for letters in questions]
    return [table.slice(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def test_questions_get_ids_through_all_tables_and_candidates_count_from_0():
    tables = list(assign_question_ids(asked("aab", "bcc", "c", "d"), "here"))
    assert all(tables)
    rows = pa.concat_tables(tables)
    assert rows["question_id"].to_pylist() == [
        f"q00000{number}" for number in (0, 0, 1, 1, 2, 2, 2, 3)
    ]
    assert [i.partition("-")[2] for i in rows["candidate_id"].to_pylist()] == list("01010120")
    assert rows["candidate_id"][4].as_py() == "q000002-0"
    assert rows["row"].to_pylist() == list(range(8))


def test_question_that_comes_again_later_is_refused():
    for tables in (asked("aba"), asked("aab", "ca")):
        with pytest.raises(CorpusError, match="here: the rows of the question 'a' are not adj"):
            list(assign_question_ids(tables, "here"))
    ids = [set_column(table, "question_id", table["question"]) for table in asked("aab", "bc")]
    assert [table["row"].to_pylist() for table in whole_questions(ids, "here")] == [
        *([0, 1], [2, 3], [4]),
    ]


def test_rows_of_a_question_are_brought_together_in_memory_and_on_disk():
    [table] = asked("abcabdca")
    grouped = group_adjacent(table)
    assert grouped["question"].to_pylist() == list("aaabbccd")
    assert grouped["row"].to_pylist() == [0, 3, 7, 1, 4, 2, 6, 5]
    for num_buckets in (1, 3, 64):
        parts = list(group_on_disk(asked("abca", "bd", "ca"), num_buckets))
        assert len(parts) == num_buckets
        rows_of = {q: r for part in parts for q, r in _rows_by_question(part)}
        assert rows_of == {"a": [0, 3, 7], "b": [1, 4], "c": [2, 6], "d": [5]}
    assert list(group_on_disk([], 3)) == []


def _rows_by_question(table):
    questions, rows = table["question"].to_pylist(), table["row"].to_pylist()
    for question in dict.fromkeys(questions):
        places = [place for place, other in enumerate(questions) if other == question]
        assert places == list(range(places[0], places[-1] + 1))
        yield question, [rows[place] for place in places]


def test_columns_and_labels_of_a_release_get_our_names_and_numbers():
    release = pa.table({"q": ["a", "b"], "is_answer": ["yes", "no"], "other": [1, 2]})
    columns = {"label": "is_answer", "question": "q"}
    table = select_columns(release, columns, {"no": 0, "yes": 1}, "here")
    assert table.to_pydict() == {"label": [1, 0], "question": ["a", "b"]}
    assert table.schema.field("label").type == pa.int8()
    with pytest.raises(CorpusError) as error:
        parse_labels(release, "is_answer", {"yes": 1}, "here")
    row = "{'q': 'b', 'is_answer': 'no', 'other': 2}"
    assert error.value.problem == f"here: is_answer 'no' in {row} is not one of ['yes']"
    assert parse_labels(release, "other", {"2": 7, "1": 3}, "here").to_pylist() == [3, 7]
    replaced = set_column(release, "q", pa.array([3, 4]))
    assert replaced.column_names == release.column_names
    assert replaced["q"].to_pylist() == [3, 4]
    assert candidate_schema("grade").names == [*CANDIDATE_SCHEMA.names, "grade"]
    assert candidate_schema() == CANDIDATE_SCHEMA


def test_columns_between_blanks_are_parsed_by_their_position(tmp_path):
    path = tmp_path / "file"
    path.write_text("a 1  x\nb\t2 y\n")
    assert list(read_columns(path, {2: str, 1: int}, 3)) == [["x", 1], ["y", 2]]
    assert list(read_columns(path, {0: str}, None)) == [["a"], ["b"]]
    path.write_text("a 1 x\nb zwei y z\n")
    for parsers, num_columns, problem in (
        ({0: str}, 3, r"4 columns instead of 3"),
        ({1: int}, None, r"invalid literal for int.*zwei"),
        ({3: str}, None, r"list index out of range"),
    ):
        line = 1 if problem.startswith("list") else 2
        with pytest.raises(CorpusError, match=rf"line {line} is not as published: .*{problem}"):
            list(read_columns(path, parsers, num_columns))


def test_keys_are_divided_by_a_hash_in_the_given_shares():
    ends = {"train": 0.8, "dev": 0.9, "test": 1.0}
    splits = [assign_split_by_hash(f"key {number}", ends) for number in range(2_000)]
    counts = Counter(splits)
    assert [counts[name] / 2_000 for name in ends] == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    assert splits[:6] == [assign_split_by_hash(f"key {number}", ends) for number in range(6)]
    # The first four bytes of the key's SHA-256 are 0x2cf24dba, 0.1756 of all.
    assert assign_split_by_hash("hello", {"low": 0.1755, "high": 1.0}) == "high"
    assert assign_split_by_hash("hello", {"low": 0.1756, "high": 1.0}) == "low"
