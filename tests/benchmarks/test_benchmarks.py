import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from as2ray.errors import CheckpointError
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.packaged import minilm

ROOT = Path(__file__).parents[2]


def test_alternate_takes_turns_after_warming_each_side_up():
    turns = []

    def side(name: str, rates: list[float]):
        def measure() -> float:
            turns.append(name)
            return rates.pop(0)

        return measure

    ours = side("ours", [999.0, 10.0, 30.0, 12.0])
    others = [side("slow", [1.0, 5.0, 10.0, 3.0]), side("fast", [1.0, 20.0, 20.0, 24.0])]
    slow, fast = alternate(ours, others, repeats=3)
    assert turns == ["ours", "slow", "fast"] * 4
    assert slow == Ratio((10.0, 30.0, 12.0), (5.0, 10.0, 3.0))
    assert slow.each == (2.0, 3.0, 4.0)
    assert fast.each == (0.5, 1.5, 0.5)


def test_ratio_is_the_median_with_lowest_and_highest():
    ratio = Ratio((10.0, 30.0, 12.0), (5.0, 10.0, 3.0))
    assert ratio.median == 3.0
    assert ratio.spread == (2.0, 4.0)
    assert str(ratio) == "3.00 (2.00..4.00)"
    assert ratio.as_json()["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_ratio_of_unequal_repeats_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        _ = Ratio((1.0, 2.0), (1.0,)).each


@pytest.fixture
def encoder() -> Path:
    """The packaged encoder; where it is not installed the test is skipped."""
    try:
        return minilm()
    except CheckpointError as error:
        pytest.skip(error.came)


def run(name: str, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A benchmark from the command line, where no raw release is to be found."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            f"benchmarks.{name}",
            "--output",
            str(tmp_path / "out.json"),
            *flags,
        ],
        cwd=ROOT,
        env={**os.environ, "AS2RAY_DATA": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
        timeout=280,
    )


def report(name: str, tmp_path: Path, *flags: str) -> dict:
    """The JSON of a small run."""
    done = run(name, tmp_path, "--small", *flags)
    assert done.returncode == 0, done.stderr
    assert f"benchmarks.{name}" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"benchmark", "small", "cores", "when", "machine", "claims", "results"} == set(found)
    assert (found["benchmark"], found["small"]) == (name, True)
    assert all({"claim", "measured", "holds"} == set(claim) for claim in found["claims"])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_streaming_small_run_writes_rates_times_and_memory(tmp_path):
    results = report("streaming", tmp_path)["results"]
    assert results["text"] == "made-up words"
    assert set(results["rates"]) == {"encode_batch", "encode_batch_fast", "stream"}
    assert all(rate["ratio"]["median"] > 0 for rate in results["rates"].values())
    assert [p["epoch"]["pairs"] for p in results["passes"]] == [4_096, 16_384]
    for one in results["passes"]:
        assert 0 < one["epoch"]["first"] < one["first_batch_from_init"]
        assert one["memory"]["driver"] > 0
        assert one["memory"]["workers"] > 0
        assert one["memory"]["processes"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_training_small_run_writes_both_ratios(tmp_path):
    pytest.importorskip("sentence_transformers")
    # One core: threads that wait for each other on a busy machine would take minutes.
    results = report("training", tmp_path, "--cores", "1")["results"]
    [compared] = results.values()
    assert set(compared) == {"default", "bf16"}
    assert all(side["ratio"]["median"] > 0 for side in compared.values())


def test_training_without_the_releases_says_what_it_needs(tmp_path):
    pytest.importorskip("sentence_transformers")
    done = run("training", tmp_path)
    assert done.returncode != 0
    assert "WikiQA" in done.stderr
    assert not (tmp_path / "out.json").exists()
