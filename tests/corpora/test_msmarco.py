import json
import resource

import pytest

from as2ray.corpora.leaks import near_duplicate_questions
from as2ray.corpora.msmarco import count_release
from as2ray.corpora.preparation import read_split
from as2ray.corpora.reader_utils import NO_CANDIDATES
from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.filters import filter_table


@pytest.fixture
def release(write, tmp_path):
    """Two queries over five passages, one of them without a relevant one."""
    passages = [f"{i}\tpassage {i} of cats" for i in (9, 3, 5, 7, 1)]
    write("msmarco/collection.tsv", "\n".join(passages) + "\n")
    write("msmarco/queries.train.tsv", "20\twhere are cats\n10\twho are cats\n")
    write("msmarco/qrels.train.tsv", "20\t0\t9\t1\n20\t0\t7\t1\n")
    write("msmarco/run.train.tsv", "20\t3\t1\n20\t7\t2\n20\t5\t3\n10\t1\t1\n10\t3\t2\n")
    write("msmarco/queries.dev.small.tsv", "30\twhat are cats\n")
    write("msmarco/qrels.dev.small.tsv", "30 0 9 1\n")
    write("msmarco/run.dev.small.tsv", "30 Q0 5 1 3.5 bm25\n30 Q0 1 2 2.5 bm25\n")
    return tmp_path / "msmarco"


def rows(table):
    return [(r["question_id"], r["candidate"], r["label"]) for r in table.to_pylist()]


def test_candidates_are_the_run_s_and_training_has_what_it_missed(release):
    assert rows(read_split("msmarco", "train", release)) == [
        ("20", "passage 3 of cats", 0),
        ("20", "passage 7 of cats", 1),
        ("20", "passage 5 of cats", 0),
        ("20", "passage 9 of cats", 1),
        ("10", "passage 1 of cats", 0),
        ("10", "passage 3 of cats", 0),
    ]
    # A trec run; what it missed stays missed where it is judged.
    assert [r[1:] for r in rows(read_split("msmarco", "dev", release))] == [
        ("passage 5 of cats", 0),
        ("passage 1 of cats", 0),
    ]


def test_judged_query_of_dev_without_a_line_in_the_run_counts_as_0(release, write):
    queries = "30\twhat are cats\n40\twhy cats\n60\twhose cats\n"
    write("msmarco/queries.dev.small.tsv", queries)
    write("msmarco/qrels.dev.small.tsv", "30 0 9 1\n40 0 7 1\n60 0 7 0\n70 0 7 1\n")
    table = read_split("msmarco", "dev", release)
    assert rows(table)[2:] == [("40", NO_CANDIDATES, 0)]
    assert table["candidate_id"][2].as_py() == "40-none"
    assert "70" not in read_split("msmarco", "train", release)["question_id"].to_pylist()


def test_run_with_its_texts_is_read_however_many_words_they_have(release):
    (release / "run.train.tsv").write_text("20\t3\twhere now\tpassage 3\n20\t5\twhere now\tfive\n")
    found = rows(read_split("msmarco", "train", release))
    assert [r[1].split()[1] for r in found] == ["3", "5", "9", "7"]


def test_depth_cuts_the_run_and_queries_without_relevant_go_by_the_filter(release):
    cut = rows(read_split("msmarco", "train", release, run_depth=1))
    assert [r[1].split()[1] for r in cut] == ["3", "9", "7", "1"]
    kept = filter_table(read_split("msmarco", "train", release), "no_all_negative")
    assert set(kept["question_id"].to_pylist()) == {"20"}


def test_relevant_passages_alone_need_no_run(release):
    (release / "run.train.tsv").unlink()
    (release / "run.dev.small.tsv").unlink()
    table = read_split("msmarco", "train", release, run_depth=0)
    assert rows(table) == [("20", "passage 9 of cats", 1), ("20", "passage 7 of cats", 1)]
    assert rows(read_split("msmarco", "dev", release, run_depth=0)) == [
        ("30", "passage 9 of cats", 1)
    ]


