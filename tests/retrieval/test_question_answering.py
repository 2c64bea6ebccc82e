import json
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from as2ray.checkpoints.loading import load
from as2ray.cli.main import main
from as2ray.errors import ConfigError, EvaluationError, SentenceIndexError
from as2ray.outputs import RankedCandidate
from as2ray.retrieval.answer_scoring import AnswerModel, AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.question_answering import (
    FoundCandidates,
    QuestionAnswerer,
    resolve_scoring,
    select_answers,
)
from as2ray.retrieval.sentence_index import Candidate, SentenceIndex
from as2ray.text.bm25 import BM25


@pytest.fixture
def index(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    return SentenceIndex.open(tmp_path / "i")


@pytest.fixture
def ranker(checkpoint):
    return load(checkpoint("bert", 2), device="cpu", dtype="fp32")


def test_answers_are_the_ranker_s_best_of_what_was_found(index, ranker):
    answerer = QuestionAnswerer(index, ranker, num_candidates=5)
    result = answerer.ask("who sleeps at night", 2)
    texts = index.texts([c.index for c in index.search_candidates("who sleeps at night", 5, 1)])
    ranked = ranker.rank("who sleeps at night", texts, 2)
    assert [(a.text, a.score) for a in result.answers] == [(r.text, r.score) for r in ranked]
    assert result.num_candidates == len(texts)
    for answer in result.answers:
        assert answer.text in answer.context
        assert answer.document_id in ("insects/ants.html", "notes.txt", "a", "rows.jsonl#2")


def test_answerer_abstains_below_its_own_or_the_ranker_s_threshold(index, ranker):
    best = QuestionAnswerer(index, ranker).ask("night").best_score
    assert len(QuestionAnswerer(index, ranker, score_threshold=best).ask("night").answers) == 1
    low = QuestionAnswerer(index, ranker, score_threshold=min(1.0, best + 1e-3)).ask("night")
    assert (low.answers, low.best_score) == ((), best)
    ranker.threshold = 1.0
    assert QuestionAnswerer(index, ranker).ask("night").answers == ()
    assert QuestionAnswerer(index, ranker, score_threshold=0.0).ask("night").answers


def test_answer_shows_its_sentences_or_why_there_is_none(index):
    answered = QuestionAnswerer(index).ask("Which owls hunt?", 1)
    [answer] = answered.answers
    assert repr(answered) == f"{answer.score:.4f}  Owls hunt at night. (notes.txt)"
    assert "<td><mark>Owls hunt at night.</mark></td><td>notes.txt</td>" in answered._repr_html_()
    refused = replace(answered, answers=(), nearest=answered.answers, reason="too low")
    assert repr(refused) == f"no answer: too low\n{answered!r}"
    assert refused._repr_html_() == f"<p>no answer: too low</p>{answered._repr_html_()}"
    assert repr(replace(refused, nearest=())) == "no answer: too low"
    assert (answer.title, answer.heading, answered.reason) == ("notes", "", None)
    twice = replace(answer, text="Owls hunt.", context="Owls hunt. Owls hunt.", score=0.25)
    both = replace(answered, answers=(twice, twice))
    assert repr(both) == "0.2500  Owls hunt. (notes.txt)\n0.2500  Owls hunt. (notes.txt)"
    assert both._repr_html_().count("<mark>Owls hunt.</mark> Owls hunt.") == 2
    assert "notes.txt</td></tr><tr><td>0.2500" in both._repr_html_()


def test_answerer_takes_three_answers_with_neighbours_and_measures_the_search(index):
    started_at = perf_counter()
    answered = QuestionAnswerer(index).ask("penguins, owls, cats, dogs or whales")
    assert 0 < answered.retrieval_time_s <= perf_counter() - started_at
    assert len(answered.answers) == 3 < answered.num_candidates
    assert QuestionAnswerer(index).ask("penguins").num_candidates == 2


def test_ranker_is_not_asked_where_it_has_no_weight_or_nothing_is_there(index):
    ranker = SimpleNamespace(threshold=None, rank=None)  # it cannot be asked
    answerer = QuestionAnswerer(index, ranker, scoring=AnswerScoring({"bm25": 1.0}))
    assert answerer.ask("penguins").answers[0].text == "Penguins cannot fly."
    assert QuestionAnswerer(index, ranker).ask("zebra").answers == ()


def test_scoring_without_embeddings_has_one_part(index):
    for has_ranker, name in ((True, "ranker"), (False, "bm25")):
        assert resolve_scoring(index, None, has_ranker) == AnswerScoring({name: 1.0})
    assert resolve_scoring(index, None) == AnswerScoring({"ranker": 1.0})


def test_sentence_that_documents_repeat_is_one_answer(tmp_path):
    (tmp_path / "docs").mkdir()
    for name, last in (("a", "Owls hunt mice."), ("b", "Bats sleep by day.")):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"Owls sleep by day. {last}")
    write_index(tmp_path / "docs", tmp_path / "i")
    answers = QuestionAnswerer(SentenceIndex.open(tmp_path / "i"), None).ask("Owls sleep?").answers
    assert answers[0].text == "Owls sleep by day."
    assert len({answer.text for answer in answers}) == len(answers) == 3


