import pickle
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.errors import CorpusError, CountMismatchError
from as2ray.tables.fingerprint import Fingerprint, fingerprint
from as2ray.tables.schema import (
    CANDIDATE_SCHEMA,
    MAX_TEXT_CHARS,
    PASSAGE_SCHEMA,
    TableCounts,
    chunked_tables,
    count_table,
    group_by_passage,
    question_offsets,
    split_by_question,
    validate_table,
)

ROWS = [
    {"question_id": "a", "question": "who?", "candidate_id": "a-0", "candidate": "me", "label": 0},
    {"question_id": "a", "question": "who?", "candidate_id": "a-1", "candidate": "it", "label": 1},
    {"question_id": "b", "question": "why?", "candidate_id": "b-0", "candidate": "so", "label": 0},
]


def made(rows):
    return pa.Table.from_pylist(rows, schema=CANDIDATE_SCHEMA)


def changed(row, **values):
    return [{**r, **(values if i == row else {})} for i, r in enumerate(ROWS)]


def cut(table, places):
    bounds = sorted({0, table.num_rows, *(p % (table.num_rows + 1) for p in places)})
    return [table.slice(a, b - a) for a, b in pairwise(bounds)]


def test_count_of_a_table_and_of_nothing():
    assert count_table(made(ROWS)) == TableCounts(2, 3, 1)
    assert count_table(made([])) == TableCounts(0, 0, 0)
    assert str(TableCounts(1000, 20000, 3)) == "1,000 questions / 20,000 pairs / 3 positives"


def test_validate_good_table_comes_back_in_the_schema():
    wide = pa.Table.from_pylist([{**r, "grade": 4, "label": float(r["label"])} for r in ROWS])
    table = validate_table(wide.select(sorted(wide.column_names)), "here")
    assert table.column_names == [*CANDIDATE_SCHEMA.names, "grade"]
    assert table.schema.field("label").type == table.schema.field("grade").type == pa.int8()


def test_validate_empty_table_is_valid():
    assert validate_table(made([]), "here").num_rows == 0


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (changed(1, question=" \t"), "row 1 has an empty question"),
        (changed(2, candidate=""), "row 2 has an empty candidate"),
        (changed(2, candidate=None), "row 2 has no value in column 'candidate'"),
        (changed(0, label=2), "row 0 has an unknown label"),
        (changed(0, label=None), "row 0 has no value in column 'label'"),
        (changed(1, candidate="x" * (MAX_TEXT_CHARS + 1)), "row 1 has an over-long candidate"),
        (changed(0, question="x" * (MAX_TEXT_CHARS + 1)), "row 0 has an over-long question"),
        (changed(0, candidate_id="b-0"), "3 rows but 2 distinct candidate ids"),
        ([ROWS[0], ROWS[2], ROWS[1]], "row 2 has a question that starts twice"),
    ],
)
def test_validate_bad_row_is_refused_with_its_number(rows, problem):
    with pytest.raises(CorpusError, match=f"here: {problem}"):
        validate_table(made(rows), "here")


def test_validate_shows_the_start_of_each_value_of_a_bad_row():
    rows = changed(2, question=" ", candidate="x" * 81, label=1)
    with pytest.raises(CorpusError) as error:
        validate_table(made(rows), "here")
    assert error.value.problem == (
        "here: row 2 has an empty question (and 0 more): {'question_id': 'b', 'question': ' ', "
        f"'candidate_id': 'b-0', 'candidate': '{'x' * 80}', 'label': '1'}}"
    )


@pytest.mark.parametrize(
    "names", [CANDIDATE_SCHEMA.names[:-1], [*CANDIDATE_SCHEMA.names, "verdict"]]
)
def test_validate_other_columns_are_refused(names):
    table = pa.table({name: ["x"] for name in names})
    with pytest.raises(CorpusError, match=r"missing \[.*unknown \["):
        validate_table(table, "here")


def test_validate_other_types_are_refused():
    table = made(ROWS).set_column(4, "label", pa.array(["yes", "no", "no"]))
    with pytest.raises(CorpusError, match="Failed to parse"):
        validate_table(table, "here")


def test_question_starts_of_chunks_sees_no_chunk_borders():
    ids = pa.chunked_array([["a", "a"], ["a", "b"], ["b", "c"]])
    assert question_offsets(ids).tolist() == [0, 3, 5]
    assert question_offsets(pa.array([], pa.string())).tolist() == []


COLUMNS = st.lists(st.tuples(st.text(max_size=4), st.integers(0, 1) | st.none()), max_size=12)


