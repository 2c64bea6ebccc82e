import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.corpora.natural_questions import (
    ASNQ_OPTIONS,
    CORPUS,
    find_files,
    parse_document,
    read_records,
    select_answers,
)
from as2ray.corpora.preparation import read_split
from as2ray.corpora.record_conversion import Quarantine, with_quarantine
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.verification import data_root
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.raw_files import HUB_COPIES
from as2ray.text.sentences import register_splitter

PAGE = (
    "Oxbridge - Wikipedia <H1> Oxbridge ( edit ) </H1>"
    " <P> Ann founded Oxbridge . It opened in 1209 . </P>"
    " <Ul> <Li> Gowns were worn by Ann </Li> <Li> Annual dues rose </Li> </Ul>"
    " <Table> <Tr> <Th_colspan=2> Founder </Th> <Td> Bo </Td> </Tr> </Table>"
)
TOKENS = PAGE.split(" ")
PARAGRAPH = (TOKENS.index("<P>"), TOKENS.index("</P>") + 1)
ANN = (TOKENS.index("Ann"), TOKENS.index("Ann") + 1)
YEAR = (TOKENS.index("1209"), TOKENS.index("1209") + 1)
CELL = (TOKENS.index("Bo"), TOKENS.index("Bo") + 1)
ROW = (TOKENS.index("<Tr>"), TOKENS.index("</Tr>") + 1)


def span(place):
    return {"start_token": place[0], "end_token": place[1]}


def marked(long=None, *short):
    return {"long_answer": span(long or (-1, -1)), "short_answers": [span(s) for s in short]}


def simplified(*annotations, id="7", **changes):
    return {
        "example_id": id,
        "question_text": "who founded oxbridge",
        "document_url": "//oxbridge",
        "document_text": PAGE,
        "annotations": list(annotations),
    } | changes


def original(*annotations, **changes):
    record = simplified(*annotations, **changes)
    del record["document_text"]
    record["document_tokens"] = [
        {"token": t.replace("_", " "), "html_token": t.startswith("<")} for t in TOKENS
    ]
    return record


def lines(*found):
    return "".join(json.dumps(record) + "\n" for record in found)


def rows(write, *annotations, form=simplified, **options):
    path = write("nq-dev-all.jsonl.gz", lines(form(*annotations)))
    return read_split("nq", "dev", path, **options).to_pylist()


def told(found):
    return [(row["candidate"], row["grade"]) for row in found]


FOUND = [
    ("Oxbridge - Wikipedia", 1),
    ("Oxbridge", 1),
    ("Ann founded Oxbridge .", 4),
    ("It opened in 1209 .", 3),
    ("Gowns were worn by Ann", 2),
    ("Annual dues rose", 1),
    ("Founder", 1),
    ("Bo", 1),
]


@pytest.mark.parametrize("form", [simplified, original])
def test_nq_sentences_get_grades_from_token_spans_in_both_formats(write, form):
    found = rows(write, marked(PARAGRAPH, ANN), form=form)
    assert told(found) == FOUND
    assert [row["label"] for row in found] == [int(grade == 4) for _, grade in FOUND]
    assert {row["question_id"] for row in found} == {"7"}
    assert {row["question"] for row in found} == {"who founded oxbridge"}
    assert {row["document_id"] for row in found} == {"//oxbridge"}


