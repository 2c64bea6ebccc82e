import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from small_runs import report, started

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.saving import save
from benchmarks import epoch
from benchmarks.consuming import WorkerReport, compute_checksum, is_exact

NEEDS = {
    "training": "WikiQA",
    "ranking": "SQuAD",
    "retrieval": "SQuAD",
    "gpu": "CUDA",
    "serving": "SQuAD",
}
"""What a benchmark asks for where it finds neither releases nor a GPU."""


def together(folder: Path, runs: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """How each run of a benchmark ends, in one process, as loading takes longest; "" where well.

    What the first writes is `0.json`, and so on.
    """
    code = (
        "import importlib, json, sys, traceback\n"
        "ends = []\n"
        "for name, flags in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        importlib.import_module(f'benchmarks.{name}').main(flags)\n"
        "        ends.append('')\n"
        "    except SystemExit as end:\n"
        "        ends.append(str(end))\n"
        "    except Exception:\n"
        "        ends.append(traceback.format_exc())\n"
        "print(json.dumps(ends))\n"
    )
    told = [
        (name, [*flags, "--output", str(folder / f"{number}.json")])
        for number, (name, flags) in enumerate(runs)
    ]
    done = started(folder, "-c", code, json.dumps(told))
    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    ends = json.loads(last)
    shown = {name for name, _ in runs if any(f"benchmarks.{name}" in line for line in tables)}
    assert shown == {name for (name, _), end in zip(runs, ends, strict=True) if not end}
    return ends


@pytest.fixture(scope="module")
def runs(
    cascade, encoder, sentence_encoder, tmp_path_factory, forked_workers_elsewhere
) -> tuple[Callable[[str], dict], dict[str, str]]:
    """What the small run of a ranker's benchmark wrote, and how each ends that finds nothing."""
    folder = tmp_path_factory.mktemp("runs")
    smaller = str(save(init_ranker(encoder, num_layers=1), folder / "smaller"))
    # One core: threads that wait for each other on a busy machine would take minutes.
    small = {
        "training": ["--cores", "1"],
        "ranking": [
            *("--cores", "1", "--cascade", cascade, "--compare", smaller),
            # Each peer is a process that loads torch; the second one finds no OpenVINO.
            *("--backends", "default", "OpenVINO int8"),
            *("--encoder", str(sentence_encoder)),
        ],
        "two_in_one": ["--cores", "1"],
        "retrieval": ["--cores", "1", "--ranker", smaller],
        "budget": [
            *("--cores", "1", "--cascade", cascade, "--model", cascade),
            *("--encoder", str(sentence_encoder)),
        ],
        "gpu": ["--device", "cpu", "--cascade", cascade],
        "distillation": ["--cores", "1"],
    }
    more = {"gpu": ["--device", "cpu"], "serving": ["--cascade", "any"]}
    ends = together(
        folder,
        [(name, ["--small", *flags]) for name, flags in small.items()]
        + [(name, more.get(name, [])) for name in NEEDS],
    )
    written = {int(path.stem) for path in folder.glob("*.json")}
    assert written == {number for number, end in enumerate(ends) if not end}

    def wrote(name: str) -> dict:
        number = list(small).index(name)
        assert ends[number] == ""
        return report(folder / f"{number}.json", name)

    return wrote, dict(zip(NEEDS, ends[len(small) :], strict=True))


@pytest.fixture(scope="module")
def small(runs) -> Callable[[str], dict]:
    return runs[0]


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
            "memory": {"driver_mb": 0.0, "workers_mb": mb, "spilled_mb": 0.0},
        }
        for (pairs, seconds), mb in zip(ends, memory, strict=True)
    ]
    holds = {claim.claim: claim.holds for claim in epoch.build_claims(passes, {"rate": 500.0})}
    assert holds["cost grows linearly (within 20 %)"] is linear
    assert holds["memory flat (within 10 %) from the second epoch on"] is flat


def test_checksum_tells_a_row_that_came_twice_for_another():
    rows = np.arange(1_000)
    shares = [
        WorkerReport(500, 0, 3, compute_checksum(rows[::2]), 0, 0),
        WorkerReport(500, 0, 3, compute_checksum(rows[1::2]), 0, 0),
    ]
    assert is_exact(shares, 1_000, 3)
    assert not is_exact(shares, 1_000, 4)
    swapped = rows[1::2].copy()
    swapped[0], swapped[7] = 0, 16  # two odd rows gone, two even ones twice: the plain sum stays
    assert swapped.sum() == rows[1::2].sum()
    shares[1] = WorkerReport(500, 0, 3, compute_checksum(swapped), 0, 0)
    assert not is_exact(shares, 1_000, 3)


