"""What the benchmarks of families build and compare, in this process."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.loading import load
from benchmarks.peer_processes import compare_rates, keep_fastest, start_peers
from benchmarks.ranking_families import FAMILY_SHAPES, write_random_ranker
from benchmarks.ranking_peer import _choose_batch_size, peak_memory_mb
from benchmarks.reference_scores import (
    _compare_cross_encoder,
    _compare_transformers,
    _select_short_pairs,
)
from benchmarks.wikiqa_candidates import sample_candidates


@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_random_ranker_of_a_family_scores_as_the_peer_does(family, tmp_path):
    pytest.importorskip("sentence_transformers")
    path = str(write_random_ranker(family, tmp_path / "model", small=True))
    ranker = load(path, dtype="fp32", device="cpu")
    assert ranker.network.config.model_type == family
    rows = _select_short_pairs(ranker, sample_candidates(tiny.candidates(10), 2, 8), 12)
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    assert len(texts[0]) == 12
    assert _compare_transformers(ranker, path, *texts) < 1e-5
    difference = _compare_cross_encoder(ranker, path, *texts, 128)
    assert difference is None if ranker.tokenizer.prompt else difference < 1e-5
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    assert _compare_transformers(ranker, path, *texts) > 1e-3


@pytest.mark.parametrize("family", ["distilbert", "modernbert"])
def test_random_ranker_of_fewer_layers_loads(family, tmp_path):
    path = write_random_ranker(family, tmp_path / "model", small=True, num_layers=1)
    assert len(load(path, device="cpu").encoder) == 1


def test_sampled_candidates_are_those_of_the_whole_table():
    table = tiny.candidates(10)
    rows = sample_candidates(table, 3, 20)
    _, sizes = np.unique(rows["question_id"].to_numpy(), return_counts=True)
    assert sizes.tolist() == [20, 20, 20]
    assert len(set(rows["candidate_id"].to_pylist())) > 20
    assert set(rows["candidate"].to_pylist()) <= set(table["candidate"].to_pylist())


def test_only_baselines_near_the_fastest_are_measured_further(capsys):
    closed = []
    peers = {
        name: SimpleNamespace(
            seconds=seconds, batch_size=8, close=lambda name=name: closed.append(name)
        )
        for name, seconds in {"default": 4.0, "ONNX": 1.2, "OpenVINO": 1.0}.items()
    }
    assert list(keep_fastest(peers)) == ["ONNX", "OpenVINO"]
    assert closed == ["default"]
    assert "default: 4.0 times" in capsys.readouterr().out


def test_batch_size_of_a_baseline_is_the_fastest_of_one_pass_each():
    passes = []

    def predict(question, candidates, batch_size):
        passes.append((len(candidates), batch_size))
        sum(range(2_000_000 if batch_size == 8 else 1_000))

    size, seconds = _choose_batch_size(predict, ("q", ["a"] * 20), [8, 32], 1)
    assert size == 32
    assert seconds > 0
    assert passes == [(8, 8), (20, 8), (20, 32)]


def test_baseline_that_cannot_start_is_not_measured(tmp_path, capsys):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nread line\nexit 3\n")
    broken.chmod(0o755)
    args = SimpleNamespace(without_peers=False, backends=None, peers=broken, small=True, cores=1)
    rows = sample_candidates(tiny.candidates(10), 1, 4)
    assert start_peers(tmp_path, rows, args, ["ONNX"]) == {}
    assert "ONNX is not measured: exit code 3" in capsys.readouterr().out


def test_family_without_any_baseline_is_one_sentence(tmp_path):
    peers = start_peers(tmp_path, None, SimpleNamespace(without_peers=True), ["ONNX"])
    with pytest.raises(SystemExit, match="nothing to compare with"):
        compare_rates({"packed": None}, peers, None, num_repeats=1)


def test_peak_memory_of_a_baseline_is_without_that_of_its_parent():
    code = "from benchmarks.ranking_peer import peak_memory_mb; print(peak_memory_mb())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 10 < float(child.stdout) < peak_memory_mb() / 2  # this process holds torch
