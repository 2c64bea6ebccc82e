import csv

import pytest

from as2ray.corpora.preparation import read_split
from as2ray.corpora.reader_utils import NO_CANDIDATES
from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, CorpusError


def context(id, key="passage_id"):
    return {"title": f"T{id}", "text": f"text {id}", "score": 1.0, key: str(id)}


@pytest.fixture
def release(write, tmp_path):
    records = [
        {
            "question": "who sings",
            "positive_ctxs": [context(4), context(4), context(2)],
            "hard_negative_ctxs": [context(7), context(2)],
            "negative_ctxs": [context(9)],
        },
        {
            "question": "who runs",
            "positive_ctxs": [],
            "hard_negative_ctxs": [context(3, "psg_id")],
            "negative_ctxs": [],
        },
    ]
    write("dpr/biencoder-nq-dev.json", records)
    write("dpr/psgs_w100.tsv", 'id\ttext\ttitle\n4\ttext 4\tT4\n5\t"odd\ttext\n9\ttext 9\tT9\n')
    write("dpr/bm25.trec", "nq-dev-0 Q0 9 1 3.0 x\nnq-dev-0 Q0 4 2 2.0 x\nnq-dev-0 Q0 5 3 1 x\n")
    return tmp_path / "dpr"


def rows(table):
    return [(r["question_id"], r["candidate_id"], r["label"]) for r in table.to_pylist()]


def test_contexts_of_the_release_are_candidates_once(release):
    assert rows(read_split("dpr", "nq-dev", release)) == [
        ("nq-dev-0", "nq-dev-0-4", 1),
        ("nq-dev-0", "nq-dev-0-2", 1),
        ("nq-dev-0", "nq-dev-0-7", 0),
        ("nq-dev-1", "nq-dev-1-3", 0),
    ]
    every = ["positive_ctxs", "hard_negative_ctxs", "negative_ctxs"]
    assert ("nq-dev-0", "nq-dev-0-9", 0) in rows(
        read_split("dpr", "nq-dev", release, context_lists=every)
    )
    turned = ["hard_negative_ctxs", "positive_ctxs"]  # passage 2 is in both
    assert rows(read_split("dpr", "nq-dev", release, context_lists=turned)) == rows(
        read_split("dpr", "nq-dev", release)
    )


def test_run_s_passages_are_candidates_in_their_place(release):
    table = read_split("dpr", "nq-dev", release, run_file="bm25.trec", run_depth=2)
    assert rows(table) == [("nq-dev-0", "nq-dev-0-9", 0), ("nq-dev-0", "nq-dev-0-4", 1)]
    assert table["candidate"].to_pylist() == ["text 9", "text 4"]
    assert table["document_id"].to_pylist() == ["T9", "T4"]


def test_question_with_relevant_passages_that_the_run_lacks_counts_as_0(release, write):
    contexts = [{"positive_ctxs": [context(n)] if n else []} for n in (4, 9, 0)]
    write("dpr/biencoder-nq-dev.json", [{"question": "who sings", **each} for each in contexts])
    table = read_split("dpr", "nq-dev", release, run_file="bm25.trec", run_depth=1)
    assert rows(table) == [("nq-dev-0", "nq-dev-0-9", 0), ("nq-dev-1", "nq-dev-1-none", 0)]
    assert table["candidate"].to_pylist() == ["text 9", NO_CANDIDATES]


def test_training_questions_have_the_relevant_passages_that_the_run_missed(release):
    (release / "biencoder-nq-dev.json").rename(release / "biencoder-nq-train.json")
    lines = (release / "bm25.trec").read_text().replace("nq-dev", "nq-train")
    (release / "bm25.trec").write_text(lines)
    table = read_split("dpr", "nq-train", release, run_file="bm25.trec", run_depth=1)
    assert rows(table) == [
        ("nq-train-0", "nq-train-0-9", 0),
        ("nq-train-0", "nq-train-0-4", 1),
        ("nq-train-0", "nq-train-0-2", 1),
    ]
    assert table["candidate"].to_pylist() == ["text 9", "text 4", "text 2"]
    assert table["document_id"].to_pylist() == ["T9", "T4", "T2"]
    (release / "bm25.trec").write_text("nq-train-1 Q0 9 1 3.0 x\n")
    table = read_split("dpr", "nq-train", release, run_file="bm25.trec")
    assert rows(table) == [("nq-train-1", "nq-train-1-9", 0)]


def test_collection_has_the_texts_without_titles(release):
    [texts] = get_corpus("dpr").read_collection("psgs_w100", release)
    assert texts[0] == "text 4"


def test_passages_are_read_as_the_csv_module_wrote_them(release):
    texts = ['Aaron (""Ahärôn"") ran', 'odd "one', '"both"', '"']
    with (release / "psgs_w100.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["id", "text", "title"])
        writer.writerows((number, text, '"T"') for number, text in enumerate(texts))
    lines = (f"nq-dev-0 Q0 {number} {number + 1} 1 x\n" for number in range(len(texts)))
    (release / "bm25.trec").write_text("".join(lines))
    table = read_split("dpr", "nq-dev", release, run_file="bm25.trec")
    assert table["candidate"].to_pylist() == texts
    assert set(table["document_id"].to_pylist()) == {'"T"'}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"context_lists": ["negative_ctxs"]}, "must contain 'positive_ctxs'"),
        ({"context_lists": ["positive_ctxs", "x"]}, r"context_lists.1='x'.*'positive_ctxs'"),
        ({"run_depth": 0}, "run_depth=0"),
    ],
)
def test_impossible_option_is_refused(release, options, problem):
    with pytest.raises(ConfigError, match=problem):
        read_split("dpr", "nq-dev", release, **options)


def test_other_json_or_run_is_refused(release):
    (release / "bm25.trec").write_text("nq-dev-0 9\n")
    with pytest.raises(CorpusError, match="line 1"):
        read_split("dpr", "nq-dev", release, run_file="bm25.trec")
    (release / "biencoder-nq-dev.json").write_text('[{"question": "x"}]')
    with pytest.raises(CorpusError, match="positive_ctxs"):
        read_split("dpr", "nq-dev", release)
    (release / "biencoder-nq-dev.json").write_text(
        '[{"question": "x", "positive_ctxs": null, "hard_negative_ctxs": []}]'
    )
    with pytest.raises(CorpusError, match=r"biencoder-nq-dev\.json: TypeError"):
        read_split("dpr", "nq-dev", release)


def test_real_sample_has_five_questions(real):
    table = read_split("dpr", "sample", real / "dpr")
    assert len(table["question_id"].unique()) == 5
    assert 0 < sum(table["label"].to_pylist()) < table.num_rows