@pytest.mark.slow
def test_training_small_run_writes_both_ratios(small):
    pytest.importorskip("sentence_transformers")
    results = small("training")["results"]
    [compared] = results.values()
    assert set(compared) == {"default", "bf16"}
    assert all(side["ratio"]["median"] > 0 for side in compared.values())


@pytest.mark.slow
def test_ranking_small_run_compares_both_rankers_with_a_peer(small):
    pytest.importorskip("sentence_transformers")
    results = small("ranking")["results"]
    for kind in ("text", "tokens"):
        compared = results[f"8 candidates, from {kind}"]
        assert {"packed", "packed fp32", "cascade"} <= set(compared)
        for name in ("packed", "cascade"):
            assert "default" in compared[name]
            assert all(side["ratio"]["median"] > 0 for side in compared[name].values())
    assert {"smaller"} <= set(compared["cascade"])
    assert 0 < results["MAP"]["smaller"] <= 1
    rates = results["8 candidates, from text"]
    [cut] = [name for name in rates if name.endswith("all leave after layer 1")]
    [behind] = [name for name in rates if name.endswith("after similarities")]
    assert {cut, behind} < set(results["MAP"])
    assert not {cut, behind} & set(compared)  # from tokens
    assert results["largest gap of similarities"] > 0
    assert 0 <= results["gone before they are tokenized"][behind] < 1
    assert results["ms of a question"]["layers"] > 0
    memory = results["peak memory, MB"]
    assert set(memory) == {"default", "packed"}
    assert min(memory.values()) > 200  # each process holds torch
    assert results["part of the GEMM rate"]["part"] > 0
    assert results["quality"]["questions"] > 0


@pytest.mark.slow
def test_two_in_one_small_run_writes_its_ratio(small):
    found = small("two_in_one")
    median = found["results"]["two rankers"]["ratio"]["median"]
    assert median > 0
    assert found["claims"][0]["holds"] == (median >= 1.8)


@pytest.mark.slow
def test_distillation_small_run_writes_every_ratio(small):
    results = small("distillation")["results"]
    assert {"stored / plain", "stored / in the loop", "one actor / in process"} < set(results)
    assert results["B11_3H1"]["parameters"] < results["B6_3H6"]["parameters"]
    assert all(found["ratio"]["median"] > 0 for found in results.values())


@pytest.mark.slow
def test_retrieval_small_run_measures_search_ask_and_encoding(small):
    pytest.importorskip("sentence_transformers")
    results = small("retrieval")["results"]
    measured = results["300"]
    assert measured["build"]["bytes per sentence"]["int8"] > 384
    assert measured["search"]["recall@100 of approximate"] > 0.5
    systems = measured["ask"]["systems"]
    assert 0 < systems["stage zero"]["ranked"] <= 8 < systems["all candidates ranked"]["ranked"]
    times_ms = {name: values["ms"] for name, values in systems.items()}
    for times in (measured["search"]["ms"], times_ms, measured["peer"]):
        assert all(0 < values["p50"] <= values["p99"] for values in times.values())
    for ratio in measured["to bm25s alone"].values():
        assert ratio["ratio"]["median"] > 0
    assert results["encoding"]["fp32"]["difference"] < 1e-5


@pytest.mark.slow
def test_budget_small_run_measures_both_sides_within_each_budget(small):
    results = small("budget")["results"]
    assert set(results["25 ms"]) == {"cascade", "blind cap"}
    assert 0 < results["cosine"]["MAP"] <= 1
    assert 0 < results["hybrid"]["MAP"] <= 1
    assert results["hybrid"]["MAP"] != results["cosine"]["MAP"]
    for budget in ("25 ms", "500 ms", "none"):
        for measured in results[budget].values():
            assert 0 < measured["MAP"] <= 1
            assert 0 < measured["p50"] <= measured["p99"]


@pytest.mark.slow
def test_gpu_small_run_scores_packed_as_padded_on_any_device(small):
    found = small("gpu")
    assert found["results"]["MiniLM"]["largest difference"] < 0.02
    assert found["results"]["MiniLM"]["part of the product"] > 0
    assert 0.5 < found["results"]["cascade"]["operations"] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_benchmark_without_what_it_needs_says_so(name, runs):
    if find_spec("sentence_transformers") is None:
        pytest.skip("the extra 'benchmarks' is not installed")
    assert NEEDS[name] in runs[1][name]
