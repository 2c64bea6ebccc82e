import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.corpora.page_grades import grade_paragraph_answer, overlaps, split_page
from as2ray.corpora.preparation import read_split
from as2ray.corpora.squad import count_release
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables import raw_files


def grades(table, question):
    return [r["grade"] for r in table.to_pylist() if r["question_id"] == question]


def test_squad_sentences_of_the_article_get_the_four_grades(squad):
    table = read_split("squad", "dev", squad)
    # Sentence 1-3 are the paragraph; "They met Ann" has the answer elsewhere, "Annual" does not.
    assert grades(table, "a") == [4, 3, 3, 1, 2, 1, 1]
    assert table["label"].to_pylist()[:7] == [1, 0, 0, 0, 0, 0, 0]
    assert set(table["document_id"].to_pylist()) == {"Oxbridge"}


def test_squad_answer_across_sentences_makes_all_of_them_positive(squad):
    assert grades(read_split("squad", "dev", squad), "b")[:3] == [4, 4, 3]


def test_squad_paragraph_candidates_keep_the_ids_of_the_article(squad):
    table = read_split("squad", "dev", squad, candidate_scope="paragraph")
    ids = [r["candidate_id"] for r in table.to_pylist() if r["question_id"] == "c"]
    assert ids == ["c-3", "c-4", "c-5"]
    assert grades(table, "c") == [4, 3, 3]


def test_squad_negatives_are_chosen_by_grade(squad):
    table = read_split("squad", "dev", squad, negative_grades=(2,))
    assert grades(table, "a") == [4, 2]


@pytest.mark.parametrize("most", [1, 2, 6])
def test_squad_cap_keeps_positives_and_draws_the_rest(squad, most):
    table = read_split("squad", "dev", squad, max_candidates=most)
    assert len(grades(table, "a")) == most
    assert grades(table, "a").count(4) == 1
    assert grades(table, "b").count(4) == 2
    assert table.equals(read_split("squad", "dev", squad, max_candidates=most))


def test_squad_drawing_depends_on_the_seed(squad):
    drawn = {
        tuple(
            read_split("squad", "dev", squad, max_candidates=3, seed=s)["candidate_id"].to_pylist()
        )
        for s in range(6)
    }
    assert len(drawn) > 1


