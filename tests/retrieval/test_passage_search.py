import json

import pytest

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.main import main
from as2ray.errors import ConfigError
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.passage_search import PassageSearcher
from as2ray.retrieval.sentence_index import SentenceIndex


@pytest.fixture
def index(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    return tmp_path / "i"


@pytest.fixture
def joint(checkpoint, tmp_path):
    made = init_ranker(
        checkpoint("bert", None, initializer_range=0.3), max_length=60, is_joint=True
    )
    return save(made, tmp_path / "joint")


def test_passages_are_the_paragraphs_of_the_best_sentences(index, joint):
    opened = SentenceIndex.open(index)
    ranker = load(joint, device="cpu", dtype="fp32")
    finder = PassageSearcher(opened, ranker, num_passages=3)
    texts = [opened.texts(numbers) for numbers in finder.retrieve("what weighs tonnes, sings?")]
    assert [
        "The blue whale is the largest animal.",
        "It weighs up to 199 tonnes.",
        "It eats krill.",
    ] in texts
    assert len(texts) == len({tuple(text) for text in texts}) <= 3
    found = finder.ask("what weighs tonnes, sings?", 2)
    ranked = ranker.rank_passages("what weighs tonnes, sings?", texts, 2)
    assert [(f.score, f.sentences) for f in found] == [(r.score, r.sentences) for r in ranked]
    assert all(f.text == " ".join(texts[r.index]) for f, r in zip(found, ranked))
    assert {f.document_id for f in found} <= {"whales.md", "insects/ants.html", "notes.txt", "a"}
    assert finder.ask("zebra") == []
    for question, top_k in ((" ", 2), ("whales", 0)):
        with pytest.raises(ConfigError, match="top_k"):
            finder.ask(question, top_k)
    with pytest.raises(ConfigError, match="passages=0"):
        PassageSearcher(opened, ranker, num_passages=0)


def test_ask_of_a_joint_model_tells_passages(index, joint, capsys):
    told = ["--index", str(index), "--model", str(joint)]
    main(["ask", "what weighs tonnes", *told, "--json_lines", "true"])
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["document"] == "whales.md"
    assert line["text"].startswith("The blue whale")
    main(["ask", "what weighs tonnes", *told])
    assert "whales.md" in capsys.readouterr().out
    main(["ask", "zebra", *told])
    assert "No sentence shares a word" in capsys.readouterr().err
