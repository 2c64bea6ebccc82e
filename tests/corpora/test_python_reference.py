import json
import logging
import re
from collections import Counter, defaultdict
from importlib.resources import files

import pyarrow as pa
import pytest

from as2ray.corpora import python_reference as reference
from as2ray.corpora.python_reference import (
    CORPUS,
    AnnotatedQuestion,
    Document,
    _extract_sentences,
)
from as2ray.errors import CorpusError
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.tables import PreparedTable
from as2ray.tables.schema import count_table

PAGE = """The "walk" statement
********************

   walk_stmt ::= "walk" identifier

The *walk* statement moves "x" along the left-
hand path, **always** one step at a
time [1].

   walk: "walk" identifier

>>> walk(1)
A prompt shows that nothing here is prose.

* A walker that meets a wall stops at once and
  raises "WallError" to whoever called it.

Steps
   A step is the smallest move that a walker can make at all.

walker.rest(seconds)

   Makes the walker stand still for so many seconds.

   for step in walker: print(step)

+---------+---------------------------------------+
| Option  | The option is printed in this table.  |
+---------+---------------------------------------+

Paces and strides
=================

The types.Pace of a walker is one of the numbers that "pace()" returns.

-[ Footnotes ]-

[1] Unless the walker has been told to run by somebody else.
"""

SENTENCES = [
    'The walk statement moves "x" along the left-hand path, always one step at a time.',
    'A walker that meets a wall stops at once and raises "WallError" to whoever called it.',
    "A step is the smallest move that a walker can make at all.",
    "Makes the walker stand still for so many seconds.",
    'The types.Pace of a walker is one of the numbers that "pace()" returns.',
]


HEADINGS = ["The walk statement: Steps", "The walk statement: walker.rest(seconds)"]


@pytest.fixture(scope="module")
def report():
    return reference.label_questions()


@pytest.fixture(scope="module")
def tables():
    return {split: whole(split) for split in reference.SPLITS}


def whole(split):
    return pa.concat_tables(list(CORPUS.read_tables(split, "unused")))


def ask(monkeypatch, *questions):
    monkeypatch.setattr(reference, "annotated_questions", lambda: questions)


def test_running_python_answers_most_questions_from_enough_candidates(report):
    assert len(report.labeled) >= 500
    assert len(report.labeled) + len(report.skipped) == len(reference.annotated_questions())
    assert all(sum(a.labels) >= 1 for a in report.labeled)
    assert all(5 <= len(a.labels) <= 100 for a in report.labeled)
    assert all(sum(a.labels) < len(a.labels) / 2 for a in report.labeled)
    assert all(sum(a.labels) <= 5 for a in report.labeled)


def test_phrases_of_a_question_occur_in_sentences_of_its_chapter_alone(report):
    chapters = defaultdict(set)
    phrases = {
        reference._normalize_text(phrase): reference.find_chapter(question.topic)
        for question in (answered.question for answered in report.labeled)
        for phrase in question.phrases
    }
    for document in reference.load_documents():
        for text in map(reference._normalize_text, document.sentences):
            for phrase in phrases:
                if phrase in text:
                    chapters[phrase].add(document.chapter)
    strays = {p: found for p, found in chapters.items() if found != {phrases[p]}}
    assert strays == {}


def test_written_questions_are_many_distinct_and_spread_over_topics():
    written = reference.annotated_questions()
    assert len({q.id for q in written}) == len(written)
    assert len({" ".join(re.findall(r"\w+", q.question.lower())) for q in written}) == len(written)
    assert len({q.topic for q in written}) >= 60
    assert all(q.question.endswith("?") and all(q.phrases) for q in written)
    assert all(re.fullmatch(re.escape(q.topic) + r"-\d+", q.id) for q in written)


def test_questions_of_the_test_are_of_many_topics_none_of_which_has_others():
    split_of = {
        q: reference.assign_split(reference.find_chapter(q.topic))
        for q in reference.annotated_questions()
    }
    topics = defaultdict(Counter)
    for question, split in split_of.items():
        topics[split][question.topic] += 1
    assert len(topics["test"]) >= 20
    assert max(topics["test"].values()) < 0.15 * topics["test"].total()
    assert not topics["test"].keys() & (topics["train"].keys() | topics["dev"].keys())


def test_question_file_holds_one_question_a_line():
    text = (files("as2ray.corpora") / "python_reference.json").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    assert [json.loads(line.rstrip(","))["id"] for line in lines[1:-1]] == [
        q.id for q in reference.annotated_questions()
    ]


def test_candidates_of_the_running_python_are_no_code():
    code = re.compile(
        r"::=|>>>|\| +\||\+--|^\s*(def|class|import|from) \w+.*:$|^\w+\(.*\)$|^\w+ = "
    )
    texts = [sentence for d in reference.load_documents() for sentence in d.sentences]
    assert [s for s in texts if code.search(s) or "\n" in s or "  " in s] == []


def test_no_sentence_of_the_running_python_stands_twice():
    texts = [sentence for d in reference.load_documents() for sentence in d.sentences]
    assert len(texts) > 2000
    assert len(set(texts)) == len(texts)


def test_splits_share_no_document_candidate_or_question(tables):
    for column in ("document_id", "candidate", "question_id", "question"):
        values = [set(table[column].to_pylist()) for table in tables.values()]
        assert len(set.union(*values)) == sum(map(len, values)), column


