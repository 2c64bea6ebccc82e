import json

import pytest

from as2ray.corpora import hotpotqa
from as2ray.corpora.preparation import read_split
from as2ray.corpora.verification import verify_releases
from as2ray.errors import CorpusError
from as2ray.tables import raw_files

RECORD = {
    "_id": "a1",
    "question": "Who met whom? ",
    "answer": "Ann",
    "supporting_facts": [["Ann", 1], ["Bob", 0], ["Bob", 0], ["Bob", 7], ["Cid", 0]],
    "context": [["Zoo", ["It is a zoo."]], ["Ann", ["Born.", " Met Bob.", ""]], ["Bob", ["He."]]],
}


def as_on_the_hub(record):
    facts, context = zip(*record["supporting_facts"]), zip(*record["context"])
    return {
        **{k: record[k] for k in ("question", "answer")},
        "id": record["_id"],
        "supporting_facts": dict(zip(("title", "sent_id"), map(list, facts))),
        "context": dict(zip(("title", "sentences"), map(list, context))),
    }


@pytest.fixture(params=["list", "lines", "hub's schema"])
def path(request, write):
    """The record in each of the forms that go round."""
    if request.param == "lines":
        return write("fullwiki_500.jsonl", json.dumps(RECORD) + "\n")
    made = RECORD if request.param == "list" else as_on_the_hub(RECORD)
    return write("hotpot_dev_distractor_v1.json", [made])


def split_of(path):
    return "fullwiki" if path.suffix == ".jsonl" else "dev"


def test_sentences_keep_their_passage_title_and_number(path):
    table = read_split("hotpotqa", split_of(path), path)
    assert table["candidate"].to_pylist() == ["It is a zoo.", "Born.", "Met Bob.", "He."]
    assert table["label"].to_pylist() == [0, 0, 1, 1]
    assert table["title"].to_pylist() == ["Zoo", "Ann", "Ann", "Bob"]
    assert table["sentence_index"].to_pylist() == [0, 0, 1, 0]
    assert table["passage_label"].to_pylist() == [0, 1, 1, 1]
    assert table["passage_id"].to_pylist() == ["a1-0", "a1-1", "a1-1", "a1-2"]
    assert set(table["question"].to_pylist()) == {"Who met whom?"}


@pytest.mark.parametrize(
    ("passages", "candidates", "labels", "passage_ids", "passage_labels"),
    [
        (
            "joined",
            ["It is a zoo.", "Born. Met Bob.", "He."],
            [0, 1, 1],
            ["a1-0", "a1-1", "a1-2"],
            [0, 1, 1],
        ),
        (
            "single",
            ["It is a zoo.", "Born.", "Met Bob.", "He."],
            [0, 0, 1, 1],
            ["a1-0-0", "a1-1-0", "a1-1-1", "a1-2-0"],
            [0, 0, 1, 1],
        ),
    ],
)
def test_candidates_may_be_joined_passages_or_passages_of_one_sentence(
    write, passages, candidates, labels, passage_ids, passage_labels
):
    path = write("hotpot_dev_distractor_v1.json", [RECORD])
    table = read_split("hotpotqa", "dev", path, passages=passages)
    assert table["candidate"].to_pylist() == candidates
    assert table["label"].to_pylist() == labels
    assert table["passage_id"].to_pylist() == passage_ids
    assert table["passage_label"].to_pylist() == passage_labels


def test_full_training_file_must_have_the_shares_that_the_paper_prints(write):
    two = RECORD | {"_id": "a2", "supporting_facts": [["Ann", 0], ["Bob", 0]]}
    path = write("hotpot_train_v1.1.json", [RECORD, two])
    checks = {check.name: check for check in hotpotqa.count_release(path.parent)}
    shares = {name: (c.published, c.actual) for name, c in checks.items() if "of 1,000" in name}
    # The first record has four different facts.
    assert shares == {
        "questions with two facts, of 1,000": (704, 500),
        "first sentences among the facts, of 1,000": (600, 667),
    }


def test_questions_with_missing_facts_are_left_out_of_the_gold_where_asked(path):
    questions = hotpotqa.read_gold_questions(split_of(path), path, complete_facts_only=True)
    assert questions == {}


def test_facts_that_the_passages_do_not_have_stay_in_the_gold_and_are_counted(path):
    question = hotpotqa.read_gold_questions(split_of(path), path)["a1"]
    assert question.facts == (("Ann", 1), ("Bob", 0), ("Bob", 7), ("Cid", 0))
    assert question.count_missing_facts() == (1, 1)
    assert question.answer == "Ann"


