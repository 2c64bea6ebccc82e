"""Small candidates tables, made from lists of labels."""

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest

MakeTable = Callable[..., pa.Table]


@pytest.fixture(scope="session")  # not per function, so that hypothesis may use it
def make_table() -> MakeTable:
    return table_of


def table_of(labels: Sequence[Sequence[int]], grades: Sequence[Sequence[int]] = ()) -> pa.Table:
    rows = [
        {
            "question_id": f"q{q}",
            "question": f"question {q}",
            "candidate_id": f"q{q}-{c}",
            "candidate": f"candidate {c}",
            "label": label,
        }
        for q, of_question in enumerate(labels)
        for c, label in enumerate(of_question)
    ]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(4, "label", table["label"].cast(pa.int8()))
    if grades:
        table = table.append_column("grade", pa.array([g for gs in grades for g in gs], pa.int8()))
    return table
