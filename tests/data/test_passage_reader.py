from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.passage_reader import EncodedPassages, PassageReader
from as2ray.distributed.ingest import from_row, to_table
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import group_by_passage
from as2ray.text.tokenization import PairTokenizer


def passages_of(questions):
    table = tiny.candidates(questions, each=5)
    # Two passages of each question, of two and of three sentences.
    names = [f"p{row // 5}-{row % 5 // 2 if row % 5 < 4 else 1}" for row in range(table.num_rows)]
    table = table.append_column("passage_id", pa.array(names))
    label = table["label"].to_numpy()
    relevant = [int(label[[n == name for n in names]].any()) for name in names]
    return group_by_passage(table.append_column("passage_label", pa.array(relevant)))


@pytest.fixture
def tokenizer(published):
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 60, 24)


@pytest.fixture
def dataset(tokenizer, tmp_path):
    pq.write_table(passages_of(20), tmp_path / "part.parquet", row_group_size=7)
    return PackedDataset(PassageReader(ParquetTable.open(tmp_path), tokenizer), 6, 400)


def test_epoch_gives_every_passage_and_sentence_once_with_its_label(dataset):
    micros = list(dataset.epoch(0))
    assert dataset.steps == len({m.step for m in micros}) == 7
    assert sum(m.num_examples for m in micros if m.is_last) == 40
    labels = np.concatenate([m.batch.marker_data["label"] for m in micros])
    relevant = np.concatenate([m.batch.sequence_data["passage_label"] for m in micros])
    assert (len(labels), labels.sum()) == (100, 20)
    assert (len(relevant), relevant.sum()) == (40, 20)
    for micro in micros:
        window_label = np.zeros(len(micro.batch))
        np.maximum.at(
            window_label, micro.batch.marker_data["window"], micro.batch.marker_data["label"]
        )
        np.testing.assert_array_equal(window_label, micro.batch.sequence_data["passage_label"])


def test_passage_whose_windows_exceed_the_budget_is_a_batch_of_its_own_size(tokenizer, tmp_path):
    rows = passages_of(4)
    longer = rows.to_pylist()
    lists = [field.name for field in rows.schema if pa.types.is_list(field.type)]
    for name in lists:
        longer[3][name] = longer[3][name] * 20
    pq.write_table(pa.Table.from_pylist(longer, rows.schema), tmp_path / "part.parquet")
    dataset = PackedDataset(PassageReader(ParquetTable.open(tmp_path), tokenizer), 8, 100)
    micros = list(dataset.epoch(0))
    sizes = sorted(int(micro.batch.lengths.sum()) for micro in micros)
    assert sizes[-1] > 10 * 60
    assert sum(micro.num_examples for micro in micros if micro.is_last) == len(longer)
    # A sentence between two windows may stand in both.
    num_markers = sum(len(micro.batch.marker_data["label"]) for micro in micros)
    assert num_markers >= sum(len(row["label"]) for row in longer)


def test_share_without_a_passage_is_a_placeholder_with_a_marker(dataset):
    idle_rank = replace(dataset, global_batch_size=1, rank=1, world_size=2)
    micro = next(iter(idle_rank.epoch(0)))
    assert micro.is_empty
    assert micro.emptied().batch.markers.tolist() == micro.batch.markers.tolist() == [0]
    assert micro.batch.markers.dtype == np.int64  # they are indices
    assert {name: len(values) for name, values in micro.batch.marker_data.items()} == dict.fromkeys(
        ("label", "window", "sentence", "marker", "answer_first", "answer_last"), 1
    )


def test_packed_passages_travel_through_arrow(dataset):
    micros = list(dataset.epoch(0))
    rows = to_table(micros)
    for number, micro in enumerate(micros):
        again = from_row(rows, number)
        np.testing.assert_array_equal(again.batch.markers, micro.batch.markers)
        for kind in ("sequence_data", "marker_data"):
            restored, expected = (getattr(batch, kind) for batch in (again.batch, micro.batch))
            assert restored.keys() == expected.keys()
            for name in expected:
                np.testing.assert_array_equal(restored[name], expected[name])


@pytest.mark.parametrize(
    ("labels", "relevant"), [([0, 0, 0, 1], [0, 1]), ([0, 0, 0, 0], [1, 1]), ([1, 1, 1, 1], [1, 1])]
)
def test_window_of_a_relevant_passage_is_relevant_where_it_holds_a_fact(
    tokenizer, labels, relevant
):
    narrow = PairTokenizer(tokenizer.tokenizer_json, 24, 8)
    passage = {"question": "What?", "candidate": ["lala muri ne ba."] * 4, "label": labels}
    table = pa.Table.from_pylist([{**passage, "passage_label": 1, "answer": ""}])
    passages = EncodedPassages.from_table(narrow, table)
    assert len(passages.windows.sequences) > 1
    assert passages.windows.window_data["passage_label"][[0, -1]].tolist() == relevant


def test_answer_is_a_span_of_the_batch_where_the_window_holds_it(tokenizer):
    texts = ["lala muri ne.", "ne badesso quintol lala.", "badesso quintol."]
    rows = {"question": "What?", "candidate": texts, "answer": "Badesso quintol"}
    table = pa.Table.from_pylist(
        [
            {**rows, "label": [0, 1, 0], "passage_label": 1},
            {**rows, "label": [1, 0, 0], "passage_label": 1},
        ]
    )
    batch = EncodedPassages.from_table(tokenizer, table).pack(np.array([1, 0]))
    first, last = (batch.marker_data[f"answer_{end}"] for end in ("first", "last"))
    # In one passage the supporting sentence holds it; in the other it does not.
    markers = np.flatnonzero(first >= 0)
    assert len(markers) == 1
    assert (last >= 0).sum() == 1
    expected = tokenizer.tokenize_texts(["badesso quintol"], 60).token_ids
    ids = batch.token_ids[first[markers[0]] : last[markers[0]] + 1]
    assert ids.tolist() == expected.tolist()
    # A sentence of nothing else, which ends its window: the span ends before the separator.
    whole = {**rows, "candidate": ["lala.", "badesso quintol"], "label": [0, 1]}
    table = pa.Table.from_pylist([{**whole, "passage_label": 1}])
    batch = EncodedPassages.from_table(tokenizer, table).pack(np.array([0]))
    assert batch.marker_data["answer_first"].tolist() == [-1, batch.markers[1] + 1]
    assert batch.marker_data["answer_last"].tolist() == [-1, batch.num_tokens - 2]
    narrow = PairTokenizer(tokenizer.tokenizer_json, 14, 4)
    is_whole = []
    for num_words in range(12):  # of a longer sentence, the window cuts the answer off
        text = "muri " * num_words + "badesso quintol."
        table = pa.Table.from_pylist(
            [{**rows, "candidate": [text], "label": [1], "passage_label": 1}]
        )
        batch = EncodedPassages.from_table(narrow, table).pack(np.array([0]))
        [first], [last] = (batch.marker_data[f"answer_{end}"] for end in ("first", "last"))
        is_whole.append(bool(first >= 0))
        assert batch.token_ids[first : last + 1].tolist() == (
            expected.tolist() if first >= 0 else []
        )
    assert is_whole == sorted(is_whole, reverse=True)
    assert {*is_whole} == {True, False}
