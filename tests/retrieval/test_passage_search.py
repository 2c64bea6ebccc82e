import json

import pytest
from pydantic import ValidationError

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.main import main
from as2ray.errors import ConfigError, EvaluationError
from as2ray.retrieval import passage_search
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.passage_search import PassageSearcher
from as2ray.retrieval.sentence_index import SentenceIndex


@pytest.fixture
def index(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    return tmp_path / "i"


@pytest.fixture
def joint(checkpoint, tmp_path):
    encoder = checkpoint("bert", None, initializer_range=0.3)
    return save(init_ranker(encoder, max_length=60, is_joint=True), tmp_path / "joint")


def test_passages_are_the_paragraphs_of_the_best_sentences(index, joint):
    opened = SentenceIndex.open(index)
    ranker = load(joint, device="cpu", dtype="fp32")
    searcher = PassageSearcher(opened, ranker, num_passages=3)
    texts = [opened.texts(numbers) for numbers in searcher.retrieve("what weighs tonnes, sings?")]
    assert [
        "The blue whale is the largest animal.",
        "It weighs up to 199 tonnes.",
        "It eats krill.",
    ] in texts
    assert len(texts) == len({tuple(text) for text in texts}) <= 3
    hits = searcher.ask("what weighs tonnes, sings?", 2)
    ranked = ranker.rank_passages("what weighs tonnes, sings?", texts, 2)
    assert [(hit.score, hit.sentences) for hit in hits] == [(r.score, r.sentences) for r in ranked]
    assert all(hit.text == " ".join(texts[r.index]) for hit, r in zip(hits, ranked))
    starts = [searcher.retrieve("what weighs tonnes, sings?")[r.index].start for r in ranked]
    sources = [(s.title, s.heading) for s in map(opened.sentence, starts)]
    assert [(hit.title, hit.heading) for hit in hits] == sources
    several = "penguins, owls, cats or whales"
    assert len(searcher.retrieve(several)) == 3
    assert [len(searcher.ask(several, *top_k)) for top_k in ((), (1,))] == [2, 1]
    assert {hit.document_id for hit in hits} <= {"whales.md", "insects/ants.html", "notes.txt", "a"}
    assert searcher.ask("zebra") == []
    with pytest.raises(EvaluationError, match="empty or non-text"):
        searcher.ask(" ")
    with pytest.raises(ConfigError, match="top_k=0"):
        searcher.ask("whales", 0)
    with pytest.raises(ValidationError, match="num_passages"):
        PassageSearcher(opened, ranker, num_passages=0)


def test_passages_are_those_of_the_first_sentences_alone(index, monkeypatch):
    searcher = PassageSearcher(SentenceIndex.open(index), None, num_passages=2)
    question = "largest blue whale, weighs tonnes, fly"
    [first, second] = searcher.retrieve(question)
    monkeypatch.setattr(passage_search, "HITS_PER_PASSAGE", 1)
    hits = searcher.index.search(question, 2)
    assert all(hit.index in first for hit in hits)
    assert searcher.retrieve(question) == [first] != [second]


def test_number_below_one_is_refused_before_a_ranker_is_asked(index):
    with pytest.raises(ConfigError, match="top_k=0"):
        PassageSearcher(SentenceIndex.open(index), None).ask("whales", 0)


def test_ask_of_a_joint_model_tells_passages(index, joint, capsys):
    flags = ["--index", str(index), "--model", str(joint)]
    main(["ask", "what weighs tonnes", *flags, "--jsonl", "true"])
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["document_id"] == "whales.md"
    assert line["text"].startswith("The blue whale")
    main(["ask", "what weighs tonnes", *flags])
    assert "whales.md" in capsys.readouterr().out
    main(["ask", "zebra", *flags])
    assert "No sentence has a word in common" in capsys.readouterr().err
