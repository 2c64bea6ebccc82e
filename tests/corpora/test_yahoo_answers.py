import pytest

from as2ray.corpora.leaks import near_duplicate_questions
from as2ray.corpora.preparation import read_split
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.yahoo_answers import (
    SPLITS,
    _read_questions,
    assign_split,
    count_release,
)
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.schema import MAX_TEXT_CHARS

THINGS = ("car", "boat", "tent", "kite", "drum", "coat", "lamp", "desk", "ring", "sock")
QUESTIONS = [f"how do i {verb} a {thing}?" for verb in ("mend", "wash", "sell") for thing in THINGS]


@pytest.fixture
def release(write, tmp_path):
    records = [
        {"id": str(n), "question": q, "nbestanswers": [f"{q[:-1]} with glue.", f"ask {n}"]}
        for n, q in enumerate(QUESTIONS)
    ]
    empty = {"id": "e", "question": "what?", "nbestanswers": [" "]}
    write("yahoo/nfL6.json", [*records, records[0], empty])
    return tmp_path / "yahoo"


def test_release_counts_the_questions_and_answers_of_the_sample_alone(release):
    assert list(count_release(release)) == []
    (release / "nfL6.json").rename(release / "nfL6_sample.json")
    counts = [tuple(count) for count in count_release(release)]
    number = len(QUESTIONS) + 2
    assert counts == [("", "questions", 109, number), ("", "answers", 280, 2 * number - 1)]


def test_own_answers_are_relevant_and_the_rest_is_what_bm25_finds(release):
    table = read_split("yahoo_answers", "train", release, run_depth=5)
    for row in table.to_pylist():
        question, text = row["question"], row["candidate"]
        own = {f"{question[:-1]} with glue.", f"ask {row['question_id']}"}
        assert row["label"] == int(text in own)
    sizes = {q: table["question"].to_pylist().count(q) for q in set(table["question"].to_pylist())}
    assert set(sizes.values()) == {6}  # two of its own, one of them found, and four others


def test_own_answers_alone_need_no_index_and_the_collection_has_all_answers(release):
    table = read_split("yahoo_answers", "train", release, run_depth=0)
    assert set(table["label"].to_pylist()) == {1}
    [texts] = get_corpus("yahoo_answers").read_collection("answers", release)
    assert len(texts) == 2 * len(QUESTIONS)
    assert set(table["candidate"].to_pylist()) < set(texts)


def test_splits_share_no_question_and_hold_all(release):
    found = [set(_questions(release, split)) for split in SPLITS]
    assert set.union(*found) == set(QUESTIONS)
    assert sum(map(len, found)) == len(QUESTIONS)


def _questions(release, split):
    try:
        return read_split("yahoo_answers", split, release)["question"].to_pylist()
    except CorpusError:
        return []


def test_same_words_in_another_order_are_in_the_same_split():
    assert assign_split("How to wash a car") == assign_split("a car: how to wash?")
    parts = [assign_split(f"question {n}") for n in range(2_000)]
    assert [parts.count(s) / 2_000 for s in SPLITS] == pytest.approx([0.9, 0.05, 0.05], abs=0.02)


def test_release_without_answers_or_with_other_keys_is_refused(write, tmp_path):
    write("y/nfL6.json", [{"id": "1", "question": "q", "nbestanswers": []}])
    with pytest.raises(CorpusError, match="no question has an answer"):
        read_split("yahoo_answers", "train", tmp_path / "y")
    write("y/nfL6.json", [{"id": "1", "question": "q"}])
    with pytest.raises(CorpusError, match="nbestanswers"):
        read_split("yahoo_answers", "train", tmp_path / "y")
    for answers in (None, [None], "one text", ["some \ud800 thing"]):
        write("y/nfL6.json", [{"id": "1", "question": "how?", "nbestanswers": answers}])
        with pytest.raises(CorpusError, match=r"nfL6\.json: \w+Error"):
            read_split("yahoo_answers", assign_split("how?"), tmp_path / "y")
    with pytest.raises(ConfigError, match="run_depth=-1"):
        read_split("yahoo_answers", "train", tmp_path / "y", run_depth=-1)


def test_real_sample_splits_have_no_near_duplicates(real):
    train, *others = (read_split("yahoo_answers", s, real / "yahoo_answers") for s in SPLITS)
    assert sum(train["label"].to_pylist()) > 200
    assert [near_duplicate_questions(train, other) for other in others if other.num_rows] == [
        []
    ] * sum(bool(other.num_rows) for other in others)


