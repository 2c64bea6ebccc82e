import sys
from itertools import permutations
from unicodedata import normalize

import bm25s
import numpy as np
import pyarrow as pa
import pytest

from as2ray.errors import ConfigError, CorpusError
from as2ray.text.bm25 import BM25, BM25Index, list_probabilities, select_hits
from as2ray.text.term_counts import CollectionStatistics, build_bm25s

TEXTS = [
    "The capital of France is Paris",
    "paris hilton was born in New York",
    "A",
    "London is the capital of England , the capital .",
]


def table(questions, candidates):
    return pa.table({"question": questions, "candidate": candidates})


def test_search_finds_texts_that_share_words_best_first():
    hits = BM25().build_index(TEXTS).search("capital of FRANCE", 3)
    assert [hit.index for hit in hits] == [0, 3]
    assert hits[0].score > hits[1].score > 0


def test_letters_with_accents_apart_are_the_same_words():
    for text, query in permutations(normalize(form, "eröffnete Zürich") for form in ("NFC", "NFD")):
        index = BM25().build_index([text, "Zurich eroffnete."])
        assert [hit.index for hit in index.search(query, 2)] == [0]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("蓝鲸的体长，30 米。", ["蓝鲸", "鲸的", "的体", "体长", "30"]),
        ("東京タワーは333メートル", ["東京", "京タ", "タワ", "ワー", "ーは", "333"]),
        ("लंबाई है", ["लंबाई", "है"]),
        ("طوله متراً", ["طوله", "متراً"]),
    ],
)
def test_terms_of_scripts_without_blanks_and_with_vowel_signs(text, terms):
    assert BM25().tokenize([text])[0][: len(terms)] == terms
    assert BM25().build_index(["other words", text]).search(terms[0], 2)[0].index == 1


def test_search_of_equal_texts_keeps_their_order_and_k():
    hits = BM25().build_index(["same words"] * 4).search("same", 2)
    assert [hit.index for hit in hits] == [0, 1]


def test_search_of_unknown_words_is_empty():
    assert BM25().build_index(TEXTS).search("zebra") == []
    assert BM25().build_index(TEXTS).search("") == []


@pytest.mark.parametrize("k", [1, 10, 400, 3_000])
def test_search_finds_the_best_of_all_scores(k):
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(list("abcdefgh"), 6).repeat(2)) for _ in range(50)]
    index = BM25().build_index([text.replace(" ", "x ") for text in texts] * 41 + ["cx"])
    for query in ("ax bx", "cx", "hx gx fx ax"):
        scores = index.get_scores(query)
        expected = [i for i in np.argsort(-scores, kind="stable")[:k].tolist() if scores[i] > 0]
        assert [hit.index for hit in index.search(query, k)] == expected
        assert [hit.score for hit in index.search(query, k)] == scores[expected].tolist()


@pytest.mark.parametrize("k", [1, 40, 80, 99, 100, 101, 9_999])
def test_hits_are_the_highest_scores_however_many(k):
    scores = np.random.default_rng(k).permutation(6_405).astype(np.float32)
    hits = select_hits(scores, k)
    best = np.argsort(-scores)[:k].tolist()
    assert [hit.index for hit in hits] == best[: np.count_nonzero(scores)]
    assert [hit.score for hit in hits] == scores[[hit.index for hit in hits]].tolist()


def test_search_returns_ten_texts_and_prints_nothing(capsys):
    hits = BM25().build_index(["red fish"] * 12).search("red")
    assert [hit.index for hit in hits] == list(range(10))
    assert capsys.readouterr() == ("", "")


def test_score_equals_the_formula():
    k1, b = 0.9, 0.4  # the defaults
    (hit,) = BM25().build_index(["red fish", "blue bird sings", "green tree"]).search("bird bird")
    idf = np.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    length = 1 - b + b * 3 / (7 / 3)
    assert hit.score == pytest.approx(2 * idf / (1 + k1 * length), rel=1e-5)
    (hit,) = BM25().build_index(["bird", "red fish"]).search("bird")
    length = 1 - b + b * 1 / 1.5
    assert hit.score == pytest.approx(np.log(2) / (1 + k1 * length), rel=1e-5)


def test_index_has_the_settings_and_small_numbers():
    retriever = BM25(1.2, 0.75).build_index(TEXTS).retriever
    assert (retriever.k1, retriever.b, retriever.method) == (1.2, 0.75, "lucene")
    assert retriever.scores["data"].dtype == np.float32
    assert BM25().count_terms(TEXTS).matrix.dtype == np.int32


