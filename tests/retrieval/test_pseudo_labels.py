from random import Random

import pytest
from pydantic import ValidationError

from as2ray.errors import ConfigError, CorpusError
from as2ray.retrieval import query_generation
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.pseudo_labels import (
    PseudoLabelConfig,
    Query,
    label_queries,
    merge_pseudo_labels,
)
from as2ray.retrieval.query_generation import example_questions, generate_queries, sample_words
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import MAX_TEXT_CHARS, validate_table

TEXT = """# Birds of the north

Owls hunt at night. Owls hunt mice at night. Owls, hunt at night!
Eagles hunt by day. Crows hunt by day too.

## Food

Mice eat corn. Crows eat mice.
"""


@pytest.fixture
def index(tmp_path):
    (tmp_path / "birds.md").write_text(TEXT)
    write_index(tmp_path / "birds.md", tmp_path / "i")
    return SentenceIndex.open(tmp_path / "i")


def generate_pseudo_labels(index, queries, config=None):
    return merge_pseudo_labels([label_queries(index, queries, config or PseudoLabelConfig())])


def rows(found):
    return [(r["candidate"], r["label"]) for r in found.table.to_pylist()]


def test_first_of_the_list_is_the_answer_and_others_of_it_are_not(index):
    found = generate_pseudo_labels(
        index, [Query("q", "when do owls hunt")], PseudoLabelConfig(num_negatives=2)
    )
    validate_table(found.table, "made")
    hits = index.texts([h.index for h in index.search("when do owls hunt")])
    assert rows(found)[0] == (hits[0], 1)
    assert len(rows(found)) == 3
    assert {text for text, label in rows(found) if not label} <= set(hits[1:])
    assert found.table["document_id"].to_pylist() == ["birds.md"] * 3


def test_long_sentence_is_cut_to_what_a_table_may_hold(tmp_path):
    (tmp_path / "a.txt").write_text(f"Owls hunt.\n\nOwls {'o' * MAX_TEXT_CHARS}")
    write_index(tmp_path / "a.txt", tmp_path / "i")
    found = generate_pseudo_labels(SentenceIndex.open(tmp_path / "i"), [Query("q", "owls")])
    assert validate_table(found.table, "made").num_rows == 2


def test_near_duplicates_of_the_answer_are_no_negatives_if_asked(index):
    query = [Query("q", "owls hunt at night")]
    every = rows(generate_pseudo_labels(index, query, PseudoLabelConfig(num_negatives=9)))
    assert every[0] == ("Owls hunt at night.", 1)
    assert ("Owls, hunt at night!", 0) in every
    fewer = rows(
        generate_pseudo_labels(index, query, PseudoLabelConfig(num_negatives=9, max_similarity=0.8))
    )
    assert set(every) - set(fewer) == {("Owls, hunt at night!", 0), ("Owls hunt mice at night.", 0)}


def test_negatives_are_drawn_by_question_and_seed(index):
    queries = [Query("a", "hunt mice"), Query("b", "hunt by day")]
    how = PseudoLabelConfig(num_negatives=2)
    both = rows(generate_pseudo_labels(index, queries, how))
    assert both[3:] == rows(generate_pseudo_labels(index, queries[1:], how))
    seeds = [PseudoLabelConfig(num_negatives=2, seed=seed) for seed in range(5)]
    drawn = {tuple(rows(generate_pseudo_labels(index, queries, how))) for how in seeds}
    assert len(drawn) > 1


def test_questions_of_one_text_have_negatives_of_their_own(index):
    queries = [Query(f"q{number}", "hunt mice") for number in range(6)]
    both = rows(generate_pseudo_labels(index, queries, PseudoLabelConfig(num_negatives=2)))
    assert len({tuple(both[start : start + 3]) for start in range(0, len(both), 3)}) > 1


def test_list_may_be_deeper_than_a_hundred(tmp_path):
    (tmp_path / "owls.txt").write_text("\n\n".join(f"Owls hunt {n} mice." for n in range(120)))
    write_index(tmp_path / "owls.txt", tmp_path / "i")
    config = PseudoLabelConfig(depth=110, num_negatives=200)
    labels = generate_pseudo_labels(
        SentenceIndex.open(tmp_path / "i"), [Query("q", "owls")], config
    )
    assert labels.table.num_rows == 110


def test_questions_that_find_too_little_are_left_out_and_counted(index):
    queries = [Query("a", "zebra"), Query("b", "corn"), Query("c", "hunt mice")]
    found = generate_pseudo_labels(index, [*queries, Query("d", "gnu"), Query("e", "corn")])
    assert found.skipped == {"finds nothing": 2, "finds no negative": 2}
    assert set(found.table["question_id"].to_pylist()) == {"c"}
    with pytest.raises(CorpusError, match=r"'finds nothing': 1"):
        generate_pseudo_labels(index, queries[:1])


