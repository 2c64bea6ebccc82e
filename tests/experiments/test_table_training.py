"""`as2ray train` and `as2ray.train`: from a table of the user's own to a ranker and a report."""

import json
import re
import stat
from dataclasses import replace

import pandas
import pytest
import tiny
from pyarrow import csv

import as2ray
from as2ray import losses
from as2ray.cli.main import main
from as2ray.errors import As2rayError, ConfigError, CorpusError, LeakError, StaleStageError
from as2ray.experiments.table_training import train
from as2ray.losses.pointwise import cross_entropy
from as2ray.training import run_job
from as2ray.training.checkpoint_store import BEST
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob

COLUMNS = {"question": "q", "candidate": "text", "label": "y"}
QUESTION, TEXTS = "What is kovarin?", ["Badesso.", "Kovarin ne kovarin.", "Lala muri."]


@pytest.fixture(scope="module")
def rows():
    table = tiny.with_distinct_questions(tiny.candidates(30)).drop_columns(["question_id"])
    return table.select(list(COLUMNS)).rename_columns(list(COLUMNS.values()))


@pytest.fixture(scope="module")
def path(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "labels.csv"
    csv.write_csv(rows, path)
    return str(path)


def flags(path, output, model, *more):
    settings = {"table": path, "output": output, "model": model, "columns": json.dumps(COLUMNS)}
    given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["train", *given, "--training.epochs", "1", "--max_length", "40", *more]


@pytest.fixture(scope="module")
def output(path, sentence_encoder, tmp_path_factory):
    """Output of `as2ray train` on a CSV file."""
    output = tmp_path_factory.mktemp("trained") / "mine"
    main(flags(path, output, sentence_encoder))
    return output


def test_train_on_a_csv_prints_the_report_against_bm25_the_similarity_and_both(
    output, path, sentence_encoder, capsys
):
    main(flags(path, output, sentence_encoder))  # which trains nothing again
    printed = capsys.readouterr().out
    for system in ("ranker", "bm25 (baseline)", "similarity", "hybrid"):
        assert f"| {system} |" in printed
    assert printed.count("| bm25 (baseline) |") == 1
    assert "3 questions / 15 pairs" in printed
    assert re.search(
        r"An answer comes first: ranker for \d+% of the 3 questions, bm25 for", printed
    )
    assert printed.splitlines()[-1] == f"ranker: {output / 'ranker'}"
    assert (output / "test.md").is_file()


def half_cross_entropy(output, targets):
    return cross_entropy(output, targets) / 2


def test_train_with_a_function_as_loss_is_another_run_when_its_source_changes(
    rows, sentence_encoder, tmp_path, monkeypatch
):
    def options(loss):
        return {
            "columns": COLUMNS,
            "model": str(sentence_encoder),
            "max_length": 40,
            "training": {"epochs": 1},
            "loss": loss,
        }

    monkeypatch.chdir(tmp_path)
    as2ray.train(rows, "out", **options(half_cross_entropy))
    assert "half_cross_entropy" in (tmp_path / "out/ranker/README.md").read_text()
    with pytest.raises(ConfigError, match="no name"):
        as2ray.train(rows, "other", **options(lambda output, targets: 0))
    monkeypatch.setattr(losses, "getsource", lambda value: "another source")
    with pytest.raises(As2rayError, match="loss_source"):
        as2ray.train(rows, "out", **options(half_cross_entropy))


def test_trained_ranker_has_a_model_card_and_files_that_all_can_read(output):
    card = (output / "ranker/README.md").read_text()
    assert card.startswith("---\n")
    for text in ("pipeline_tag: text-ranking", "- train: 24 questions", "| similarity |"):
        assert text in card
    for file in (output / "ranker").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_trained_ranker_scores_in_other_libraries_as_here(output):
    from transformers import pipeline

    folder = str(output / "ranker")
    ranker = as2ray.load(folder, dtype="fp32", device="cpu")
    scores = [each.score for each in sorted(ranker.rank(QUESTION, TEXTS), key=lambda r: r.index)]
    pairs = [{"text": QUESTION, "text_pair": text} for text in TEXTS]
    answers = pipeline("text-classification", folder, device="cpu")(pairs)
    assert {answer["label"] for answer in answers} == {"answer"}
    assert [answer["score"] for answer in answers] == pytest.approx(scores, abs=1e-5)
    cross_encoder = pytest.importorskip("sentence_transformers").CrossEncoder(folder, device="cpu")
    ranked = sorted(cross_encoder.rank(QUESTION, TEXTS), key=lambda entry: entry["corpus_id"])
    assert [entry["score"] for entry in ranked] == pytest.approx(scores, abs=1e-5)


def test_output_of_other_settings_is_refused_with_the_keys_that_differ(
    output, path, sentence_encoder, capsys
):
    with pytest.raises(SystemExit):
        main(flags(path, output, sentence_encoder, "--training.global_batch_size", "8"))
    error = capsys.readouterr().err
    assert "training.global_batch_size: 32 -> 8" in error
    assert len(error.splitlines()[-6:]) <= 6


def test_train_on_a_data_frame_with_dev_reports_dev(rows, checkpoint, tmp_path, caplog):
    frame = pandas.DataFrame(rows.to_pylist())
    held_out = set(sorted(frame["q"].unique())[:6])
    is_dev = frame["q"].isin(held_out)
    caplog.set_level("INFO", "as2ray.experiments.tables")
    result = train(
        frame[~is_dev],
        tmp_path / "out",
        dev=frame[is_dev],
        columns=COLUMNS,
        model=str(checkpoint("bert", None)),
        max_length=40,
        training={"epochs": 1, "global_batch_size": 121},
    )
    assert "tables/train: 24 questions / 120 pairs" in caplog.text
    assert "tables/dev: 6 questions / 30 pairs" in caplog.text
    assert "global_batch_size 121 is larger than the 120 examples" in caplog.text
    assert [row.system for row in result.report.rows] == ["ranker", "bm25"]  # no sentence encoder
    assert result.report.counts.num_questions == 6
    assert "which also selected it" in repr(result)
    assert result.load().rank(QUESTION, TEXTS)
    card = (tmp_path / "out" / "ranker" / "README.md").read_text()
    assert "epochs 1," in card
    assert "learning_rate 5e-05," in card  # the default


def test_train_takes_a_model_as_path_or_text_and_refuses_its_settings(path, checkpoint, tmp_path):
    options = {"columns": COLUMNS, "max_length": 40, "dev": path}  # which is refused later
    with pytest.raises(LeakError):
        train(path, tmp_path / "out", model=checkpoint("bert", None), **options)
    with pytest.raises(ConfigError, match="model is a ModelSpec, and neither a folder nor a hub"):
        train(path, tmp_path / "out", model=ModelSpec(str(checkpoint("bert", None))), **options)


def test_train_refuses_questions_that_are_also_in_dev(path, checkpoint, tmp_path):
    options = {"columns": COLUMNS, "model": str(checkpoint("bert", None)), "max_length": 40}
    with pytest.raises(As2rayError, match="30 questions in both 'train' and 'dev'"):
        train(path, tmp_path / "out", dev=path, **options)


def test_train_refuses_a_test_table_without_a_question_that_counts_before_it_trains(
    path, rows, checkpoint, tmp_path
):
    options = {"columns": COLUMNS, "model": str(checkpoint("bert", None)), "max_length": 40}
    pairs = pandas.DataFrame(rows.to_pylist())
    pairs["q"] = [f"{question} {number}" for number, question in enumerate(pairs["q"])]
    with pytest.raises(CorpusError, match=r"table 'test': of 150 questions / 150 .* no "):
        train(path, tmp_path / "out", test=pairs, **options)
    assert not list((tmp_path / "out" / "store").glob("*Ranker*"))


def test_run_folder_of_another_job_is_refused_with_the_settings_that_differ(tmp_path):
    job = TrainingJob(ModelSpec("nowhere"), ("/train",), {"dev": "/dev"})
    (tmp_path / BEST).mkdir()  # a complete run is not trained again
    run_job.train(job, tmp_path)
    run_job.train(job, tmp_path)
    other = replace(job, training=TrainingConfig(global_batch_size=8))
    with pytest.raises(StaleStageError, match=r"training.global_batch_size: 32 -> 8"):
        run_job.train(other, tmp_path)


def test_model_with_fewer_positions_than_tokens_is_refused_before_tables_are_read(
    checkpoint, tmp_path
):
    model = checkpoint("bert", None, max_position_embeddings=64)
    (tmp_path / "empty.csv").touch()  # which is refused when it is read
    with pytest.raises(ConfigError, match=r"max_length=128 exceeds(.|\n)*at most 64"):
        train(tmp_path / "empty.csv", tmp_path / "out", model=model, columns=COLUMNS)