def test_collections_are_read_a_text_a_line(release, write):
    write("msmarco/msmarco-docs.tsv", "D4\thttp://x\tCats\tThey  purr.\n")
    corpus = get_corpus("msmarco")
    [texts] = corpus.read_collection("passages", release)
    assert texts == [f"passage {i} of cats" for i in (9, 3, 5, 7, 1)]
    assert list(corpus.read_collection("documents", release)) == [["Cats They purr."]]
    assert corpus.check_collection_size("passages", 8_841_823)  # the paper prints 8.8M
    with pytest.raises(ConfigError, match="unknown msmarco collection 'pages'"):
        list(corpus.read_collection("pages", release))


def test_documents_have_title_and_body(write, tmp_path):
    write("m/msmarco-docs.tsv", "D4\thttp://x\tCats\tThey purr.\nD6\thttp://y\tDogs\tThey bark.\n")
    write("m/msmarco-docdev-queries.tsv", "2\twhat barks\n")
    write("m/msmarco-docdev-qrels.tsv", "2 0 D6 1\n")
    write("m/msmarco-docdev-top100", "2 Q0 D4 1 -4.1 IndriQ\n2 Q0 D6 2 -4.2 IndriQ\n")
    assert rows(read_split("msmarco", "doc-dev", tmp_path / "m")) == [
        ("2", "Cats They purr.", 0),
        ("2", "Dogs They bark.", 1),
    ]


def test_track_of_2019_counts_grades_of_two_as_relevant(write, tmp_path):
    hits = [
        {"qid": 4, "docid": str(d), "content": f"text {d}", "rank": rank}
        for rank, d in ((2, 8), (1, 6), (3, 9))
    ]
    write("m/bm25_top100_dl19.json", [{"query": "what", "hits": hits}])
    write("m/qrels.dl19-passage.txt", "4 Q0 6 1\n4 Q0 8 3\n")
    counts = [tuple(count) for count in count_release(tmp_path / "m")]
    assert counts == [("dl19", "queries", 43, 1), ("dl19", "hits of grade 2 and 3", 846, 1)]
    table = read_split("msmarco", "dl19", tmp_path / "m")
    assert [(r["candidate_id"], r["label"], r["grade"]) for r in table.to_pylist()] == [
        ("4-6", 0, 1),
        ("4-8", 1, 3),
        ("4-9", 0, 0),
    ]
    first = read_split("msmarco", "dl19", tmp_path / "m", run_depth=1)
    assert first["candidate_id"].to_pylist() == ["4-6"]
    write(
        "m/bm25_top100_dl19.json", [{"query": "nothing", "hits": []}, {"query": "a", "hits": hits}]
    )
    table = read_split("msmarco", "dl19", tmp_path / "m")
    assert table["question"].unique().to_pylist() == ["a"]
    assert table["candidate"][0].as_py() == "text 6"


def test_listed_texts_are_candidates_once(write, tmp_path):
    line = json.dumps({"query": "what", "pos": ["a", "b"], "neg": ["c", "a"]})
    write("m/train_sample.jsonl", line + "\n")
    table = read_split("msmarco", "listed", tmp_path / "m")
    assert {r[1:] for r in rows(table)} == {("a", 1), ("b", 1), ("c", 0)}
    assert set(table["candidate_id"].to_pylist()) == {f"listed-1-{k}" for k in range(3)}


def test_ids_are_those_of_the_release(release, write):
    table = read_split("msmarco", "train", release, run_depth=1)
    ids = ["20-3", "20-9", "20-7", "10-1"]
    assert table["candidate_id"].to_pylist() == ids
    assert table["question"].to_pylist() == ["where are cats"] * 3 + ["who are cats"]
    assert table["grade"].to_pylist() == [0, 1, 1, 0]


def test_judged_passage_without_relevance_is_no_further_candidate(release):
    (release / "qrels.train.tsv").write_text("20\t0\t9\t1\n20\t0\t5\t0\n20\t0\t1\t0\n")
    table = read_split("msmarco", "train", release, run_depth=1)
    assert table["candidate_id"].to_pylist() == ["20-3", "20-9", "10-1"]


