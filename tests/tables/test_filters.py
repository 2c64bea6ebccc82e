from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.corpora.sampling import flip_labels
from as2ray.errors import ConfigError
from as2ray.tables.filters import FILTER_DESCRIPTIONS, filter_table, filter_tables

QUESTIONS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=12)


def made(questions):
    rows = [
        {"question_id": f"q{i}", "candidate_id": f"q{i}-{k}", "label": label}
        for i, labels in enumerate(questions)
        for k, label in enumerate(labels)
    ]
    schema = pa.schema(
        [("question_id", pa.string()), ("candidate_id", pa.string()), ("label", pa.int8())]
    )
    return pa.Table.from_pylist(rows, schema=schema)


def cut(table, places):
    bounds = sorted({0, table.num_rows, *(p % (table.num_rows + 1) for p in places)})
    return [table.slice(a, b - a) for a, b in pairwise(bounds)]


@given(QUESTIONS)
def test_filters_keep_what_their_definition_says(questions):
    kept = {
        name: filter_table(made(questions), name)["question_id"] for name in FILTER_DESCRIPTIONS
    }
    with_positive = [f"q{i}" for i, q in enumerate(questions) for _ in q if 1 in q]
    with_both = [f"q{i}" for i, q in enumerate(questions) for _ in q if {0, 1} <= set(q)]
    assert kept["raw"].to_pylist() == made(questions)["question_id"].to_pylist()
    assert kept["no_all_negative"].to_pylist() == with_positive
    assert kept["clean"].to_pylist() == with_both


@given(QUESTIONS, st.lists(st.integers(0, 60)), st.sampled_from(list(FILTER_DESCRIPTIONS)))
def test_filter_on_a_stream_equals_filter_on_the_table(questions, places, name):
    table = made(questions)
    pieces = list(filter_tables(cut(table, places), name))
    whole = filter_table(table, name)
    assert all(p.num_rows for p in pieces)
    assert pa.concat_tables([whole.slice(0, 0), *pieces]).equals(whole)


def test_filter_unknown_on_a_stream_is_refused_at_the_first_step():
    with pytest.raises(ConfigError, match="unknown filter 'tidy'"):
        next(filter_tables([], "tidy"))


@pytest.mark.parametrize(
    ("rows", "fraction", "flipped"),
    [(8672, 0.1, 867), (8672, 0.2, 1734), (53417, 0.1, 5341), (53417, 0.2, 10683), (10, 0.0, 0)],
)
def test_flip_labels_turns_exactly_the_published_numbers(rows, fraction, flipped):
    table = made([[0, 1] * (rows // 2) + [0] * (rows % 2)])
    noisy = flip_labels(table, fraction, seed=3)
    changed = sum(a != b for a, b in zip(table["label"].to_pylist(), noisy["label"].to_pylist()))
    assert changed == flipped
    assert noisy.drop_columns(["label"]).equals(table.drop_columns(["label"]))


def test_flip_labels_depends_on_the_seed_alone():
    table = made([[0] * 50])
    assert flip_labels(table, 0.5, 1).equals(flip_labels(table, 0.5, 1))
    assert not flip_labels(table, 0.5, 1).equals(flip_labels(table, 0.5, 2))


def test_flip_labels_fraction_above_one_is_refused():
    with pytest.raises(ConfigError, match="fraction"):
        flip_labels(made([[0]]), fraction=10, seed=0)