@pytest.mark.parametrize("wrong", [{"depth": 1}, {"num_negatives": 0}, {"max_similarity": 0.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PseudoLabelConfig(**wrong)


def test_headings_are_questions_with_their_document_s_title(index):
    texts = [query.text for query in generate_queries(index, ["headings"])]
    assert texts == ["Birds of the north", "Birds of the north Food"]


def test_heading_of_two_words_is_a_question_and_one_word_is_none(tmp_path):
    (tmp_path / "a.md").write_text("# Owls\n\nThey hunt.\n")
    (tmp_path / "b.md").write_text("# Field mice\n\nThey eat corn.\n")
    write_index(tmp_path, tmp_path / "i")
    index = SentenceIndex.open(tmp_path / "i")
    assert [query.text for query in generate_queries(index, ["headings"])] == ["Field mice"]
    assert generate_queries(index, ["leading"]) == []  # nothing follows a lone sentence


def test_each_question_has_an_id_of_its_own(index):
    queries = generate_queries(index, ["headings", "leading", "words"])
    assert {query.id.partition("-")[0] for query in queries} == {"heading", "leading", "words"}
    assert len({query.id for query in queries}) == len(queries)


def test_leading_sentence_is_never_its_own_answer(index):
    queries = generate_queries(index, ["leading"])
    assert [query.text for query in queries] == ["Owls hunt at night.", "Mice eat corn."]
    assert [query.id for query in queries] == ["leading-0", "leading-5"]
    found = generate_pseudo_labels(index, queries)
    for row in found.table.to_pylist():
        assert row["candidate"] != row["question"]


def test_leading_sentence_that_stands_twice_is_not_its_own_answer_either(tmp_path):
    (tmp_path / "a.txt").write_text("Owls hunt mice. They fly.\n\nOwls hunt. Mice hunt corn.\n")
    (tmp_path / "b.txt").write_text("Owls hunt mice. They swim.\n")
    write_index(tmp_path, tmp_path / "i")
    opened = SentenceIndex.open(tmp_path / "i")
    for row in generate_pseudo_labels(
        opened, generate_queries(opened, ["leading"])
    ).table.to_pylist():
        assert row["candidate"] != row["question"]


def test_words_of_another_alphabet_stay_whole():
    sentence = "Größere Brücken führen über die Straße. Мосты ведут через реку."
    assert set(sample_words(sentence, Random(0)).split()) <= {
        *("größere", "brücken", "führen", "über", "die", "straße"),
        *("мосты", "ведут", "через", "реку"),
    }


def test_words_of_a_sentence_are_some_of_its_own_in_order(index):
    queries = generate_queries(index, ["words"])
    assert [query.id for query in queries] == ["words-1", "words-4"]  # the others have too few
    text = index.sentence(1).text.lower()
    places = [text.index(word) for word in queries[0].text.split()]
    assert places == sorted(places)
    assert len(places) == 3


def test_generator_is_given_no_more_sentences_than_the_questions_take(tmp_path):
    lines = [f"Sentence number {n}." for n in range(1_000)]
    (tmp_path / "many.txt").write_text("\n\n".join(lines))
    write_index(tmp_path / "many.txt", tmp_path / "i")
    opened, given = SentenceIndex.open(tmp_path / "i"), list[str]()

    def asks(sentences):
        given.extend(sentences)
        return [f"What is {s}" if int(s[16:-1]) % 2 else " " for s in sentences]

    few = generate_queries(opened, ["generator"], max_questions=20, query_generator=asks)
    assert len(few) == 20
    assert len(given) <= 128
    given.clear()
    batch = generate_queries(
        opened, ["generator"], max_questions=64, query_generator=lambda s: given.extend(s) or s
    )
    assert len(batch) == len(given) == 64
    numbers = [int(query.id.removeprefix("generated-")) for query in few]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 500
    assert few == generate_queries(opened, ["generator"], max_questions=20, query_generator=asks)
    every = generate_queries(opened, ["generator"], query_generator=asks)
    assert every == generate_queries(opened, ["generator"], max_questions=500, query_generator=asks)
    assert [query.text for query in every] == [f"What is {line}" for line in lines[1::2]]
    # One that says the same about all is heard to the end.
    assert (
        len(
            generate_queries(
                opened, ["generator"], max_questions=2, query_generator=lambda s: ["What?"] * len(s)
            )
        )
        == 1
    )


def test_generator_asks_about_each_sentence_and_draws_are_bounded(index):
    def asks(sentences):
        return [f"Who is {s.split()[0]}?" if "Crows" in s else "" for s in sentences]

    (one,) = generate_queries(index, ["generator"], query_generator=asks)
    assert one.text == "Who is Crows?"
    assert len(generate_queries(index, ["headings", "leading"], max_questions=3)) == 3
    with pytest.raises(ConfigError, match="needs a query_generator"):
        generate_queries(index, ["generator"])
    with pytest.raises(ConfigError, match="'titles'"):
        generate_queries(index, ["titles"])
    for max_questions in (0, -1):
        with pytest.raises(ConfigError, match="max_questions"):
            generate_queries(index, ["words"], max_questions=max_questions)


def test_text_of_the_answer_is_no_negative_where_it_stands_again(tmp_path):
    (tmp_path / "a.txt").write_text("Owls hunt mice.\n\nOwls hunt.\n\nOwls hunt mice.\n")
    write_index(tmp_path, tmp_path / "i")
    opened = SentenceIndex.open(tmp_path / "i")
    table = generate_pseudo_labels(opened, [Query("q", "owls hunt mice")])
    assert rows(table) == [("Owls hunt mice.", 1), ("Owls hunt.", 0)]


def test_negatives_come_from_no_deeper_than_asked(index):
    config = PseudoLabelConfig(depth=3, num_negatives=9)
    found = rows(generate_pseudo_labels(index, [Query("q", "owls hunt at night")], config))
    assert [text for text, _ in found] == index.texts(
        [h.index for h in index.search("owls hunt at night", 3)]
    )


def test_examples_are_headings_of_several_words_spread_over_the_documents(
    tmp_path, index, monkeypatch
):
    assert example_questions(index) == ["Birds of the north"]
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(7):
        text = f"# Title {number}\n\nOwls hunt.\n\nMice eat.\n\n## Food\n\nCrows eat.\n"
        (folder / f"{number}.md").write_text(
            text + "\n## Long songs\n\nWhales sing.\n" * (number == 6)
        )
    write_index(folder, tmp_path / "examples")
    examples = example_questions(SentenceIndex.open(tmp_path / "examples"))
    assert examples == ["Title 0", "Title 2", "Title 4"]
    monkeypatch.setattr(query_generation, "EXAMPLE_PARAGRAPHS", 4)
    assert example_questions(SentenceIndex.open(tmp_path / "examples")) == ["Title 0", "Title 1"]


def test_example_is_the_heading_below_a_title_or_the_title(tmp_path):
    (tmp_path / "a.md").write_text("# Owls\n\n## How owls hunt\n\nAt night.\n")
    (tmp_path / "b.html").write_text("<title>All about bees</title><p>They dance.</p>")
    write_index(tmp_path, tmp_path / "i")
    index = SentenceIndex.open(tmp_path / "i")
    assert example_questions(index) == ["How owls hunt", "All about bees"]


def test_examples_of_plain_text_are_its_short_paragraphs(tmp_path):
    (tmp_path / "notes.txt").write_text(
        "Owls\n\nAnnual leave\n\nEvery employee has twenty-eight days of paid leave a year.\n\n"
        "Leave of eight days needs a written form.\n\nOwls hunt. Mice eat.\n\n"
        "Leave of nine days needs a long written form.\n"
    )
    write_index(tmp_path / "notes.txt", tmp_path / "examples")
    assert example_questions(SentenceIndex.open(tmp_path / "examples")) == [
        "Annual leave",
        "Leave of eight days needs a written form.",
    ]


def test_question_of_words_is_half_of_its_sentence_within_bounds():
    words = [f"{a}{b}owl" for a in "bcdfg" for b in "aeiou"]
    for num_words, size in ((3, None), (4, 3), (7, 3), (9, 4), (14, 7), (25, 7)):
        sentence = " the ".join(words[:num_words]).upper() + " is 1999, of"
        question = sample_words(sentence, Random(0))
        assert (question and len(question.split())) == size
        assert set((question or "").split()) <= set(words)
        assert question == sample_words(sentence, Random(0))


def test_fewer_questions_are_a_sample_in_their_order(index):
    everything = generate_queries(index, ["headings", "leading", "words"])
    for seed in (0, 1):
        some = generate_queries(index, ["headings", "leading", "words"], 3, seed)
        places = [[query.id for query in everything].index(query.id) for query in some]
        assert len(set(places)) == 3
        assert places == sorted(places)
    assert generate_queries(index, ["headings", "headings"]) == everything[:2]
    assert len(generate_queries(index, ["headings"], 2)) == 2
