"""From a folder of documents to answers, end to end with a tiny encoder."""

import json

import pytest
import tiny

from as2ray.checkpoint import load
from as2ray.cli import main
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError, StageMismatchError
from as2ray.training.config import Training
from as2ray.training.job import Model
from pipelines.own_documents import OwnDocuments, _questions, run

TINY = Training(epochs=1, batch=8, learning_rate=1e-3, precision="fp32")


@pytest.fixture
def documents(tmp_path):
    root = tmp_path / "documents"
    root.mkdir()
    for number, topic in enumerate(tiny.TOPICS):
        sentences = [f"The {topic} has {word} of kind {n} inside." for n, word in enumerate(
            ("metal", "wooden", "paper", "glass", "stone"))]  # fmt: skip
        text = f"# All about {topic}\n\n" + "\n\n".join(sentences) + "\n"
        (root / f"{number}.md").write_text(text)
    return root


@pytest.fixture
def own(checkpoint, documents, tmp_path):
    return OwnDocuments(
        documents=str(documents),
        output=str(tmp_path / "out"),
        model=Model(str(checkpoint("bert", None)), max_length=32),
        training=TINY,
        adapt=TINY,
        ask=["metal in kovarin"],
        workers=Workers(count=0),
    )


def test_documents_become_a_ranker_that_answers_and_knows_its_threshold(own, tmp_path, capsys):
    ranker = run(own)
    shown = capsys.readouterr().out
    assert "metal in kovarin" in shown
    loaded = load(ranker)
    assert loaded.calibration
    assert 0 <= loaded.threshold <= 1
    index = str(tmp_path / "out" / "index" / "index")
    main(["ask", "metal kovarin", "--index", index, "--model", str(ranker), "--threshold", "0.0"])
    assert ".md" in capsys.readouterr().out
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("manifest.json")}
    assert run(own) == ranker
    assert made == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("manifest.json")}
    (tmp_path / "documents" / "0.md").write_text("Other words.")
    with pytest.raises(StageMismatchError, match="documents"):
        run(own)


def test_own_questions_annotations_and_a_cascade(own, checkpoint, tmp_path):
    from dataclasses import replace

    lines = [f"what {kind} has {topic}" for topic in tiny.TOPICS for kind in ("metal", "glass")]
    (tmp_path / "questions.txt").write_text("\n".join(lines) + "\n\n")
    annotated = tiny.write_corpus(tmp_path / "annotated", tiny.candidates(12))
    cascade = replace(own.model, exits=(1, 3))
    given = {"train": str(annotated)}
    asked = replace(
        own, questions=str(tmp_path / "questions.txt"), annotated=given, model=cascade, ask=[]
    )
    loaded = load(run(asked))
    assert loaded.exits == (1, 3)
    assert len(loaded.calibration) == 2
    for stage, own_rates in (("pseudo", own.training), ("adapted", own.adapt)):
        identity = json.loads((tmp_path / "out" / stage / "manifest.json").read_text())["identity"]
        rates = identity["training"]
        assert rates["head_learning_rate"] == pytest.approx(10 * own_rates.learning_rate)
    found = json.loads((tmp_path / "out" / "tables" / "train" / "manifest.json").read_text())
    assert 0 < found["found"]["counts"]["questions"] < 8


def test_more_questions_than_asked_for_are_drawn_from_all_of_them(own, tmp_path):
    from dataclasses import replace

    (tmp_path / "many.txt").write_text("".join(f"question {n}\n" for n in range(100)))
    few = _questions(replace(own, questions=str(tmp_path / "many.txt"), most=10), None)
    numbers = [int(query.id.removeprefix("own-")) for query in few]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert max(numbers) > 10


def test_too_few_questions_or_unknown_annotations_are_refused(own, tmp_path):
    from dataclasses import replace

    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(RecipeError, match="no question"):
        run(replace(own, questions=str(tmp_path / "none.txt")))
    (tmp_path / "one.txt").write_text("metal?\n")
    with pytest.raises(RecipeError, match="1 questions"):
        run(replace(own, questions=str(tmp_path / "one.txt")))
    with pytest.raises(RecipeError, match="nowhere"):
        run(replace(own, questions=str(tmp_path / "nowhere.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9?\n")
    with pytest.raises(RecipeError, match="latin"):
        run(replace(own, questions=str(tmp_path / "latin.txt")))
    for wrong in ({"most": 0}, {"generator": "t5"}, {"kinds": ["generator"]}):
        with pytest.raises(RecipeError):
            replace(own, **wrong)
    with pytest.raises(RecipeError, match="annotated tables"):
        replace(own, annotated={"test": "x"})