def test_nq_of_the_hub_gives_the_table_of_the_release(write, tmp_path, monkeypatch):
    monkeypatch.setenv(HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    annotations = [
        [marked(PARAGRAPH, ANN, YEAR), marked()],
        [marked(ROW, CELL), marked(PARAGRAPH)],
        [marked()],
    ]
    records = [original(*each, id=str(number)) for number, each in enumerate(annotations)]

    def as_columns(records, *names):
        return {name: [record[name] for record in records] for name in names}

    rows = [
        {
            "id": record["example_id"],
            "document": {
                "html": "<p>not read</p>",
                "title": "Oxbridge",
                "tokens": {
                    "token": [token["token"] for token in record["document_tokens"]],
                    "is_html": [token["html_token"] for token in record["document_tokens"]],
                },
                "url": record["document_url"],
            },
            "question": {"text": record["question_text"], "tokens": []},
            "annotations": {
                "id": ["1"] * len(record["annotations"]),
                "long_answer": [each["long_answer"] for each in record["annotations"]],
                "short_answers": [
                    as_columns(each["short_answers"], "start_token", "end_token")
                    for each in record["annotations"]
                ],
                "yes_no_answer": [-1] * len(record["annotations"]),
            },
        }
        for record in records
    ]
    folder = tmp_path / "hub" / "google-research-datasets" / "natural_questions"
    (folder / "dev").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "dev" / "validation-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: dev\n  data_files:\n  - split: validation\n"
        "    path: dev/validation-*\n---\n"
    )
    release = write("nq-dev-all.jsonl", lines(*records))
    for options in ({}, ASNQ_OPTIONS):
        expected = read_split("nq", "dev", release, **options)
        assert set(expected["question_id"].to_pylist()) == {"0", "1"}
        assert read_split("nq", "dev", "hub", **options).equals(expected)


def test_nq_long_answer_may_be_the_whole_page_and_no_longer(write):
    assert 4 in [grade for _, grade in told(rows(write, marked((0, len(TOKENS)), ANN)))]
    with pytest.raises(CorpusError, match="must be inside"):
        rows(write, marked((0, len(TOKENS) + 1), ANN))


def test_nq_ranges_of_tokens_give_back_the_words(write):
    for boundaries in ("blocks", "rows", "none"):
        for row in rows(write, marked(PARAGRAPH, ANN), sentence_boundaries=boundaries):
            tokens = TOKENS[row["start"] : row["end"]]
            assert " ".join(t for t in tokens if not t.startswith("<")) == row["candidate"]


def test_nq_short_answer_across_sentences_makes_both_positive(write):
    crossing = (TOKENS.index("founded"), TOKENS.index("It") + 1)
    assert [g for _, g in told(rows(write, marked(PARAGRAPH, crossing)))] == [
        1,
        1,
        4,
        4,
        1,
        1,
        1,
        1,
    ]


def test_nq_as_asnq_short_answer_across_sentences_makes_neither_positive(write):
    crossing = (TOKENS.index("founded"), TOKENS.index("It") + 1)
    options = {"answer_rule": "string", "question_scope": "all"}
    found = told(rows(write, marked(PARAGRAPH, crossing), **options))
    assert [g for _, g in found] == [1, 1, 3, 3, 1, 1, 1, 1]
    found = told(rows(write, marked(PARAGRAPH, ANN), **options))
    assert found == [(t, 2 if t.startswith("Annual") else g) for t, g in FOUND]


@pytest.mark.parametrize(("text", "words", "string"), [("in 12091", 1, 2), ("by ann", 2, 1)])
def test_nq_as_asnq_grade_2_is_a_substring(write, text, words, string):
    """ "1209" is in "12091" and "Ann" is not in "ann"."""
    page = PAGE.replace("Gowns were worn by Ann", f"Gowns were worn {text}")
    short = YEAR if "12091" in text else ANN
    record = simplified(marked(PARAGRAPH, short), document_text=page)
    path = write("nq-dev-all.jsonl", lines(record))
    for rule, grade in (("words", words), ("string", string)):
        found = told(read_split("nq", "dev", path, answer_rule=rule).to_pylist())
        assert dict(found)[f"Gowns were worn {text}"] == grade


def test_nq_cells_of_a_row_stay_together_where_rows_are_boundaries(write):
    assert told(rows(write, marked(ROW, CELL), sentence_boundaries="rows"))[-1] == ("Founder Bo", 4)
    assert told(rows(write, marked(ROW, CELL)))[-2:] == [("Founder", 3), ("Bo", 4)]


def test_nq_compatible_options_join_the_page_flat_as_asnq_did(write):
    found = told(rows(write, marked(PARAGRAPH, ANN), **ASNQ_OPTIONS))
    assert found[0] == ("Oxbridge - Wikipedia Oxbridge ( edit ) Ann founded Oxbridge .", 4)
    assert found[1] == ("It opened in 1209 .", 3)
    assert found[2][0].startswith("Gowns were worn by Ann Annual dues")


NOTHING, NO_SHORT = marked(), marked(PARAGRAPH)
FIVE = [NOTHING, NO_SHORT, marked(PARAGRAPH, YEAR), marked(ROW, CELL), NOTHING]


