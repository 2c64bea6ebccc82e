"""Tasks of the cluster build what one process builds, in the same order, bad records included."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from as2ray.corpora.record_conversion import (
    RECORDS_PER_BATCH,
    Quarantine,
    convert_in_process,
    with_quarantine,
)
from as2ray.corpora.registry import get_corpus
from as2ray.distributed import build
from as2ray.distributed.build import _convert_batch, _decode_results, _read_records, convert_on_ray
from as2ray.errors import CorpusError, ResourceError
from as2ray.text.sentences import get_splitter, register_splitter


def record(number):
    words = f"<P> Ann {number} came . Bo went . </P>".split()
    return {
        "example_id": number,
        "question_text": f"who came {number}",
        "document_text": " ".join(words),
        "annotations": [
            {
                "long_answer": {"start_token": 0, "end_token": len(words)},
                "short_answers": [{"start_token": 1, "end_token": 2}],
            }
        ],
    }


@pytest.fixture
def release(tmp_path):
    """Three packed files of several batches each; the second has a bad line."""
    for number in range(3):
        lines = [json.dumps(record(1_000 * number + i)) for i in range(2 * RECORDS_PER_BATCH + 9)]
        if number == 1:
            lines.insert(RECORDS_PER_BATCH, "{")
        with gzip.open(tmp_path / f"nq-dev-0{number}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))
    return tmp_path


def pieces(release, quarantine, *how, **options):
    corpus = with_quarantine(get_corpus("nq"), quarantine, *how)
    options = corpus.parse_options({"sentence_splitter": "simple"} | options)
    return pa.concat_tables(corpus.read_tables("dev", release, options))


def test_rows_that_pass_between_tasks_keep_records_tables_and_what_is_bad(release):
    corpus = get_corpus("nq")
    conversion = corpus.conversion
    options = corpus.parse_options({"sentence_splitter": "simple"})
    path = sorted(release.glob("*.gz"))[1]
    rows = list(_read_records({"path": np.array([str(path)])}, conversion))
    assert [row.num_rows for row in rows] == [1, 1, 1]
    made = [
        _decode_results(_convert_batch(row, conversion, options, get_splitter("simple")))
        for row in rows
    ]
    expected = list(convert_in_process(conversion, [path], options))
    assert len(expected) == 3
    for [(table, bad)], (wanted, wanted_bad) in zip(made, expected, strict=True):
        assert table.equals(wanted)
        assert bad == wanted_bad
    assert [len(bad) for _, bad in expected] == [0, 1, 0]


def test_cluster_without_room_to_read_and_make_at_once_is_refused(release, monkeypatch):
    monkeypatch.setattr(build, "node_resources", lambda: [{"CPU": 1.0}])
    with pytest.raises(ResourceError, match=r"at least 1\.5"):
        pieces(release, Quarantine(1), convert_on_ray(2))


@pytest.mark.slow
def test_tasks_build_the_same_rows_in_the_same_order(ray_local, release):
    here, there = Quarantine(1), Quarantine(1)
    alone = pieces(release, here)
    assert pieces(release, there, convert_on_ray(2)).equals(alone)
    assert alone.num_rows == 2 * 3 * (2 * RECORDS_PER_BATCH + 9)
    assert there.rejected == here.rejected
    assert "nq-dev-01.jsonl.gz, line 65" in there.rejected[0].source


@pytest.mark.slow
def test_tasks_know_a_splitter_that_was_registered_here(ray_local, release):
    register_splitter("whole", "1", lambda text: [(0, len(text))])
    assert pieces(
        release, Quarantine(1), convert_on_ray(2), sentence_splitter="whole"
    ).num_rows == 3 * (2 * RECORDS_PER_BATCH + 9)


@pytest.mark.slow
def test_file_cut_short_ends_the_build_with_its_name(ray_local, release):
    path = release / "nq-dev-02.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorpusError, match=r"nq-dev-02\.jsonl\.gz(.|\n)*download a published"):
        pieces(release, Quarantine(1), convert_on_ray(2))
