"""Small runs of the benchmarks that start Ray and services, in processes of their own."""

import pytest
from small_runs import alone, here

pytestmark = pytest.mark.slow


# First: it measures processes that it started, so no other one may fork them.
@pytest.mark.usefixtures("encoder")
def test_streaming_small_run_writes_rates_times_and_memory(tmp_path):
    results = here(tmp_path, "streaming")["results"]
    assert results["text"] == "made-up words"
    assert set(results["rates"]) == {"encode_batch", "encode_batch_fast", "packed_dataset"}
    assert all(rate["ratio"]["median"] > 0 for rate in results["rates"].values())
    [one] = results["passes"]
    assert one["epoch"]["num_pairs"] == 4_096
    assert 0 < one["epoch"]["first_batch_s"] < one["first_batch_from_init"]
    assert one["memory"]["driver_mb"] > 0
    assert one["memory"]["workers_mb"] > 0
    assert one["memory"]["num_worker_processes"] > 0


@pytest.mark.usefixtures("encoder", "forked_workers_elsewhere")
def test_epoch_small_run_sees_every_pair_once_and_writes_every_process(tmp_path):
    report = here(tmp_path, "epoch")
    [exact] = [claim for claim in report["claims"] if "exactly once" in claim["claim"]]
    assert exact["holds"]
    [one] = report["results"]["passes"]
    assert one["exact"]
    assert sum(worker["num_pairs"] for worker in one["workers"]) == one["pairs"] == 16_384
    assert 0 < one["first"] < one["end"]
    assert any("raylet" in name for name in one["memory"]["process_mb"])
    assert report["results"]["datasets"]["rate"] > 0
    assert report["results"]["datasets"]["memory"] > 0


@pytest.mark.usefixtures("forked_workers_elsewhere")
def test_serving_small_run_loads_both_services(cascade, tmp_path):
    pytest.importorskip("sentence_transformers")
    flags = ("--cores", "2", "--cascade", cascade, "--soak_s", "3")
    found = alone(tmp_path, "serving", *flags)["results"]
    soak = found.pop("soak")
    assert soak["load"]["num_answered"] > 0
    assert soak["load"]["num_failed"] == 0
    assert min(soak["memory, MB"]) > 300  # the replica alone holds torch and a network
    [of] = found.values()
    assert of["sustained"]["CrossEncoder"]["ratio"]["median"] > 0
    assert {side: set(loads) for side, loads in of["clients"].items()} == {
        "as2ray": {"2"},
        "CrossEncoder": {"2"},
    }
    assert all(
        load["num_failed"] == 0 for loads in of["clients"].values() for load in loads.values()
    )
    assert of["overload"]["num_failed"] == 0
    assert of["in process"]["ratio"]["median"] > 0


@pytest.mark.usefixtures("forked_workers_elsewhere")
def test_chaos_run_loses_no_request_of_clients_that_behave(cascade, tmp_path):
    found = alone(tmp_path, "chaos", "--cascade", cascade)["results"]
    assert len(found) == 8
    assert {name: fault["num_lost"] for name, fault in found.items() if fault["num_lost"]} == {}
    for fault in found.values():
        assert fault["latencies_s"]
        assert fault["memory_mb"] > 300