@pytest.mark.parametrize(
    ("split", "config", "hub_split"),
    [("dev", "distractor", "validation"), ("fullwiki", "fullwiki", "validation")],
)
def test_split_of_the_hub_gives_the_table_of_the_release(
    write, write_hub, split, config, hub_split
):
    write_hub("hotpotqa/hotpot_qa", config, hub_split, [as_on_the_hub(RECORD)])
    path = write("hotpot_dev_distractor_v1.json", [RECORD])
    expected = read_split("hotpotqa", "dev", path)
    assert read_split("hotpotqa", split, "hub").equals(expected)
    assert list(hotpotqa.read_gold_questions(split, "hub")) == ["a1"]


def test_answer_is_kept_unless_no_sentence_contains_it(write):
    answers = ["Ann", "yes", "no", "noanswer"]
    bare = {k: v for k, v in RECORD.items() if k != "_id"}
    path = write("hotpot_train_v1.1.json", [bare | {"answer": answer} for answer in answers])
    table = read_split("hotpotqa", "train", path)
    rows = dict(zip(table["question_id"].to_pylist(), table["answer"].to_pylist()))
    assert rows == {"q000000": "Ann", "q000001": "", "q000002": "", "q000003": "noanswer"}


@pytest.mark.parametrize("context", [[], [["Zoo", []], ["Ann", [" "]]]])
def test_question_without_any_sentence_has_no_rows_and_stays_in_the_gold(write, context):
    bare = {**RECORD, "_id": "bare", "context": context}
    path = write("hotpot_dev_distractor_v1.json", [bare, RECORD])
    assert set(read_split("hotpotqa", "dev", path)["question_id"].to_pylist()) == {"a1"}
    assert list(hotpotqa.read_gold_questions("dev", path)) == ["bare", "a1"]


def test_record_without_a_context_is_refused(write):
    record = {k: v for k, v in RECORD.items() if k != "context"}
    with pytest.raises(CorpusError, match=r"record 0(.|\n)*context"):
        read_split("hotpotqa", "dev", write("hotpot_dev_distractor_v1.json", [record]))


@pytest.mark.parametrize(
    "other",
    [
        {"supporting_facts": None},
        {"supporting_facts": [["Ann", "one"]]},
        {"context": [["Ann", None]]},
        {"context": [["Ann", [3]]]},
        {"context": [["Ann", "Born."]]},
        {"question": None},
        {"answer": None},
        {"question": "\ud800"},
    ],
)
def test_record_of_other_types_is_refused(write, other):
    path = write("hotpot_dev_distractor_v1.json", [RECORD | other])
    with pytest.raises(CorpusError, match=r"record 0|question a1|questions a1"):
        read_split("hotpotqa", "dev", path)


@pytest.mark.parametrize(("column", "key"), [("supporting_facts", "sent_id"), ("context", "title")])
def test_columns_of_different_lengths_are_refused(write, column, key):
    record = as_on_the_hub(RECORD)
    record[column][key].pop()
    with pytest.raises(CorpusError, match="record 0"):
        read_split("hotpotqa", "dev", write("hotpot_dev_distractor_v1.json", [record]))


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_json_records_come_one_by_one_however_the_file_is_cut(write, block):
    values = [{"a": [1, "],["]}, {"b": "ä"}, {}, {"c": None}]
    assert list(raw_files.read_json_records(write("list.json", values), block)) == values
    lines = "\n".join(map(json.dumps, values))
    assert list(raw_files.read_json_records(write("lines.jsonl.gz", lines), block)) == values
    assert list(raw_files.read_json_records(write("none.json", []), block)) == []


@pytest.mark.parametrize("text", ['[{"a": 1}, {"b"', '[{"a": 1}', '{"a": 1}\n{"b": ', "[1, x]"])
def test_json_records_of_a_cut_file_are_refused(write, text):
    with pytest.raises(CorpusError):
        list(raw_files.read_json_records(write("cut.json", text)))


def test_samples_have_the_counts_that_they_came_with(real):
    if not (real / "hotpotqa").is_dir():
        pytest.skip("no HotpotQA sample")
    checks = [c for c in verify_releases(real) if c.corpus == "hotpotqa"]
    assert len(checks) == 9
    assert all(check.is_ok for check in checks), checks