def test_score_candidates_equal_bm25s_row_by_row():
    random = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(30)])
    questions = np.repeat([" ".join(random.choice(words, 5)) for _ in range(8)], 6)
    candidates = [" ".join(random.choice(words, 9)) for _ in questions]
    config = BM25()
    scores = config.score_candidates(table(questions.tolist(), candidates))
    bm25s_index = bm25s.BM25(k1=config.k1, b=config.b)
    bm25s_index.index([text.split() for text in candidates], show_progress=False)
    expected = [bm25s_index.get_scores(q.split())[row] for row, q in enumerate(questions.tolist())]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_score_candidates_are_aligned_to_rows_in_any_order():
    questions = ["who rules England", "capital of France", "who rules England", "zebra"]
    scores = BM25().score_candidates(table(questions, TEXTS))
    order = [3, 1, 0, 2]
    shuffled = table(questions, TEXTS).take(order)
    np.testing.assert_allclose(BM25().score_candidates(shuffled), scores[order], rtol=1e-6)
    assert scores[3] == 0
    assert scores.dtype == np.float32


def test_stop_words_count_unless_left_out():
    texts = ["the cat", "a dog of the house"]
    assert BM25().build_index(texts).search("the")
    assert not BM25(stop_words=True).build_index(texts).search("the")


def test_lemmas_find_other_forms_of_a_word_and_count_as_one_term():
    pytest.importorskip("simplemma")
    texts = ["Owls hunted mice in Paris.", "the birds sing"]
    assert not BM25().build_index(texts).search("mouse hunts")
    lemmas = BM25(lemmas=True)
    assert lemmas.tokenize(["Mice, a mouse; PARIS"]) == [["mouse", "mouse", "paris"]]
    assert [hit.index for hit in lemmas.build_index(texts).search("mouse hunts")] == [0]
    once, twice = lemmas.count_terms(["mouse", "mouse mice"]).matrix.toarray()
    assert (once, twice) == ([1], [2])
    scores = lemmas.score_candidates(table(["mouse", "mouse"], texts))
    assert scores[0] > scores[1] == 0
    assert BM25(lemmas=True, stop_words=True).tokenize(["the mice of it"]) == [["mouse"]]


def test_lemmas_without_their_package_are_refused_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplemma", None)
    with pytest.raises(ConfigError, match=r"pip install 'as2ray\[lemmas\]'"):
        BM25(lemmas=True).build_index(TEXTS)


@pytest.mark.parametrize("texts", [[], ["", "a ?"]])
def test_texts_without_words_are_refused(texts):
    with pytest.raises(CorpusError, match=f"{len(texts)} texts without a word"):
        BM25().build_index(texts)


@pytest.mark.parametrize("wrong", [{"k1": -0.1}, {"b": 1.1}, {"b": -0.1}, {"delta": 1.0}])
def test_bm25_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BM25(**wrong)


def test_probabilities_of_a_list_are_of_its_own_words():
    candidates = ["red fish", "blue bird sings", ""]
    unknown = BM25().build_index(candidates).get_scores("green")
    assert (unknown.dtype, unknown.tolist()) == (np.float32, [0] * len(candidates))
    scores = BM25().build_index(candidates).get_scores("red red bird")
    expected = 1 / (1 + np.exp(-scores / 10))
    np.testing.assert_allclose(list_probabilities("red red bird", candidates), expected, rtol=1e-6)
    assert expected[0] > expected[1] > expected[2] == 0.5
    without_words = list_probabilities("red", ["", "a"])
    assert without_words.tolist() == [0.5, 0.5]
    assert without_words.dtype == np.float32


def test_shards_weighted_by_all_statistics_score_as_one_index():
    config = BM25(k1=1.2, b=0.75)
    shards = [config.count_terms(texts) for texts in (TEXTS[:1], TEXTS[1:])]
    statistics = CollectionStatistics.from_shards(shards)
    assert (statistics.num_texts, statistics.num_words) == (4, 21)
    assert {word: statistics.document_frequency[word] for word in ("paris", "is", "zebra")} == {
        "paris": 2,
        "is": 2,
        "zebra": 0,
    }
    indexes = [BM25Index(config, build_bm25s(s, statistics, config.k1, config.b)) for s in shards]
    whole = config.build_index(TEXTS)
    for query in ("capital of paris", "is is of", "hilton zebra", "zebra"):
        scores = np.concatenate([index.get_scores(query) for index in indexes])
        np.testing.assert_allclose(scores, whole.get_scores(query), rtol=1e-6)


def test_word_that_a_question_repeats_counts_again():
    questions = ["bird", "bird bird sings", "fish zebra"]
    candidates = ["red fish", "blue bird bird sings", "red bird"]
    rows = [(q, c) for q in questions for c in candidates]
    scores = BM25().score_candidates(table(*map(list, zip(*rows))))
    index = BM25().build_index([c for _, c in rows])
    expected = [index.get_scores(q)[row] for row, (q, _) in enumerate(rows)]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
