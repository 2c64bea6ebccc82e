"""`as2ray quantize` and `as2ray info`, as a user calls them."""

import json
import shutil

import pytest
import tiny
import torch

from as2ray.checkpoints.activation_ranges import FILE_NAME
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.main import main
from as2ray.models.precision import has_int8
from as2ray.retrieval.answer_scoring import AnswerModel, AnswerScoring


@pytest.fixture
def model(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(), tmp_path / "model")


@pytest.fixture
def table(tmp_path):
    return tiny.write_corpus(tmp_path / "table", tiny.candidates(25))


def refused(capsys, *flags):
    with pytest.raises(SystemExit):
        main(["quantize", *map(str, flags)])
    return capsys.readouterr().err


def test_ranges_are_added_to_the_folder_and_info_tells_the_dtype(model, table, capsys):
    names = {path.name for path in model.iterdir()}
    main(["quantize", "--model", str(model), "--table", str(table)])
    picked = "int8" if has_int8() else load(model, device="cpu").dtype_name
    assert f"--dtype auto is {picked} here" in " ".join(capsys.readouterr().out.split())
    assert {path.name for path in model.iterdir()} == {*names, FILE_NAME}
    main(["info", "--model", str(model)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dtype", picked, "(auto", "was", "requested)"] in lines
    assert ["ranker", "pointwise"] in lines
    main(["info", "--model", str(model), "--dtype", "fp32"])
    assert "fp32 (fp32 was requested)" in capsys.readouterr().out


def test_info_of_a_student_with_one_exit_says_that_it_drops_nothing(checkpoint, tmp_path, capsys):
    student = init_ranker(checkpoint(), max_length=60, exit_layers=(2,), num_ranking_heads=3)
    main(["info", "--model", str(save(student, tmp_path / "student"))])
    assert " ".join(capsys.readouterr().out.split()).endswith(" drops nothing")


def test_info_tells_the_score_that_an_answer_needs(model, tmp_path, capsys):
    ranker = load(model, device="cpu")
    ranker.threshold = 0.25
    main(["info", "--model", str(save(ranker, tmp_path / "calibrated"))])
    assert "an answer needs a score of 0.2500" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2, AVX512 or AMX")
def test_parts_that_stay_in_bf16_are_told(checkpoint, table, tmp_path, capsys):
    ranker = init_ranker(checkpoint("bert", None, initializer_range=0.3), max_length=60)
    layer = ranker.encoder.layers[1]
    with torch.no_grad():
        layer.intermediate.dense.bias[:9] += 1_000.0
        layer.output.dense.weight[:, :9] /= 1_000.0
    folder = save(ranker, tmp_path / "model")
    main(["quantize", "--model", str(folder), "--table", str(table)])
    (ranges,) = load(folder, device="cpu").activation_ranges
    assert (1, "feed_forward") in ranges.unquantized_parts
    message = f"{len(ranges.unquantized_parts)} of 6 parts of layers are not quantized"
    assert message in " ".join(capsys.readouterr().out.split())


def test_pairs_and_a_new_folder_serve_too(model, tmp_path):
    record = {"question": "What is kovarin?", "candidates": ["Kovarin ba.", "Zelimut la."] * 60}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(record))
    flags = ["--pairs", str(path), "--output", str(tmp_path / "out")]
    main(["quantize", "--model", str(model), *flags])
    assert not (model / FILE_NAME).exists()
    assert len(load(tmp_path / "out", device="cpu").activation_ranges) == 1


def test_fitted_scoring_of_answers_comes_with_the_copy(model, table, tmp_path):
    answer_model = AnswerModel((0.5, 0.0, 1.0), -1.0, 0.9)
    scoring = AnswerScoring({"bm25": 1.0}, max_ranked=7, answer_model=answer_model)
    scoring.write(model)
    out = tmp_path / "out"
    main(["quantize", "--model", str(model), "--table", str(table), "--output", str(out)])
    assert AnswerScoring.read(out) == scoring
    assert (out / FILE_NAME).exists()


def test_bad_input_is_refused_and_writes_nothing(model, table, tmp_path, capsys):
    few = tiny.write_corpus(tmp_path / "few", tiny.candidates(10))
    given = ["--model", model]
    assert "give one of --table, --corpus and --pairs" in refused(capsys, *given)
    assert "50 pairs are too few" in refused(capsys, *given, "--table", few)
    assert "nowhere is no folder\n  fix: correct the path" in refused(
        capsys, "--model", "nowhere", "--table", table
    )
    assert "exists" in refused(capsys, *given, "--table", table, "--output", few)
    assert not (model / FILE_NAME).exists()