L6 = """<?xml version="1.0" encoding="UTF-8"?>
<ystfeed>
<vespaadd><document type="wisdom"><uri>1</uri><subject>How do I mend a kite?</subject>
<content>It tore&lt;br /&gt;in a tree.</content><bestanswer>With glue and some paper.</bestanswer>
<nbestanswers><answer_item>With glue and some paper.</answer_item>
<answer_item>Buy another one if 2 &lt; 3 and 4 &gt; 1.</answer_item>
</nbestanswers><yid>u1</yid></document></vespaadd>
<vespaadd><document type="wisdom"><uri>2</uri><subject>How to wash it</subject>
<bestanswer>In water.</bestanswer><nbestanswers/></document></vespaadd>
<vespaadd><document type="wisdom"><uri>3</uri><subject>Why do kites fly at all?</subject>
<bestanswer>The wind lifts them up.</bestanswer><nbestanswers/></document></vespaadd>
</ystfeed>
"""


def test_release_l6_has_descriptions_and_all_answers_of_manner_questions(tmp_path):
    (tmp_path / "FullOct2007.xml").write_text(L6)
    rows = []
    for split in SPLITS:
        try:
            rows += read_split("yahoo_answers", f"l6-{split}", tmp_path).to_pylist()
        except CorpusError:  # a split without questions
            continue
    # The second question is short, and the third asks for no manner.
    assert {row["question"] for row in rows} == {"How do I mend a kite? It tore in a tree."}
    assert [(row["candidate"], row["label"]) for row in rows] == [
        ("With glue and some paper.", 1),
        ("Buy another one if 2 < 3 and 4 > 1.", 1),
    ]
    [texts] = get_corpus("yahoo_answers").read_collection("l6-answers", tmp_path)
    assert list(texts)[:2] == ["With glue and some paper.", rows[1]["candidate"]]
    (tmp_path / "FullOct2007.xml").write_text(L6[:200])
    with pytest.raises(CorpusError, match="is not XML"):
        read_split("yahoo_answers", "l6-train", tmp_path)


def test_question_of_l6_with_a_repeated_id_is_left_out(tmp_path):
    document = L6[L6.index("<vespaadd>") : L6.index("</vespaadd>") + len("</vespaadd>")]
    (tmp_path / "FullOct2007.xml").write_text(L6.replace("</ystfeed>", f"{document}</ystfeed>"))
    split = f"l6-{assign_split('How do I mend a kite? It tore in a tree.')}"
    assert len(read_split("yahoo_answers", split, tmp_path)) == 2
    [texts] = get_corpus("yahoo_answers").read_collection("l6-answers", tmp_path)
    assert len(texts) == 2


def test_long_texts_are_cut_and_blank_and_repeated_ones_left_out(write, tmp_path):
    record = {
        "id": 1,
        "question": "how " + "x" * 200_000,
        "nbestanswers": ["a", " ", "a", "b" * 200_000],
    }
    blank = {"id": 2, "question": " ", "nbestanswers": ["never read"]}
    last = {"id": 3, "question": "how?", "nbestanswers": ["c"]}
    write("y/nfL6.json", [blank, record, record, last])
    questions = list(_read_questions(tmp_path / "y" / "nfL6.json"))
    assert [question.id for question in questions] == ["1", "3"]
    assert len(questions[0].question) == MAX_TEXT_CHARS
    assert [len(answer) for answer in questions[0].answers] == [1, MAX_TEXT_CHARS]
    [texts] = get_corpus("yahoo_answers").read_collection("answers", tmp_path / "y")
    assert (texts[0], texts[2]) == ("a", "c")


def test_candidates_are_numbered_and_own_answers_come_first(release):
    rows = read_split("yahoo_answers", "train", release, run_depth=3).to_pylist()
    first = [row for row in rows if row["question_id"] == rows[0]["question_id"]]
    name = rows[0]["question_id"]
    assert [row["candidate_id"] for row in first] == [f"{name}-{k}" for k in range(len(first))]
    assert [row["label"] for row in first] == [1, 1, *[0] * (len(first) - 2)]
    assert first[0]["candidate"] == f"{QUESTIONS[int(name)][:-1]} with glue."
    assert len(read_split("yahoo_answers", "train", release)) > len(rows)