def test_squad_splitter_is_an_option(squad):
    assert read_split("squad", "dev", squad, sentence_splitter="lines").num_rows == 9


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"candidate_scope": "page"}, "candidate_scope='page'"),
        ({"max_candidates": 0}, "max_candidates=0"),
        ({"sentence_splitter": "punkt"}, "unknown sentence splitter 'punkt'"),
        ({"negative_grades": 3}, "negative_grades=3"),
        ({"max_candidates": 2.5}, r"max_candidates=2\.5"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_squad_impossible_option_is_refused(squad, options, problem):
    with pytest.raises(ConfigError, match=problem):
        read_split("squad", "dev", squad, **options)


def test_squad_json_cut_short_is_refused(squad):
    path = squad / "dev-v1.1.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(CorpusError, match=r"dev-v1.1.json, line 1"):
        read_split("squad", "dev", squad)


def test_squad_answer_at_another_offset_is_refused(squad):
    path = squad / "dev-v1.1.json"
    value = json.loads(path.read_text())
    value["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 3
    path.write_text(json.dumps(value))
    with pytest.raises(CorpusError, match="question a: the answer 'Ann' is not at its offset"):
        read_split("squad", "dev", squad)


def test_squad_question_without_answers_is_refused(squad):
    path = squad / "dev-v1.1.json"
    value = json.loads(path.read_text())
    value["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    path.write_text(json.dumps(value))
    with pytest.raises(CorpusError, match="paragraph 0: no sentence contains"):
        read_split("squad", "dev", squad)


def test_squad_other_json_is_refused(write):
    path = write("dev-v1.1.json", {"rows": []})
    with pytest.raises(CorpusError, match=r"\['rows'\], without \['data'\]"):
        read_split("squad", "dev", path)


def test_grades_agree_with_the_definition_word_by_word():
    paragraphs = ["A cat sat. The dog ran.", "CAT food. Concat it. A  cat\nsat here.", "Dogs."]
    page = split_page("p", paragraphs, "simple")
    assert grade_paragraph_answer(page, 0, [(2, "cat")]).tolist() == [4, 3, 2, 1, 2, 1]
    assert grade_paragraph_answer(page, 1, [(0, "CAT"), (10, "Concat")]).tolist() == [
        2,
        1,
        4,
        4,
        3,
        1,
    ]
    assert np.all(grade_paragraph_answer(page, 0, [(2, "cat sat")])[[0, 4]] == [4, 2])


def test_squad_options_may_be_written_as_text(squad):
    some = read_split("squad", "dev", squad, max_candidates="2", negative_grades=["1"])
    assert some.equals(read_split("squad", "dev", squad, max_candidates=2, negative_grades=(1,)))


@pytest.mark.parametrize("content", [{"data": 3}, {"data": [{"title": 3, "paragraphs": [4]}]}])
def test_squad_of_other_types_is_refused(write, content):
    path = write("dev-v1.1.json", content)
    with pytest.raises(CorpusError):
        read_split("squad", "dev", path)


def test_squad_release_counts_articles_paragraphs_and_questions(squad):
    counts = [tuple(count) for count in count_release(squad)]
    names = ("articles", 48, 1), ("paragraphs", 2_067, 3), ("questions", 10_570, 3)
    assert counts == [("dev", *name) for name in names]
    packed = squad / "train-part-v1.1.json.gz"
    packed.write_bytes(gzip.compress((squad / "dev-v1.1.json").read_bytes()))
    assert ("train", "paragraphs", 2_430, 3) in [tuple(count) for count in count_release(squad)]


def test_squad_article_without_questions_has_no_candidates(write):
    article = {"title": "Oxbridge", "paragraphs": [{"context": "Nobody came.", "qas": []}]}
    path = write("dev-v1.1.json", {"data": [article]})
    assert read_split("squad", "dev", path).num_rows == 0


def test_squad_of_the_hub_gives_the_table_of_the_release(squad, tmp_path, monkeypatch):
    monkeypatch.setenv(raw_files.HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    articles = json.loads((squad / "dev-v1.1.json").read_text())["data"]
    rows = [
        {
            "id": record["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": record["question"],
            "answers": {
                "text": [answer["text"] for answer in record["answers"]],
                "answer_start": [answer["answer_start"] for answer in record["answers"]],
            },
        }
        for article in articles
        for paragraph in article["paragraphs"]
        for record in paragraph["qas"]
    ]
    folder = tmp_path / "hub" / "rajpurkar" / "squad" / "plain_text"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "validation-00000-of-00001.parquet")
    for scope in ("paragraph", "article"):
        options = {"candidate_scope": scope, "verify": False}
        # A paragraph without questions is not on the hub, so an article lacks its sentences.
        release = read_split("squad", "dev", squad, **options).to_pylist()
        paragraphs = (paragraph for article in articles for paragraph in article["paragraphs"])
        asked = {paragraph["context"] for paragraph in paragraphs if paragraph["qas"]}
        expected = [row for row in release if any(row["candidate"] in text for text in asked)]
        assert read_split("squad", "dev", "hub", **options).to_pylist() == expected


def test_squad_sample_of_a_question_depends_on_its_id_and_not_on_its_place(squad):
    def sample() -> dict[str, set[str]]:
        rows = read_split("squad", "dev", squad, max_candidates=3).to_pylist()
        return {id: {row["candidate"] for row in rows if row["question_id"] == id} for id in names}

    path = squad / "dev-v1.1.json"
    content = json.loads(path.read_text())
    [first, *_] = content["data"][0]["paragraphs"]
    asked, names = first["qas"][0], [f"a{number}" for number in range(8)]
    first["qas"] = [asked | {"id": name} for name in names]
    path.write_text(json.dumps(content))
    before = sample()
    assert len(set(map(frozenset, before.values()))) > 1
    first["qas"].reverse()
    path.write_text(json.dumps(content))
    assert sample() == before


def test_ranges_overlap_where_they_share_a_character_with_any_span():
    ranges = np.array([[0, 5], [5, 9], [10, 12]])
    for spans, expected in (
        ([(5, 6)], [False, True, False]),
        ([(4, 6)], [True, True, False]),
        ([(0, 1), (11, 20)], [True, False, True]),
        ([(9, 10)], [False, False, False]),
    ):
        assert overlaps(ranges, spans).tolist() == expected
