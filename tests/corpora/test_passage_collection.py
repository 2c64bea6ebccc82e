import numpy as np
import pyarrow as pa
import pytest

from as2ray.corpora.passage_collection import (
    COLLECTION_SCHEMA,
    open_collection,
    parse_passage_id,
    parse_passage_ids,
)
from as2ray.errors import CorpusError


def passages(*ids):
    return pa.table({"id": ids, "text": [f"text {number}" for number in ids]})


def test_texts_are_read_by_ids_over_all_batches_in_any_order():
    with open_collection([passages(7, 2), passages(9), passages(1, 30)], "here") as collection:
        assert collection.read_texts(np.array([30, 2, 7, 9, 1, 2])) == [
            f"text {number}" for number in (30, 2, 7, 9, 1, 2)
        ]
        assert collection.read_texts(np.zeros(0, int)) == []
        assert all(batch.schema == COLLECTION_SCHEMA for batch in collection.batches)
        with pytest.raises(CorpusError, match="here: 2 passages are missing, such as 8"):
            collection.read_texts(np.array([7, 8, 31, 30]))


def test_id_that_occurs_twice_is_refused():
    with (
        pytest.raises(CorpusError, match="here: passage 2 occurs twice"),
        open_collection([passages(7, 2), passages(2)], "here"),
    ):
        pytest.fail("there is no such collection")


def test_empty_collection_has_no_passage():
    with (
        open_collection([], "here") as collection,
        pytest.raises(CorpusError, match="here: 1 passages are missing, such as 0"),
    ):
        collection.read_texts(np.array([0]))


def test_ids_are_numbers_with_or_without_a_letter():
    assert (parse_passage_id("D12"), parse_passage_id("12")) == (12, 12)
    ids = parse_passage_ids(pa.chunked_array([["D12", "3"], ["D0"]]), "here")
    assert ids.to_pylist() == [12, 3, 0]
    with pytest.raises(CorpusError, match=r"^here: .*E5"):
        parse_passage_ids(pa.chunked_array([["D1", "E5"]]), "here")