def test_splits_hold_every_answered_question_300_of_them_for_the_test(tables, report):
    sizes = {split: count_table(table).num_questions for split, table in tables.items()}
    assert sum(sizes.values()) == len(report.labeled)
    assert sizes["train"] >= 100
    assert sizes["dev"] >= 60
    assert sizes["test"] >= 300


def test_tables_are_the_same_each_time(tables):
    again = whole("test")
    assert again.equals(tables["test"])
    assert again["candidate_id"][0].as_py() == again["question_id"][0].as_py() + "-0"


def test_split_of_a_chapter_never_changes():
    chapters = ["loops", "strings", "names", "sequences", "import", "raise"]
    assert [reference.assign_split(c) for c in chapters] == [
        *("train", "train", "dev", "dev", "test", "test")
    ]


def test_every_chapter_of_the_splits_is_one_of_the_running_python():
    chapters = {document.chapter for document in reference.load_documents()}
    assert set().union(*reference.SPLITS.values()) <= chapters


def test_match_statement_is_in_one_chapter_whether_or_not_it_is_a_topic():
    found = reference.load_documents({"compound": PAGE, "match": PAGE.replace("walk", "match")})
    assert {d.chapter for d in found} == {"compound"}
    assert len(found[0].sentences) > len(SENTENCES)


def test_version_of_the_corpus_names_python_and_the_questions():
    assert CORPUS.version.startswith("Python 3.")
    assert PreparedTable(TableSpec(CORPUS.name, "test")).identity({})["corpus_version"]
    assert "corpus_version" not in PreparedTable(TableSpec("wikiqa", "test")).identity({})


def test_documents_keep_prose_and_drop_code_grammar_tables_and_footnotes():
    (document,) = reference.load_documents({"walk": PAGE})
    headings = (*["The walk statement"] * 2, *HEADINGS, "Paces and strides")
    assert document == Document("walk/The walk statement", "walk", tuple(SENTENCES), headings)


def test_indented_line_with_a_comment_is_code():
    assert reference._is_code(["  it goes on and on   # for ever"])
    assert not reference._is_code(["  it goes on and on for ever"])
    assert not reference._is_code(["it is number #1   # and no code, as it is not indented"])


def test_term_ends_where_its_lines_are_no_longer_deeper():
    lines = ["One", "****", "", "go(x)", "go(x, y)", "", "   Goes on for as long as it can.", ""]
    lines += ["   Note:", "", "     It stops where nothing is left.", ""]
    lines += ["Nothing of this is said of a function."]
    (document,) = reference.load_documents({"one": "\n".join(lines)})
    assert document.headings == ("One: go(x) go(x, y)", "One: go(x) go(x, y)", "One")


def test_documents_of_two_topics_give_a_repeated_sentence_to_the_first():
    found = reference.load_documents({"compound": PAGE, "walk": PAGE})
    assert [d.chapter for d in found] == ["walk"]


def test_documents_cut_a_long_section_evenly():
    lines = "\n\n".join(f"Sentence number {n} says something of its own." for n in range(170))
    found = reference.load_documents({"long": f"Long\n****\n\n{lines}\n"})
    assert [(d.id, len(d.sentences)) for d in found] == [
        ("long/Long 1", 56),
        ("long/Long 2", 57),
        ("long/Long 3", 57),
    ]


def test_question_finds_its_phrase_whatever_the_typesetting(monkeypatch):
    ask(
        monkeypatch,
        AnnotatedQuestion("walk-1", "When?", "walk", ("No such words", "RAISES WallError to")),
    )
    (asked,) = reference.label_questions({"walk": PAGE}).labeled
    assert asked.labels == (0, 1, 0, 0, 0)


def test_question_with_two_phrases_has_two_answers(monkeypatch):
    ask(
        monkeypatch,
        AnnotatedQuestion("walk-1", "How?", "walk", ("one step at a time", "smallest move")),
    )
    (asked,) = reference.label_questions({"walk": PAGE}).labeled
    assert asked.labels == (1, 0, 1, 0, 0)


def test_question_whose_phrase_is_missing_is_skipped_and_reported(monkeypatch, caplog):
    known = AnnotatedQuestion("walk-1", "How far?", "walk", ("one step at a time",))
    lost = AnnotatedQuestion("walk-2", "How fast?", "walk", ("at full speed",))
    gone = AnnotatedQuestion("swim-1", "How deep?", "swim", ("one step at a time",))
    ask(monkeypatch, known, lost, gone)
    with caplog.at_level(logging.WARNING):
        report = reference.label_questions({"walk": PAGE})
    assert [a.question for a in report.labeled] == [known]
    assert report.skipped == (lost, gone)
    assert "walk-2, swim-1" in caplog.text


def test_table_of_no_questions_is_empty():
    assert reference.build_table([]).num_rows == 0


def test_python_without_its_reference_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    reference._load_interpreter_documents.cache_clear()
    with pytest.raises(CorpusError, match="libpython3-stdlib"):
        reference.load_documents()
    monkeypatch.undo()
    reference._load_interpreter_documents.cache_clear()
    assert reference.load_documents()


def test_a_sentence_has_five_words_or_more():
    text = "It has but four. It has five words here. No end mark stands here"
    assert _extract_sentences(text) == ["It has five words here."]