@given(COLUMNS, st.lists(st.integers(0, 40)))
def test_fingerprint_does_not_depend_on_the_chunks(rows, places):
    schema = pa.schema([("candidate", pa.string()), ("label", pa.int8())])
    table = pa.Table.from_pylist([dict(zip(schema.names, r)) for r in rows], schema=schema)
    digest = Fingerprint()
    for piece in [table.slice(0, 0), *cut(table, places)]:
        digest.update(piece)
    assert digest.hexdigest() == fingerprint(table) == fingerprint(table.combine_chunks())


@given(COLUMNS, COLUMNS)
def test_fingerprint_differs_where_rows_differ(one, other):
    schema = pa.schema([("candidate", pa.string()), ("label", pa.int8())])
    a, b = (
        pa.Table.from_pylist([dict(zip(schema.names, r)) for r in rows], schema=schema)
        for rows in (one, other)
    )
    assert (fingerprint(a) == fingerprint(b)) == (one == other)


def test_fingerprint_tells_where_a_value_is_missing():
    one, other = (pa.table({"candidate": texts}) for texts in (["a", None], [None, "a"]))
    assert fingerprint(one) != fingerprint(other)


def test_fingerprint_depends_on_column_names_and_not_on_their_order():
    table = made(ROWS)
    assert fingerprint(table) == fingerprint(table.select(sorted(table.column_names)))
    assert fingerprint(table) != fingerprint(table.rename_columns([*"abcde"]))


@given(st.lists(st.integers(1, 4), max_size=10), st.lists(st.integers(0, 60)))
def test_by_question_recuts_at_questions_and_loses_nothing(sizes, places):
    ids = [f"q{i}" for i, size in enumerate(sizes) for _ in range(size)]
    table = pa.table({"question_id": pa.array(ids, pa.string()), "k": range(len(ids))})
    pieces = list(split_by_question(cut(table, places)))
    assert all(p.num_rows for p in pieces)
    assert pa.concat_tables([table.slice(0, 0), *pieces]).equals(table)
    owners = [set(p["question_id"].to_pylist()) for p in pieces]
    assert sum(map(len, owners)) == len(sizes)


def test_by_question_cuts_as_soon_as_a_question_ends():
    stream = [pa.table({"question_id": list(ids)}) for ids in ("ab", "bc", "cc", "d")]
    assert [piece["question_id"].to_pylist() for piece in split_by_question(stream)] == [
        *(["a"], ["b", "b"], ["c", "c", "c"], ["d"]),
    ]


def test_error_survives_pickling_with_its_two_parts():
    error = pickle.loads(pickle.dumps(CountMismatchError("problem", fix="fix it")))
    assert type(error) is CountMismatchError
    assert (error.problem, error.fix) == ("problem", "fix it")
    assert str(error) == "problem\n  fix: fix it"
    assert str(CountMismatchError("problem")) == "problem"


def test_tables_have_at_most_so_many_groups_of_rows():
    schema = pa.schema([("question_id", pa.string()), ("label", pa.int8())])
    groups = [[("a", 0), ("a", 1)], [("b", 1)], [("c", 0)]]
    tables = [table.to_pydict() for table in chunked_tables(groups, schema, 2)]
    assert tables == [
        {"question_id": ["a", "a", "b"], "label": [0, 1, 1]},
        {"question_id": ["c"], "label": [0]},
    ]


def test_table_by_passages_keeps_every_sentence_in_its_passage():
    rows = [("q1", "p1", "a", 0), ("q1", "p1", "b", 1), ("q1", "p2", "c", 0), ("q2", "p2", "d", 1)]
    table = pa.table(
        {
            "question_id": [q for q, *_ in rows],
            "question": ["What?"] * 4,
            "candidate_id": [str(i) for i in range(4)],
            "candidate": [text for *_, text, _ in rows],
            "label": pa.array([label for *_, label in rows], pa.int8()),
        }
    )
    passages = table.append_column("passage_id", pa.array([p for _, p, *_ in rows]))
    passages = passages.append_column("passage_label", pa.array([1, 1, 0, 1]))
    found = group_by_passage(passages)
    assert found["candidate"].to_pylist() == [["a", "b"], ["c"], ["d"]]
    assert found["label"].to_pylist() == [[0, 1], [0], [1]]
    assert found["passage_label"].to_pylist() == [1, 0, 1]
    alone = group_by_passage(table)
    assert alone["candidate"].to_pylist() == [["a"], ["b"], ["c"], ["d"]]
    assert alone["passage_label"].to_pylist() == [0, 1, 0, 1]
    assert alone["title"].to_pylist() == alone["answer"].to_pylist() == [""] * 4
    assert alone["sentence_index"].to_pylist() == [[0]] * 4
    assert found.schema == alone.schema == PASSAGE_SCHEMA
    assert group_by_passage(table.slice(0, 0)).num_rows == 0
