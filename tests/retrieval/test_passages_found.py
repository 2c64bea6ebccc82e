import json

import pytest

from as2ray.checkpoint import load, save, start
from as2ray.cli import main
from as2ray.errors import RecipeError
from as2ray.retrieval.build import build
from as2ray.retrieval.index import SentenceIndex
from as2ray.retrieval.passages import PassageFinder


@pytest.fixture
def index(documents, tmp_path):
    build(documents, tmp_path / "i")
    return tmp_path / "i"


@pytest.fixture
def joint(checkpoint, tmp_path):
    made = start(checkpoint("bert", None, initializer_range=0.3), max_length=60, joint=True)
    return save(made, tmp_path / "joint")


def test_passages_are_the_paragraphs_of_the_best_sentences(index, joint):
    opened = SentenceIndex.open(index)
    ranker = load(joint, device="cpu", precision="fp32")
    finder = PassageFinder(opened, ranker, passages=3)
    texts = [opened.texts(numbers) for numbers in finder.retrieved("what weighs tonnes, sings?")]
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
    assert {f.document for f in found} <= {"whales.md", "insects/ants.html", "notes.txt", "a"}
    assert finder.ask("zebra") == []
    for question, top_k in ((" ", 2), ("whales", 0)):
        with pytest.raises(RecipeError, match="top_k"):
            finder.ask(question, top_k)
    with pytest.raises(RecipeError, match="passages=0"):
        PassageFinder(opened, ranker, passages=0)


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
