"""From a folder of documents to answers, end to end with a tiny encoder."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from pydantic import ValidationError

from as2ray.checkpoints.loading import load
from as2ray.cli.main import main
from as2ray.console.configuration import console_log
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import CheckpointError, ConfigError, CorpusError, LeakError, StaleStageError
from as2ray.experiments.documents import GeneratedQueries
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.indexes import DocumentIndex
from as2ray.experiments.queries import read_queries
from as2ray.experiments.store import Store
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from pipelines.own_documents import PIPELINE, OwnDocuments, _read_questions

HERE = WorkersConfig(num_workers=0)
TINY = TrainingConfig(epochs=1, global_batch_size=8, learning_rate=1e-3, precision="fp32")


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
def own(checkpoint, documents, sentence_encoder, tmp_path):
    return OwnDocuments(
        documents=str(documents),
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        encoder=sentence_encoder,
        encoder_training=TINY,
        training=TINY,
        fine_tuning=TINY,
        ask=["metal in kovarin"],
    )


@pytest.fixture
def run(tmp_path):
    """Runs the pipeline; returns the folder of the ranker that answers."""

    def run_here(own, output=tmp_path / "out"):
        with console_log():
            PIPELINE.run(own, output, HERE)
        return Path(output) / "answering" / "ranker"

    return run_here


@pytest.fixture
def make_queries(tmp_path):
    """Makes questions from an index; returns them."""
    store = Store(str(tmp_path / "store"))

    def make(documents, own):
        index = DocumentIndex.from_documents(documents, IndexConfig())
        stage = GeneratedQueries(
            index, tuple(own.query_sources), own.max_questions, own.query_generator, own.prompt
        )
        graph = run_graph([stage], store, SequentialBackend(store, HERE))
        graph.raise_failures({})
        return read_queries(store.fetch(graph.results[stage]))

    return make


def test_documents_become_a_ranker_that_answers_from_their_index(own, tmp_path, capsys, run):
    ranker = run(own)
    shown = capsys.readouterr().out
    assert "metal in kovarin" in shown
    scoring = AnswerScoring.read(ranker)
    assert scoring.weights == {"similarity": 1.0, "bm25": 0.5}
    index = str(tmp_path / "out" / "index" / "index")
    assert SentenceIndex.open(index).manifest["min_similarity"] is not None
    main(
        [
            "ask",
            "metal kovarin",
            "--index",
            index,
            "--model",
            str(ranker),
            "--score_threshold",
            "0.0",
        ]
    )
    assert ".md" in capsys.readouterr().out
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    assert run(own) == ranker
    assert made == {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("manifest.json")}
    (tmp_path / "documents" / "0.md").write_text("Other words.")
    with pytest.raises(StaleStageError, match="documents"):
        run(own)


def test_questions_of_a_labeled_dev_table_train_nothing(own, tmp_path):
    corpus = tiny.write_corpus(tmp_path / "dev", tiny.with_distinct_questions(tiny.candidates(6)))
    config = replace(own, labeled_tables={"dev": str(corpus)})
    stages = PIPELINE.build(config, {}).names()
    [dev] = [stage for stage, name in stages.items() if name == "tables/labeled-dev"]
    [labelled] = [stage for stage, name in stages.items() if name == "tables/labeled"]
    assert labelled.held_out is dev


def test_settings_of_the_threshold_reach_its_stage(own):
    settings = replace(own, min_precision=0.7, high_confidence=True)
    stages = PIPELINE.build(settings, {}).names()
    [scoring] = [stage for stage, name in stages.items() if name == "scoring"]
    assert (scoring.min_precision, scoring.high_confidence) == (0.7, True)


def test_run_killed_before_each_manifest_goes_on(own, tmp_path, monkeypatch, run):
    commit, killed = Store.commit, set()

    def commit_later(store, kind, *args):
        if kind not in killed:
            killed.add(kind)
            raise KeyboardInterrupt
        commit(store, kind, *args)

    monkeypatch.setattr(Store, "commit", commit_later)
    for _ in range(100):
        with suppress(KeyboardInterrupt):
            run(own)
            break
    assert {"AdaptedEncoder", "DocumentIndex", "EmbeddedIndex", "TrainedRanker"} <= killed
    load(tmp_path / "out" / "answering" / "ranker")
    assert not list((tmp_path / "store").glob("*/*/.*"))


def test_own_questions_annotations_and_a_cascade(own, checkpoint, tmp_path, run):
    lines = [f"what {kind} has {topic}" for topic in tiny.TOPICS for kind in ("metal", "glass")]
    (tmp_path / "questions.txt").write_text("\n".join(lines) + "\n\n")
    annotated = tiny.write_corpus(tmp_path / "annotated", tiny.candidates(12))
    cascade = replace(own.model, exit_layers=(1, 3))
    given = {"train": str(annotated)}
    asked = replace(
        own, questions=str(tmp_path / "questions.txt"), labeled_tables=given, model=cascade, ask=[]
    )
    loaded = load(run(asked))
    assert loaded.exit_layers == (1, 3)
    for stage, own_rates in (("pseudo", own.training), ("adapted", own.fine_tuning)):
        inputs = json.loads((tmp_path / "out" / stage / "manifest.json").read_text())["inputs"]
        rates = inputs["training"]
        assert rates["head_learning_rate"] == pytest.approx(10 * own_rates.learning_rate)
    found = json.loads((tmp_path / "out" / "tables" / "train" / "manifest.json").read_text())
    assert 0 < found["outputs"]["counts"]["num_questions"] < 8


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        # By its hash each is dev's.
        (["paper kovarin", "stone zelimut"], ["paper kovarin", "stone zelimut"]),
        # So is the first, which finds nothing.
        (["zebras sleep", "metal kovarin", "metal zelimut"], ["metal kovarin", "metal zelimut"]),
    ],
)
def test_questions_that_leave_a_part_empty_are_divided_all_the_same(
    own, tmp_path, lines, parts, run
):
    (tmp_path / "few.txt").write_text("\n".join(lines))
    run(replace(own, questions=str(tmp_path / "few.txt"), ask=[]))
    each = [read_queries(tmp_path / "out" / "tables" / part) for part in ("train", "dev")]
    assert sorted(query.text for part in each for query in part) == parts
    assert [len(part) for part in each] == [1, 1]


def test_finished_output_runs_again_without_the_model_that_it_started_from(own, tmp_path, run):
    base = shutil.copytree(own.model.path, tmp_path / "base")
    own = replace(own, model=ModelSpec(str(base), max_length=32), ask=[])
    ranker = run(own)
    shutil.rmtree(base)
    assert run(own) == ranker
    shutil.rmtree((tmp_path / "out" / "pseudo").resolve())
    with pytest.raises(CheckpointError, match="base"):
        run(own)


def test_file_of_questions_ends_a_question_at_the_end_of_a_line_alone(tmp_path):
    path = tmp_path / "questions.txt"
    path.write_bytes("\ufeffwhat is metal?\r\nwhat\u2028is\x0cglass? \n".encode())
    texts = [query.text for query in _read_questions(str(path), None)]
    assert texts == ["what is metal?", "what\u2028is\x0cglass?"]


def test_questions_that_a_generator_has_asked_are_read_again(
    own, documents, monkeypatch, make_queries
):
    class Asks:
        def __init__(self, path, prompt):
            assert path == "t5"

        def __call__(self, sentences):
            return [f"What about {sentence}" for sentence in sentences]

    monkeypatch.setattr("as2ray.experiments.documents.QuestionGenerator", Asks)
    own = replace(
        own, query_sources=["headings", "generator"], query_generator="t5", max_questions=6
    )
    queries = make_queries(documents, own)
    assert len(queries) == 6
    monkeypatch.delattr("as2ray.experiments.documents.QuestionGenerator")
    assert make_queries(documents, own) == queries


def test_documents_that_make_too_few_questions_leave_room_for_other_kinds(
    own, tmp_path, make_queries
):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("Kovarin has metal things inside. Zelimut has glass.")
    with pytest.raises(ConfigError, match="only 0 questions were made"):
        make_queries(tmp_path / "plain", replace(own, query_sources=["headings"]))


def test_more_questions_than_asked_for_are_drawn_from_all_of_them(tmp_path):
    (tmp_path / "many.txt").write_text("".join(f"question {n}\n" for n in range(100)))
    few = _read_questions(str(tmp_path / "many.txt"), 10)
    numbers = [int(query.id.removeprefix("own-")) for query in few]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert max(numbers) > 10


def test_too_few_questions_or_unknown_annotations_are_refused(own, tmp_path, run):
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"0 questions, one per line, of .*none"):
        run(replace(own, questions=str(tmp_path / "none.txt")))
    (tmp_path / "one.txt").write_text("metal?\n")
    with pytest.raises(ConfigError, match=r"1 questions, one per line, of .*one"):
        run(replace(own, questions=str(tmp_path / "one.txt")))
    assert not (tmp_path / "store").exists()
    (tmp_path / "zebras.txt").write_text("zebras?\nmetal kovarin\n")
    with pytest.raises(ConfigError, match="1 questions that BM25 can label of 2"):
        run(replace(own, questions=str(tmp_path / "zebras.txt")))
    with pytest.raises(ConfigError, match="nowhere"):
        run(replace(own, questions=str(tmp_path / "nowhere.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9?\n")
    with pytest.raises(ConfigError, match="latin"):
        run(replace(own, questions=str(tmp_path / "latin.txt")))
    for wrong in (
        *({"max_questions": 0}, {"query_generator": "t5"}, {"query_sources": ["generator"]}),
        *(
            {"query_sources": []},
            {"min_precision": 0.0},
            {"min_precision": 1.5},
            {"ask": ["metal?", " "]},
        ),
    ):
        with pytest.raises(ValidationError):
            replace(own, **wrong)
    replace(own, query_sources=[], questions="mine.txt")
    with pytest.raises(ValidationError, match="labeled_tables"):
        replace(own, labeled_tables={"test": "x"})


@pytest.mark.parametrize("wrong", [{"num_layers": 99}, {"exit_layers": (2, 99)}])
def test_layers_that_the_model_does_not_have_are_refused_before_documents_are_read(
    own, tmp_path, wrong, run
):
    with pytest.raises(ConfigError, match="layers"):
        run(replace(own, model=replace(own.model, **wrong)))
    with pytest.raises(ConfigError, match="num_layers"):
        replace(own.model, num_layers=0)
    with pytest.raises(CheckpointError, match="nowhere"):
        run(replace(own, model=ModelSpec(str(tmp_path / "nowhere"))))
    assert not (tmp_path / "out").exists()


def test_annotated_tables_of_one_label_or_the_same_questions_are_refused_first(own, tmp_path, run):
    rows = tiny.candidates(6)
    answers = rows.filter([label == 1 for label in rows["label"].to_pylist()])
    folders = {
        name: str(tiny.write_corpus(tmp_path / name, made))
        for name, made in {"whole": rows, "part": rows[:10], "answers": answers}.items()
    }
    with pytest.raises(LeakError, match="'train' and 'dev'"):
        run(replace(own, labeled_tables={"train": folders["whole"], "dev": folders["part"]}))
    with pytest.raises(CorpusError, match="both labels"):
        run(replace(own, labeled_tables={"dev": folders["answers"]}))
    assert not (tmp_path / "out").exists()


def test_output_among_the_documents_is_refused_unless_nobody_reads_it(own, documents, run):
    content_hash = DocumentIndex.from_documents(documents, IndexConfig()).content_hash
    for output in (documents, documents / "out"):
        with pytest.raises(ConfigError, match=r"output .* is inside documents"):
            run(own, output)
    # By default the store is beside the output.
    with pytest.raises(ConfigError, match=r"store .* is inside documents") as error:
        run(own, documents / ".out")
    assert error.value.fix == "choose another --store"
    assert {path.suffix for path in documents.iterdir()} == {".md"}
    assert run(replace(own, ask=[]), documents / ".out" / "out").is_dir()
    assert DocumentIndex.from_documents(documents, IndexConfig()).content_hash == content_hash


def test_dry_run_shows_the_stages_and_refuses_what_a_run_refuses(documents, tmp_path, capsys):
    arguments = ["--documents", str(documents), "--dry_run", "--output"]
    PIPELINE.command([*arguments, str(tmp_path / "out"), "--model.path", "org/unknown"])
    shown = capsys.readouterr().out
    assert re.search(r"^answering +AnsweringRanker .* to run$", shown, re.MULTILINE)
    assert "missing: " in shown
    assert f"documents {documents}" in shown
    for flags in (arguments, [flag for flag in arguments if flag != "--dry_run"]):
        with pytest.raises(SystemExit):
            PIPELINE.command([*flags, str(documents / "out")])
        assert "inside documents" in capsys.readouterr().err
    assert not (documents / "out").exists()
    assert not (tmp_path / "out").exists()