@pytest.mark.parametrize(
    ("rule", "positive", "inside"),
    [
        ("union", {"It opened in 1209 .", "Bo"}, 2),
        ("agreed", {"It opened in 1209 .", "Bo"}, 2),
        ("first", {"It opened in 1209 ."}, 1),
    ],
)
def test_nq_five_annotators_count_by_the_rule_that_is_named(write, rule, positive, inside):
    found = told(rows(write, *FIVE, annotation_rule=rule))
    assert {text for text, grade in found if grade == 4} == positive
    assert sum(grade == 3 for _, grade in found) == inside


def test_nq_agreed_needs_two_of_several_annotators_and_one_of_one(write):
    [one] = parse_document(json.dumps(simplified(marked(PARAGRAPH, ANN))), "x").annotations
    assert select_answers([one], "agreed") == ([PARAGRAPH], [ANN])
    assert select_answers([one, one._replace(short_answers=())], "agreed") == ([], [])
    assert select_answers([one, one], "agreed") == ([PARAGRAPH] * 2, [ANN] * 2)


def test_nq_question_without_a_short_answer_is_left_out_unless_all_are_asked_for(write):
    path = write("nq-dev-all.jsonl", lines(simplified(NO_SHORT), simplified(id="8")))
    assert read_split("nq", "dev", path).num_rows == 0
    every = read_split("nq", "dev", path, question_scope="all")
    assert every["grade"].to_pylist() == [1, 1, 3, 3, 1, 1, 1, 1] + [1] * 8


@pytest.mark.parametrize("rule", ["words", "string"])
def test_nq_answer_of_tags_alone_is_in_no_other_sentence(write, rule):
    tag = (PARAGRAPH[1] - 1, PARAGRAPH[1])
    options = {"answer_rule": rule, "question_scope": "all"}
    grades = [row["grade"] for row in rows(write, marked(PARAGRAPH, tag), **options)]
    assert grades == [1, 1, 3, 3, 1, 1, 1, 1]


def test_nq_record_that_is_repeated_is_refused(write):
    record = simplified(marked(PARAGRAPH, ANN))
    path = write("nq-dev-all.jsonl", lines(record, record))
    with pytest.raises(CorpusError, match="16 rows but 8 distinct candidate ids"):
        read_split("nq", "dev", path)


def test_nq_negatives_are_chosen_by_grade_and_ids_stay(write):
    found = rows(write, marked(PARAGRAPH, ANN), negative_grades=(3,))
    assert [(row["candidate_id"], row["grade"]) for row in found] == [("7-2", 4), ("7-3", 3)]


def test_nq_values_over_several_lines_are_read_as_one_a_line(write):
    found = [simplified(marked(PARAGRAPH, ANN)), simplified(id="8")]
    flat = write("flat.jsonl", lines(*found))
    tall = write("tall.json", "\n".join(json.dumps(record, indent=1) for record in found))
    assert [json.loads(r.text) for r in read_records(flat)] == found
    assert [json.loads(r.text) for r in read_records(tall)] == found


def test_nq_original_files_of_a_folder_are_read_in_order(write, tmp_path):
    for number in (1, 0):
        write(f"v1.0/dev/nq-dev-0{number}.jsonl.gz", lines(simplified(id=str(number))))
    assert [path.name for path in find_files("dev", tmp_path)] == [
        "nq-dev-00.jsonl.gz",
        "nq-dev-01.jsonl.gz",
    ]
    assert len(read_split("nq", "dev", tmp_path, question_scope="all")["question_id"].unique()) == 2


BAD = [
    ("{", "Expecting"),
    ("[]", "list, without"),
    (simplified(document_text=None), "NoneType"),
    (simplified(marked((0, 999))), "999"),
    (simplified(marked(PARAGRAPH, CELL)), "short answers"),
    (simplified({"long_answer": {}}), "without"),
]


@pytest.mark.parametrize(("record", "came"), BAD, ids=[came for _, came in BAD])
def test_nq_bad_record_is_refused_with_its_line(write, record, came):
    text = record if isinstance(record, str) else json.dumps(record)
    path = write("nq-dev-all.jsonl", lines(simplified()) + text + "\n")
    with pytest.raises(CorpusError, match=rf"line 2(.|\n)*{came}"):
        read_split("nq", "dev", path)


