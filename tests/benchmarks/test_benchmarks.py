import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from as2ray.checkpoint import save, start
from as2ray.errors import CheckpointError
from as2ray.packaged import minilm
from benchmarks import epoch
from benchmarks.consuming import Share, checksum, exact

ROOT = Path(__file__).parents[2]

NEEDS = {
    "training": "WikiQA",
    "ranking": "SQuAD",
    "retrieval": "ASNQ",
    "gpu": "CUDA",
    "serving": "SQuAD",
}
"""What a benchmark asks for where it finds neither releases nor a GPU."""


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
        timeout=500,  # the test has 600 s; what is killed leaves its services running
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
    [one] = results["passes"]
    assert one["epoch"]["pairs"] == 16_384
    assert 0 < one["epoch"]["first"] < one["first_batch_from_init"]
    assert one["memory"]["driver"] > 0
    assert one["memory"]["workers"] > 0
    assert one["memory"]["processes"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_epoch_small_run_sees_every_pair_once_and_writes_every_process(tmp_path):
    found = report("epoch", tmp_path)
    [exact] = [claim for claim in found["claims"] if "exactly once" in claim["claim"]]
    assert exact["holds"]
    [one] = found["results"]["passes"]
    assert one["exact"]
    assert sum(worker["pairs"] for worker in one["workers"]) == one["pairs"] == 16_384
    assert 0 < one["first"] < one["end"]
    assert any("raylet" in name for name in one["memory"]["each"])
    assert found["results"]["datasets"]["rate"] > 0
    assert found["results"]["datasets"]["memory"] > 0


@pytest.mark.parametrize(
    ("end", "last", "linear", "flat"), [(21, 210, True, True), (36, 230, False, False)]
)
def test_epoch_claims_linear_cost_and_flat_memory_of_several_sizes(end, last, linear, flat):
    ends, memory = ((1, 3), (10, 11), (20, end)), (300, 200, last)
    passes = [
        {
            "pairs": 1_000 * pairs,
            "tokens": 40_000 * pairs,
            "first": 2.0,
            "end": seconds,
            "exact": True,
            "memory": {"driver": 0.0, "workers": mb, "spilled": 0.0},
        }
        for (pairs, seconds), mb in zip(ends, memory, strict=True)
    ]
    holds = {claim.claim: claim.holds for claim in epoch.claims(passes, {"rate": 500.0})}
    assert holds["cost grows linearly (within 20 %)"] is linear
    assert holds["memory flat (within 10 %) from the second epoch on"] is flat


def test_checksum_tells_a_row_that_came_twice_for_another():
    rows = np.arange(1_000)
    shares = [
        Share(500, 0, 3, checksum(rows[::2]), 0, 0),
        Share(500, 0, 3, checksum(rows[1::2]), 0, 0),
    ]
    assert exact(shares, 1_000, 3)
    assert not exact(shares, 1_000, 4)
    swapped = rows[1::2].copy()
    swapped[0], swapped[7] = 0, 16  # two odd rows gone, two even ones twice: the plain sum stays
    assert swapped.sum() == rows[1::2].sum()
    shares[1] = Share(500, 0, 3, checksum(swapped), 0, 0)
    assert not exact(shares, 1_000, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_training_small_run_writes_both_ratios(tmp_path):
    pytest.importorskip("sentence_transformers")
    # One core: threads that wait for each other on a busy machine would take minutes.
    results = report("training", tmp_path, "--cores", "1")["results"]
    [compared] = results.values()
    assert set(compared) == {"default", "bf16"}
    assert all(side["ratio"]["median"] > 0 for side in compared.values())


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_ranking_small_run_compares_both_rankers_with_two_peers(tmp_path):
    pytest.importorskip("sentence_transformers")
    cascade = start(minilm(), exits=[1, 2, 6])
    cascade.drop = 0.5
    path = save(cascade, tmp_path / "cascade")
    results = report("ranking", tmp_path, "--cores", "1", "--cascade", str(path))["results"]
    for kind in ("text", "tokens"):
        compared = results[f"8 candidates, from {kind}"]
        assert set(compared) == {"packed", "cascade"}
        for of in compared.values():
            assert set(of) == {"default", "bf16"}
            assert all(side["ratio"]["median"] > 0 for side in of.values())
    assert results["part of the GEMM rate"]["part"] > 0
    assert results["quality"]["questions"] > 0


def test_two_in_one_small_run_writes_its_ratio(encoder, tmp_path):
    found = report("two_in_one", tmp_path, "--cores", "1")
    median = found["results"]["two rankers"]["ratio"]["median"]
    assert median > 0
    assert found["claims"][0]["holds"] == (median >= 1.8)


@pytest.mark.slow
def test_distillation_small_run_writes_every_ratio(encoder, tmp_path):
    results = report("distillation", tmp_path, "--cores", "1")["results"]
    assert {"stored / plain", "stored / in the loop", "one actor / in process"} < set(results)
    assert results["B11_3H1"]["parameters"] < results["B6_3H6"]["parameters"]
    assert all(found["ratio"]["median"] > 0 for found in results.values())


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_retrieval_small_run_compares_with_two_peers_and_times_ask(tmp_path):
    pytest.importorskip("rank_bm25")
    results = report("retrieval", tmp_path, "--cores", "1")["results"]
    for what in ("index", "search"):
        for peer in ("bm25s alone", "rank_bm25"):
            assert results[f"{what}, to {peer}"]["ratio"]["median"] > 0
    assert 0 < results["ask"]["p50"] <= results["ask"]["p95"]
    assert 0 < results["ask"]["retrieval share"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_gpu_small_run_scores_packed_as_padded_on_any_device(tmp_path):
    cascade = start(minilm(), exits=[1, 2])
    cascade.drop = 0.5
    path = save(cascade, tmp_path / "cascade")
    flags = ("--device", "cpu", "--cascade", str(path))
    found = report("gpu", tmp_path, *flags)
    assert found["results"]["MiniLM"]["largest difference"] < 0.02
    assert found["results"]["MiniLM"]["part of the product"] > 0
    assert 0.5 < found["results"]["cascade"]["operations"] < 0.9


def test_rankers_are_measured_where_ray_is_not_installed():
    code = "import sys; sys.modules['ray'] = None; import benchmarks.gpu, benchmarks.ranking"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_serving_small_run_loads_both_services(tmp_path):
    pytest.importorskip("sentence_transformers")
    cascade = start(minilm(), exits=[1, 2])
    cascade.drop = 0.5
    path = save(cascade, tmp_path / "cascade")
    flags = ("--cores", "2", "--cascade", str(path), "--soak", "5")
    found = report("serving", tmp_path, *flags)["results"]
    soak = found.pop("soak")
    assert soak["load"]["answered"] > 0
    assert soak["load"]["failed"] == 0
    assert min(soak["memory, MB"]) > 300  # the replica alone holds torch and a network
    [of] = found.values()
    assert of["sustained"]["CrossEncoder"]["ratio"]["median"] > 0
    assert {side: set(loads) for side, loads in of["clients"].items()} == {
        "as2ray": {"2"},
        "CrossEncoder": {"2"},
    }
    assert all(load["failed"] == 0 for loads in of["clients"].values() for load in loads.values())
    assert of["overload"]["failed"] == 0
    assert of["in process"]["ratio"]["median"] > 0


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, str]:
    """How each benchmark ends that finds nothing; one process, as loading takes longest."""
    code = (
        "import importlib, json, sys\n"
        "ends = {}\n"
        "for name, flags in json.loads(sys.argv[1]).items():\n"
        "    try:\n"
        "        importlib.import_module(f'benchmarks.{name}').main(flags)\n"
        "    except SystemExit as end:\n"
        "        ends[name] = str(end)\n"
        "print(json.dumps(ends))\n"
    )
    folder = tmp_path_factory.mktemp("nowhere")
    told = ["--data", str(folder), "--output", str(folder / "out.json")]
    more = {"gpu": ["--device", "cpu"], "serving": ["--cascade", "any"]}
    flags = {name: [*told, *more.get(name, [])] for name in NEEDS}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "out.json").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NEEDS)
def test_benchmark_without_what_it_needs_says_so(name, ends):
    if not all(map(find_spec, ("rank_bm25", "sentence_transformers"))):
        pytest.skip("the extra 'benchmarks' is not installed")
    assert NEEDS[name] in ends[name]
