"""What `import as2ray` offers: the path from documents and a table to answers, in Python."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

import as2ray
from as2ray.errors import ConfigError, CorpusError, validate_arguments

EXPECTED = {"load", "load_table", "train", "make_cascade", "distill", "index", "ask", "evaluate"}
EXPECTED |= {"serve", "calibrate"}


def test_public_functions_are_listed_and_have_docstrings_but_are_not_loaded():
    assert set(dir(as2ray)) >= EXPECTED
    for name in EXPECTED:
        assert getattr(as2ray, name).__doc__
    heavy = {"torch", "transformers", "ray", "pyarrow", "numpy", "pydantic"}
    code = f"import sys, as2ray; dir(as2ray); assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documents_are_indexed_and_asked(tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/whales.txt").write_text("A whale is long. It lives in the sea.")
    index = as2ray.index(tmp_path / "documents", tmp_path / "index", encoder=None)
    assert repr(index) == (
        f"SentenceIndex({str(tmp_path / 'index')!r}, {{'documents': 1, 'sentences': 2}})"
    )
    for source in (index, tmp_path / "index"):
        answers = as2ray.ask("How long is a whale?", source).answers
        assert answers[0].text == "A whale is long."


def test_index_that_was_opened_without_its_encoder_is_asked_as_its_folder(
    tmp_path, sentence_encoder
):
    (tmp_path / "whales.txt").write_text("A whale is long. It lives in the sea. Krill is food.")
    as2ray.index(tmp_path / "whales.txt", tmp_path / "index", encoder=sentence_encoder)
    by_folder = as2ray.ask("What do they eat?", tmp_path / "index")
    opened = as2ray.SentenceIndex.open(tmp_path / "index")
    by_index = as2ray.ask("What do they eat?", opened)
    assert by_folder.num_candidates == 3  # none has a word of the question
    assert replace(by_index, retrieval_time_s=0) == replace(by_folder, retrieval_time_s=0)


def test_index_without_an_encoder_is_made_with_the_command_s_word_too(tmp_path):
    (tmp_path / "whales.txt").write_text("A whale is long.")
    index = as2ray.index(tmp_path / "whales.txt", tmp_path / "index", encoder="none")
    assert index.stored_embeddings is None


def test_answer_shows_itself_with_its_source_and_marked_in_its_context(tmp_path):
    (tmp_path / "whales.md").write_text(
        "# Whales\n\n## Size\n\nA whale is long & heavy. So is no fish."
    )
    index = as2ray.index(tmp_path / "whales.md", tmp_path / "index", encoder=None)
    answer = as2ray.ask("How long is a whale?", index, top_k=1)
    [best] = answer.answers
    assert repr(answer) == f"{best.score:.4f}  {best.text} (whales.md, Size)"
    html = answer._repr_html_()
    assert "<mark>A whale is long &amp; heavy.</mark> So is no fish." in html
    unanswered = as2ray.ask("Krill?", index)
    assert repr(unanswered) == "no answer: no sentence has a word in common with the question"
    assert unanswered._repr_html_() == f"<p>{unanswered!r}</p>"


@pytest.mark.parametrize("index", [None, 5])
def test_what_is_no_index_or_ranker_is_refused_before_the_question(index, tmp_path):
    with pytest.raises(ConfigError, match=f"expected an index, not {index}"):
        as2ray.ask("How long is a whale?", index)
    (tmp_path / "whales.txt").write_text("A whale is long.")
    opened = as2ray.index(tmp_path / "whales.txt", tmp_path / "index", encoder=None)
    with pytest.raises(ConfigError, match="expected a ranker, not 'folder'"):
        as2ray.QuestionAnswerer(opened, "folder")
    with pytest.raises(ConfigError, match="expected a ranker, not 5"):
        as2ray.ask("How long is a whale?", opened, model=5)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda ranker: as2ray.load(None), "path=None: Input should be a valid string"),
        (lambda ranker: as2ray.load("model", dtype="fp64"), "dtype='fp64': Input should be 'auto'"),
        (lambda ranker: as2ray.load("model", length=9), "length=9: Unexpected keyword argument"),
        (lambda ranker: as2ray.load(), "path: Missing required argument"),
        (lambda ranker: as2ray.calibrate(ranker, [], "new"), r"path=PointwiseRanker\(.*\): Input"),
        (lambda ranker: as2ray.calibrate("model", [], None), "path=None: Input"),
        (lambda ranker: as2ray.push_to_hub(None, "a/b"), "model=None, repo_id='a/b': expected a"),
        (lambda ranker: as2ray.push_to_hub("model", None), "model='model', repo_id=None: expected"),
        (lambda ranker: as2ray.train("t.csv", None), "output=None is no folder"),
        (lambda ranker: ranker.calibrate(None), "table=None: Input should be an instance of Table"),
        (lambda ranker: as2ray.index(None, "new", encoder=None), "documents=None: Input"),
        (lambda ranker: as2ray.SentenceIndex.open(5), "folder=5: Input"),
        (lambda ranker: as2ray.save("model", "new"), "ranker='model': Input"),
        (lambda ranker: as2ray.distill(None, [], "new"), "teacher=None is neither a folder nor"),
    ],
)
def test_wrong_argument_is_refused_in_one_line_that_names_it(call, problem, checkpoint):
    with pytest.raises(ConfigError, match=f"^{problem}.*$"):
        call(as2ray.load(checkpoint()))


UNLABELED = tiny.candidates(2).drop_columns(["label"])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda ranker: ranker.predict_table("t.csv"), "must be an Arrow table, not str"),
        (lambda ranker: ranker.calibrate(UNLABELED), r"a table with .* lacks \['label'\]"),
        (lambda ranker: as2ray.serve(ranker), r"model=PointwiseRanker\(.*\) cannot be served"),
        (lambda ranker: as2ray.serve(index=5), "index=5 cannot be served"),
    ],
)
def test_another_kind_of_object_is_refused_with_what_to_pass(call, problem, checkpoint):
    with pytest.raises(ConfigError, match=problem) as error:
        call(as2ray.load(checkpoint()))
    assert error.value.fix


SETTINGS = {"BM25", "CascadeConfig", "ModelSpec", "QuestionAnswerer", "TrainingConfig"}


def test_settings_that_are_checked_are_all_that_are_offered():
    offered = {name for name in dir(as2ray) if is_pydantic_dataclass(getattr(as2ray, name))}
    assert offered == SETTINGS


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_unknown_setting_is_refused_in_one_line(name):
    with pytest.raises(ConfigError, match=r"unknown_key: unknown key(\n|$)"):
        getattr(as2ray, name)(unknown_key=1)


@pytest.mark.parametrize(
    ("create", "problem"),
    [
        (lambda: as2ray.CascadeConfig(max_loss=7), "max_loss=7: Input should be less than 1"),
        (lambda: as2ray.CascadeConfig(max_los=7), "max_los: unknown key; did you mean 'max_loss'?"),
        (lambda: as2ray.CascadeConfig(at_least=0.5), "at_least=0.5 needs keep_top"),
        (lambda: as2ray.ModelSpec("path", 0), "max_length=0: Input should be greater than 0"),
        (lambda: as2ray.ModelSpec(), "path: required, and not given"),
        (
            lambda: replace(as2ray.TrainingConfig(), epochs=0),
            "epochs=0: Input should be greater than 0",
        ),
    ],
)
def test_wrong_setting_is_refused_in_one_line_that_names_it(create, problem):
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
        create()


def test_wrong_setting_of_a_part_is_an_error_of_the_whole():
    with pytest.raises(ValidationError, match=r"epochs\n"):
        TypeAdapter(dict[str, as2ray.TrainingConfig]).validate_python({"a": {"epochs": 0}})


def test_what_a_function_does_with_good_arguments_is_not_reported_as_theirs():
    @validate_arguments
    def convert(number: str) -> int:
        return TypeAdapter(int).validate_python(number)

    assert convert("5") == 5
    with pytest.raises(ValidationError, match="for int"):
        convert("five")


@pytest.mark.parametrize("port", ["8000", True, None])
def test_port_that_is_no_integer_is_refused(port):
    with pytest.raises(ConfigError, match=f"port={port!r} must be an integer"):
        as2ray.serve("model", port=port)


def test_documents_without_a_name_are_not_those_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whales.txt").write_text("A whale is long.")
    with pytest.raises(CorpusError, match="'' is no folder or file"):
        as2ray.index("", tmp_path / "index", encoder=None)


def test_training_on_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to train on"):
        as2ray.train(None, tmp_path / "out")


@pytest.fixture(scope="module")
def table():
    return tiny.with_distinct_questions(tiny.candidates(30))


def test_teacher_is_distilled_and_reported_beside_its_student(table, checkpoint, tmp_path):
    teacher = checkpoint("bert", 2, initializer_range=0.3)
    student = str(checkpoint("bert", None))
    options = {"model": student, "max_length": 40, "training": {"epochs": 1}}
    result = as2ray.distill(teacher, table, tmp_path / "out", **options)
    assert [row.system for row in result.report.rows] == ["ranker", "bm25", "teacher"]
    assert "| teacher |" in repr(result)
    assert "<td>teacher</td>" in result._repr_html_()


def test_calibrated_ranker_is_saved_and_its_errors_returned(table, checkpoint, tmp_path):
    result = as2ray.calibrate(checkpoint("bert"), table, tmp_path / "calibrated")
    assert len(result.before) == len(result.after) == 1
    assert as2ray.load(tmp_path / "calibrated").calibration
    [errors, abstention] = repr(result).split("\n")
    assert f"error {result.before[0].ece:.4f} before, {result.after[0].ece:.4f} after" in errors
    assert abstention.startswith("the first answer is wrong for ")
    html = result._repr_html_()
    assert html.count("<svg") == 1
    assert html.count("<circle") == len(result.before[0].bin_counts + result.after[0].bin_counts)
    assert abstention in html


def test_calibration_of_a_cascade_names_its_exits(table, checkpoint):
    ranker = as2ray.init_ranker(checkpoint("bert", None), max_length=40, exit_layers=[1, 2])
    result = ranker.calibrate(table)
    lines = repr(result).split("\n")
    assert [line.partition(":")[0] for line in lines[:2]] == ["exit_1", "exit_2"]
    assert result._repr_html_().count("<svg") == 2


def test_evaluation_is_printed_in_one_line(table):
    result = as2ray.evaluate(table, [0.0] * len(table))
    assert repr(result) == "AP 0.2000, RR 0.2000, P@1 0.0000: 30 questions (raw), ties pessimistic"


def test_evaluation_is_drawn_as_a_histogram_of_the_questions(table):
    result = as2ray.evaluate(table, [0.0] * len(table), ["AP", "P@1"])
    html = result._repr_html_()
    assert html.count("<svg") == 2
    assert "<td>AP</td><td>0.2000</td>" in html
    assert html.count("<title>30</title>") == 2  # all questions have the same value
    assert html.count("<title>0</title>") == 38


def test_ranker_is_described_in_one_line(checkpoint):
    ranker = as2ray.init_ranker(checkpoint("bert", None), max_length=40, exit_layers=[1, 2])
    text = repr(ranker)
    assert text.startswith("CascadeRanker(0.")
    assert "M weights, exits after layers [1, 2], at most 40 tokens, cpu)" in text


def test_ranker_is_evaluated_as_its_scores_are(table, checkpoint):
    ranker = as2ray.load(checkpoint("bert"), dtype="fp32")
    result = as2ray.evaluate(table, ranker)
    scores = ranker.predict_table(table).sort_keys
    assert result.measures == as2ray.evaluate(table, scores).measures


def test_serve_takes_paths_as_the_command_does(checkpoint, monkeypatch):
    served = []
    monkeypatch.setattr(
        "as2ray.serving.server.run_server", lambda *arguments: served.append(arguments)
    )
    as2ray.serve(checkpoint("bert"), port=8123)
    [(config, host, port)] = served
    assert (host, port) == ("127.0.0.1", 8123)
    assert str(checkpoint("bert")) in repr(config)
