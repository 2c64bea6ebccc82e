import json

import pytest

from as2ray.checkpoints.loading import load
from as2ray.cli.main import main
from as2ray.errors import ConfigError
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.question_answering import QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex


@pytest.fixture
def index(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    return SentenceIndex.open(tmp_path / "i")


@pytest.fixture
def ranker(checkpoint):
    return load(checkpoint("bert", 2), device="cpu", dtype="fp32")


def test_answers_are_the_ranker_s_best_of_what_was_found(index, ranker):
    answerer = QuestionAnswerer(index, ranker, num_candidates=5)
    reply = answerer.ask("who sleeps at night", 2)
    texts = index.texts(index.candidates("who sleeps at night", 5, 1))
    ranked = ranker.rank("who sleeps at night", texts, 2)
    assert [(a.text, a.score) for a in reply.answers] == [(r.text, r.score) for r in ranked]
    assert reply.num_candidates == len(texts)
    for answer in reply.answers:
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


def test_question_without_a_known_word_has_no_answer(index, ranker):
    reply = QuestionAnswerer(index, ranker).ask("zebra?")
    assert (reply.answers, reply.num_candidates, reply.best_score) == ((), 0, None)


def test_impossible_settings_are_refused(index, ranker):
    for wrong in ({"candidates": 0}, {"around": -1}, {"threshold": 2.0}):
        with pytest.raises(ConfigError):
            QuestionAnswerer(index, ranker, **wrong)
    with pytest.raises(ConfigError, match="question ' '"):
        QuestionAnswerer(index, ranker).ask(" ")


def test_command_line_indexes_and_asks(documents, checkpoint, tmp_path, capsys):
    out = str(tmp_path / "index")
    main(["index", str(documents), "--output", out, "--shards", "2"])
    shown = capsys.readouterr().out
    assert "sentences of 5 documents" in shown
    assert "skipped 1 of another kind, such as picture.png" in shown
    told = ["--index", out, "--model", str(checkpoint())]
    main(["ask", "what weighs tonnes", *told, "--top_k", "1"])
    assert "whales.md" in capsys.readouterr().out
    main(["ask", "what weighs tonnes", *told, "--json_lines", "true"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"text", "score", "document", "context"} <= lines[0].keys()
    main(["ask", "zebra", *told])
    assert "No sentence shares a word" in capsys.readouterr().err
    main(["ask", "tonnes", *told, "--threshold", "1.0"])
    assert "No answer: the best of 3 sentences" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["index", str(documents), "--output", out, "--columns", '{"body": "x"}'])
    assert "columns ['body']" in capsys.readouterr().err