def test_question_without_a_known_word_has_no_answer(index, ranker):
    result = QuestionAnswerer(index, ranker).ask("zebra?")
    assert (result.answers, result.num_candidates, result.best_score) == ((), 0, None)


def test_impossible_settings_are_refused(index, ranker):
    for wrong in ({"num_candidates": 0}, {"num_neighbors": -1}, {"score_threshold": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            QuestionAnswerer(index, ranker, **wrong)
    with pytest.raises(EvaluationError, match="empty or non-text"):
        QuestionAnswerer(index, ranker).ask(" ")
    with pytest.raises(ConfigError, match="top_k=0"):
        QuestionAnswerer(index, ranker).ask("night", 0)


def test_command_line_indexes_and_asks(documents, checkpoint, tmp_path, capsys):
    out = str(tmp_path / "index")
    main(["index", str(documents), "--output", out, "--num_shards", "2", "--encoder", "none"])
    shown = capsys.readouterr().out
    assert "sentences of 5 documents" in shown
    assert "skipped 1 of another kind, such as picture.png" in shown
    flags = ["--index", out, "--model", str(checkpoint())]
    main(["ask", "what weighs tonnes", *flags, "--top_k", "1"])
    assert "whales.md" in capsys.readouterr().out
    main(["ask", "what weighs tonnes", *flags, "--jsonl", "true"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"text", "score", "document_id", "context"} <= lines[0].keys()
    main(["ask", "zebra", *flags])
    assert "No answer: no sentence has a word in common" in capsys.readouterr().err
    main(["ask", "what weighs tonnes", "--index", out, "--top_k", "1"])
    assert "whales.md" in capsys.readouterr().out
    main(["ask", "tonnes", *flags, "--score_threshold", "1.0"])
    told = capsys.readouterr().err
    assert "No answer: the best score is 0." in told
    assert "an answer needs 1.0000.\nNearest:\n" in told
    with pytest.raises(SystemExit):
        main(["index", str(documents), "--output", out, "--columns", '{"body": "x"}'])
    assert "columns.body: unknown key" in capsys.readouterr().err


def test_command_line_says_why_the_ranker_is_not_asked(index, tmp_path, capsys):
    quality = {"bm25": 0.6, "bm25 + ranker": 0.61}
    AnswerScoring({"bm25": 1.0}, dev_quality=quality).write(tmp_path)  # and there are no weights
    flags = ["--index", str(index.folder), "--model", str(tmp_path)]
    main(["ask", "what weighs tonnes", *flags])
    shown = capsys.readouterr()
    assert "whales.md" in shown.out
    assert shown.err.startswith("Answers by bm25: the ranker is not asked: it adds +0.0100 MAP")


def test_question_on_another_subject_is_known_even_if_it_is_answered(index):
    parts = {"bm25": np.array([9.0]), "similarity": np.array([0.4])}
    found = FoundCandidates([Candidate(0, 9.0, 0.4)], parts, [0])
    for lowest, threshold, expected in (
        (0.3, None, (1, False)),
        (0.4, None, (1, False)),
        (0.5, 0.0, (1, True)),
    ):
        scoring = AnswerScoring({"similarity": 1.0}, min_similarity=lowest)
        answer = select_answers(index, scoring, found, (), 1, threshold)
        assert (len(answer.answers), answer.is_off_topic) == expected


def test_ranker_s_own_threshold_leaves_the_rule_for_other_subjects(index):
    parts = {"bm25": np.array([9.0]), "similarity": np.array([0.4])}
    found = FoundCandidates([Candidate(0, 9.0, 0.4)], parts, [0])
    scoring = AnswerScoring({"similarity": 1.0, "ranker": 1.0}, min_similarity=0.5)
    arguments = (index, scoring, found, [RankedCandidate(0, 0.9, "")], 1)
    answer = select_answers(*arguments, ranker_threshold=0.2)
    assert (answer.answers, answer.best_score) == ((), 0.9)
    assert answer.reason.startswith("the documents are on other subjects")
    assert select_answers(*arguments, threshold=0.2, ranker_threshold=1.0).answers


def test_threshold_without_a_score_is_refused(index, capsys):
    for wrong in ({"score_threshold": 0.9}, {"score_threshold": 0.9, "scoring": AnswerScoring({})}):
        with pytest.raises(ConfigError, match="needs a probability"):
            QuestionAnswerer(index, **wrong)
    answerer = QuestionAnswerer(index, score_threshold=0.0)
    ranked = answerer.look_up("night")
    assert answerer.select(ranked, 1).answers
    with pytest.raises(ConfigError, match="needs a probability"):
        answerer.select(ranked, 1, score_threshold=0.1)
    with pytest.raises(SystemExit):
        main(["ask", "night", "--index", str(index.folder), "--score_threshold", "0.9"])
    assert "leave the threshold out, or take 0, which always answers" in capsys.readouterr().err


def test_threshold_is_compared_with_the_probability_of_a_logit(index, ranker):
    probability = QuestionAnswerer(index, ranker).ask("night").best_score
    ranker.activation = "identity"
    result = QuestionAnswerer(index, ranker).ask("night")
    logit = np.log(probability / (1 - probability))
    assert result.answers[0].score == pytest.approx(logit, abs=1e-5)
    assert result.best_score == pytest.approx(probability, abs=1e-5)
    for threshold, is_given in ((0.0, True), (probability - 0.01, True), (0.999, False)):
        answerer = QuestionAnswerer(index, ranker, score_threshold=threshold)
        assert bool(answerer.ask("night").answers) is is_given


def test_threshold_is_applied_to_the_top_k_and_fills_no_gaps(index):
    # By the sum, the order is 0, 1, 2; by the ranker alone it is 0, 2, 1.
    found = FoundCandidates(
        [Candidate(i, bm25, None) for i, bm25 in enumerate((9.0, 8.0, 1.0))],
        {"bm25": np.array([9.0, 8.0, 1.0])},
        [0, 1, 2],
    )
    ranking = [RankedCandidate(i, score, "") for i, score in ((0, 0.9), (2, 0.6), (1, 0.4))]
    scoring = AnswerScoring({"bm25": 1.0, "ranker": 1.0})
    texts = index.texts([0, 1, 2])
    for top_k, expected in ((1, texts[:1]), (2, texts[:1]), (3, [texts[0], texts[2]])):
        answer = select_answers(index, scoring, found, ranking, top_k, threshold=0.5)
        assert [one.text for one in answer.answers] == expected


def test_probability_at_the_threshold_is_enough(index):
    found = FoundCandidates([Candidate(0, 9.0, None)], {"bm25": np.array([9.0])}, [0])
    model = AnswerModel((0.0, 0.0, 0.0), 0.0, 0.5)  # even odds
    scoring = AnswerScoring({"bm25": 1.0}, answer_model=model)
    assert select_answers(index, scoring, found, (), 1).best_score == 0.5
    assert select_answers(index, scoring, found, (), 1).answers


@pytest.mark.parametrize(
    ("threshold", "model_threshold", "is_given", "needed"),
    [
        (None, 0.5, True, None),
        (None, 0.75, False, "0.7500"),
        (None, None, True, None),
        (0.9, 0.5, False, "0.9000"),
        (0.0, 0.75, True, None),
    ],
)
def test_fitted_probability_decides_whether_there_is_an_answer(
    index, threshold, model_threshold, is_given, needed
):
    found = FoundCandidates([Candidate(0, 9.0, None)], {"bm25": np.array([9.0])}, [0])
    model = AnswerModel((0.0, 0.0, 0.0), np.log(2), model_threshold)  # two thirds
    scoring = AnswerScoring({"bm25": 1.0}, answer_model=model)
    answer = select_answers(index, scoring, found, (), 1, threshold)
    assert answer.best_score == pytest.approx(2 / 3)
    assert bool(answer.answers) is is_given
    shown, others = (answer.answers, answer.nearest)[:: 1 if is_given else -1]
    assert ([a.text for a in shown], others) == (index.texts([0]), ())
    if not is_given:
        assert answer.reason == (
            f"the best sentence is an answer with a probability of 0.6667, and an answer needs "
            f"{needed}"
        )


def test_index_tells_questions_on_other_subjects_without_labels(tmp_path, capsys):
    text = "Whales eat krill near the ice. Whales sing under water at night. "
    (tmp_path / "whales.md").write_text(
        f"# Food of large whales\n\n{text}\n\n# Songs of whales\n\n{text}"
    )
    index = str(tmp_path / "i")
    main(["index", str(tmp_path / "whales.md"), "--output", index])
    assert "get no answer" in capsys.readouterr().out
    main(["ask", "What do whales eat?", "--index", index])
    assert "krill" in capsys.readouterr().out
    main(["ask", "Who invented the steam engine?", "--index", index])
    assert "the documents are on other subjects" in capsys.readouterr().err
    main(["ask", "Who invented the steam engine?", "--index", index, "--score_threshold", "0"])
    assert "whales.md" in capsys.readouterr().out


def test_scoring_with_similarities_needs_an_index_with_embeddings(index):
    for scoring in ({"weights": {"similarity": 1.0}}, {"weights": {}, "max_similarity_gap": 0.1}):
        with pytest.raises(SentenceIndexError, match="has no embeddings") as error:
            QuestionAnswerer(index, scoring=AnswerScoring(**scoring, encoder="0123456789abcdef"))
        assert "--encoder" in error.value.fix


def test_question_of_stop_words_only_has_no_answer(documents, tmp_path):
    write_index(documents, tmp_path / "i", IndexConfig(bm25=BM25(stop_words=True)))
    result = QuestionAnswerer(SentenceIndex.open(tmp_path / "i")).ask("the of and?")
    assert result.answers == ()
    assert result.reason == "no sentence has a word in common with the question"
