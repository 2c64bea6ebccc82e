from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import tiny

from as2ray.data.list_reader import LIST, ListStream
from as2ray.data.list_sampler import ListSampler
from as2ray.data.packed_dataset import Stream
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer


@pytest.fixture(scope="module")
def tokenizer(published) -> PairTokenizer:
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 40, 20)


def labelled(*questions: list[int]) -> pa.Table:
    ids = [f"q{i}" for i, labels in enumerate(questions) for _ in labels]
    return pa.table({"question_id": ids, "label": [x for labels in questions for x in labels]})


def test_question_of_one_kind_alone_gives_no_list():
    found = ListSampler.from_tables([labelled([0, 1, 0], [1, 1], [0]), labelled([0, 0, 1])])
    assert len(found) == 2
    random = np.random.default_rng(0)
    drawn = {tuple(found.sample(np.array([0, 1]), 2, random).ravel().tolist()) for _ in range(50)}
    assert drawn == {(1, a, 8, b) for a in (0, 2) for b in (6, 7)}


def test_draw_takes_every_positive_and_negative_alike():
    found = ListSampler.from_tables([labelled([1, 0, 1, 0, 0, 1])])
    random = np.random.default_rng(1)
    rows = found.sample(np.zeros(6_000, np.int64), 2, random)
    for side, among in ((0, {0, 2, 5}), (1, {1, 3, 4})):
        counts = Counter(rows[:, side].tolist())
        assert counts.keys() == among
        assert all(abs(n - 2_000) < 200 for n in counts.values())


@pytest.mark.parametrize(
    ("candidates", "positives", "negatives"),
    [(2, 1, 1), (3, 1, 2), (4, 2, 2), (5, 2, 3), (6, 2, 4), (7, 2, 5), (9, 2, 5)],
)
def test_list_is_half_positives_where_both_kinds_last(candidates, positives, negatives):
    found = ListSampler.from_tables([labelled([0, 1, 0, 0, 1, 0, 0])])
    [rows] = found.sample(np.array([0]), candidates, np.random.default_rng(2))
    assert len(rows) == candidates
    drawn = rows[rows >= 0].tolist()
    assert len(set(drawn)) == len(drawn) == positives + negatives
    assert set(drawn[:positives]) <= {1, 4}
    assert set(drawn[positives:]) <= {0, 2, 3, 5, 6}


def test_positives_fill_the_places_of_negatives_that_are_missing():
    found = ListSampler.from_tables([labelled([1, 1, 0, 1, 1], [0, 1])])
    first, second = found.sample(np.array([0, 1]), 4, np.random.default_rng(3)).tolist()
    assert set(first[:3]) < {0, 1, 3, 4}
    assert first[3] == 2
    assert second == [6, 5, -1, -1]


def test_corpus_without_contrasts_is_refused(tmp_path):
    table = tiny.candidates(3, each=1)
    with pytest.raises(CorpusError, match="1 files with 3 candidates"):
        ListSampler.from_files(ParquetTable.open(tiny.write_corpus(tmp_path, table)).paths)


@pytest.mark.parametrize("candidates", [2, 4])
@pytest.mark.parametrize(
    ("ranks", "batch", "max_tokens"), [(1, 16, 8192), (3, 7, 160), (4, 3, 200)]
)
def test_stream_of_lists_gives_each_question_once_whole_in_one_batch(
    corpus, tokenizer, ranks, batch, max_tokens, candidates
):
    files = ParquetTable.open(corpus)
    table = files.to_table()
    settings = {"window": 80, "candidates": candidates}
    streams = [
        ListStream(files, tokenizer, batch, max_tokens, 5, rank, ranks, **settings)
        for rank in range(ranks)
    ]
    asked: Counter[str] = Counter()
    for stream in streams:
        for micro in stream.epoch(2):
            of = micro.batch.sequence_data
            if micro.empty:
                continue
            assert micro.batch.num_tokens <= max_tokens
            assert micro.pairs == min(batch, stream.units - micro.step * batch)
            for number in np.unique(of[LIST]):
                rows = of["row"][of[LIST] == number]
                assert len(set(rows.tolist())) == len(rows) == candidates
                assert (
                    table["label"].to_numpy()[rows].sum()
                    == of["label"][of[LIST] == number].sum()
                    == 1
                )
                (question,) = set(table["question_id"].take(pa.array(rows)).to_pylist())
                asked[question] += 1
    assert len(asked) == 80
    assert set(asked.values()) == {1}


def drawn(stream: Stream, epoch: int, start: int = 0) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for micro in stream.epoch(epoch, start):
        found.setdefault(micro.step, []).extend(micro.batch.sequence_data["row"].tolist())
    return {step: sorted(rows) for step, rows in found.items()}


def test_stream_of_lists_draws_anew_each_epoch_and_resumes(corpus, tokenizer):
    stream = ListStream(ParquetTable.open(corpus), tokenizer, 9, window=60)
    whole = drawn(stream, 0)
    assert sum(map(len, whole.values())) == 160
    assert drawn(stream, 0, 4) == {step: rows for step, rows in whole.items() if step >= 4}
    assert whole != drawn(stream, 1)
    assert {r for rows in whole.values() for r in rows} != {
        r for rows in drawn(stream, 1).values() for r in rows
    }


def test_list_that_may_not_fit_a_batch_is_refused(corpus, tokenizer):
    with pytest.raises(ConfigError, match=r"max_tokens >= 80 \(2 x max_length\)"):
        ListStream(ParquetTable.open(corpus), tokenizer, 9, 79)