@pytest.mark.parametrize(
    "options",
    [
        {"sentence_boundaries": "tags"},
        {"annotation_rule": "most"},
        {"question_scope": "few"},
        {"sentence_splitter": "x"},
    ],
)
def test_nq_unknown_option_is_refused_before_anything_is_read(options, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        read_split("nq", "dev", tmp_path / "absent.jsonl", **options)


def test_bad_records_are_set_aside_up_to_a_limit(write, tmp_path):
    good = [simplified(marked(PARAGRAPH, ANN), id=str(i)) for i in range(200)]
    path = write("nq-dev-all.jsonl", "{]\n" + lines(*good[:90]) + "[]\n" + lines(*good[90:]))
    quarantine = Quarantine(2)
    tables = list(with_quarantine(CORPUS, quarantine).read_tables("dev", path))
    assert sum(table.num_rows for table in tables) == 200 * len(FOUND)
    assert [bad.source.rsplit(" ", 1)[1] for bad in quarantine.rejected] == ["1", "92"]
    quarantine.write(tmp_path / "bad.jsonl")
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert all({"source", "problem"} == set(record) for record in written)
    with pytest.raises(
        CorpusError, match=rf"2 bad records, such as .*{path.name}, .*: .*; .*{path.name}"
    ):
        list(with_quarantine(CORPUS, Quarantine(1)).read_tables("dev", path))


def test_bad_record_that_is_found_late_is_set_aside_too(write):
    surrogate = simplified(marked(PARAGRAPH, ANN), id="8", document_url="half \ud800")
    path = write("nq-dev-all.jsonl", lines(simplified(marked(PARAGRAPH, ANN)), surrogate))
    quarantine = Quarantine(1)
    [table] = with_quarantine(CORPUS, quarantine).read_tables("dev", path)
    assert table.num_rows == len(FOUND)
    assert "surrogates not allowed" in quarantine.rejected[0].problem
    with pytest.raises(CorpusError, match="line 2: UnicodeEncodeError"):
        read_split("nq", "dev", path)


def test_corpus_that_is_candidates_already_cannot_be_built():
    with pytest.raises(CorpusError, match="candidates already"):
        with_quarantine(get_corpus("wikiqa"), Quarantine())


def test_splitter_of_ones_own_is_used(write):
    register_splitter(
        "halves", "1", lambda text: [(0, len(text) // 2), (len(text) // 2, len(text))]
    )
    found = rows(write, marked(PARAGRAPH, ANN), sentence_splitter="halves")
    assert all(row["end"] > row["start"] for row in found)
    assert len(found) == 14  # two halves of each of seven blocks


@pytest.fixture
def samples():
    folder = data_root() / "nq"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set AS2RAY_DATA to test on Natural Questions' samples")
    return folder


@pytest.mark.parametrize(
    ("name", "split", "answer", "place"),
    [
        ("ds-train-head1.json", "train", "A common example of permission marketing", (1953, 1970)),
        ("ds-dev-full-head1.json", "dev", "Trade winds have been used by captains", (120, 160)),
    ],
)
def test_real_samples_have_their_one_answer_in_its_place(samples, name, split, answer, place):
    [row] = [r for r in read_split("nq", split, samples / name).to_pylist() if r["grade"] == 4]
    assert row["candidate"].startswith(answer)
    assert (row["start"], row["end"]) == place
    flat = read_split("nq", split, samples / name, **ASNQ_OPTIONS)
    assert any(r["candidate"].startswith(answer) for r in flat.to_pylist() if r["grade"] == 4)


def test_real_squad_is_built_as_it_is_read(real):
    corpus = get_corpus("squad")
    options = {"candidate_scope": "paragraph", "sentence_splitter": "simple"}
    tables = list(
        with_quarantine(corpus, Quarantine()).read_tables(
            "dev", real / "squad", corpus.parse_options(options)
        )
    )
    whole = read_split("squad", "dev", real / "squad", **options)
    assert fingerprint(pa.concat_tables(tables)) == fingerprint(whole)