def test_blank_passage_is_no_candidate(release):
    text = (release / "collection.tsv").read_text()
    (release / "collection.tsv").write_text(text.replace("passage 5 of cats", " "))
    table = read_split("msmarco", "dev", release)
    assert table["candidate_id"].to_pylist() == ["30-1"]


def test_long_document_is_cut(write, tmp_path):
    write("m/msmarco-docs.tsv", f"D4\tu\tCats\t{'x' * 20_000}\n")
    [[text]] = get_corpus("msmarco").read_collection("documents", tmp_path / "m")
    assert text == "Cats " + "x" * 9_995


def test_question_answering_task_is_read_from_the_hub_alone(write_hub, tmp_path):
    passages = {"is_selected": [0, 1], "passage_text": ["One.", "Two."], "url": ["a", "b"]}
    rows = [{"query_id": 7, "query": " who? ", "passages": passages, "answers": ["Two."]}]
    write_hub("microsoft/ms_marco", "v2.1", "validation", rows)
    table = read_split("msmarco", "qa-dev", "hub")
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("7", "who?", "7-0", "One.", 0, 0),
        ("7", "who?", "7-1", "Two.", 1, 1),
    ]
    with pytest.raises(CorpusError, match="read from the hub alone"):
        read_split("msmarco", "qa-dev", tmp_path)
    with pytest.raises(CorpusError, match="has no split 'dev'"):
        read_split("msmarco", "dev", "hub")


@pytest.mark.parametrize(
    ("name", "text", "came"),
    [
        ("run.train.tsv", "20\t4\t1\n", "1 passages are missing, such as 4"),
        ("run.train.tsv", "20\tx\t1\n", "line 1"),
        ("run.train.tsv", "50\t3\t1\n", "query 50 of the run is not among the queries"),
        ("qrels.train.tsv", "20 0\n", "2 columns"),
        ("collection.tsv", "9\ta\n9\tb\n3\tc\n5\td\n", "passage 9 occurs twice"),
        ("collection.tsv", "P9\ta\n", "collection.tsv: passage ids .*P9"),
    ],
)
def test_damaged_release_is_refused(release, name, text, came):
    (release / name).write_text(text)
    with pytest.raises(CorpusError, match=came):
        read_split("msmarco", "train", release)


def test_values_of_other_types_are_refused(write, tmp_path):
    hits = [{"qid": 4, "docid": "8", "content": "text", "rank": "first"}]
    write("m/bm25_top100_dl19.json", [{"query": "what", "hits": hits}])
    write("m/qrels.dl19-passage.txt", "4 Q0 6 1\n")
    with pytest.raises(CorpusError, match=r"dl19\.json: ValueError: .*first"):
        read_split("msmarco", "dl19", tmp_path / "m")
    for positives in ("null", '"one text"'):
        write("m/train.jsonl", f'{{"query": "what", "pos": {positives}, "neg": []}}\n')
        with pytest.raises(CorpusError, match=r"train\.jsonl: TypeError"):
            read_split("msmarco", "listed", tmp_path / "m")


def test_collection_without_room_is_refused(release):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The largest file that may be written stands for the room that is left.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(CorpusError, match="TMPDIR"):
            read_split("msmarco", "train", release)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_near_duplicate_questions_of_two_tables_are_found(release):
    train, dev = (read_split("msmarco", split, release) for split in ("train", "dev"))
    assert near_duplicate_questions(train, dev, 0.5) == [
        ("where are cats", "what are cats", 0.5),
        ("who are cats", "what are cats", 0.5),
    ]
    assert near_duplicate_questions(train, dev) == []


def test_real_track_of_2019_has_its_relevant_hits(real):
    table = read_split("msmarco", "dl19", real / "msmarco")
    assert len(table["question_id"].unique()) == 43
    assert sum(table["label"].to_pylist()) == 846


def test_real_listed_sample_has_ten_queries(real):
    table = read_split("msmarco", "listed", real / "msmarco", question_filter="clean")
    assert len(table["question_id"].unique()) == 10
