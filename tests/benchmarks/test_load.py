"""The clients of the serving benchmark, against a server that answers as told."""

import asyncio
import threading

import pytest
import uvicorn

from benchmarks.load import run_closed_loop, run_open_loop
from benchmarks.serving import BRIEF, FULL


async def answers(scope, receive, send):
    """Answers with the status that the path names, after the seconds in its query string.

    A refusal says that one may come again in a second.
    """
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(float(scope["query_string"] or 0))
    status = int(scope["path"][1:])
    headers = [(b"retry-after", b"1")] if status == 429 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture(scope="module")
def server():
    config = uvicorn.Config(answers, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_open_loop_sends_at_its_rate_and_waits_for_every_answer(server):
    seen = run_open_loop(f"{server}/200?0.2", [{}], requests_per_second=50, duration_s=0.4)
    assert len(seen.latencies_s) == 20
    assert seen.duration_s > 0.38 + 0.2
    assert min(seen.latencies_s) >= 0.2
    assert seen.quantile(0.5) <= seen.quantile(0.99)


def test_closed_loop_keeps_so_many_waiting(server):
    seen = run_closed_loop(f"{server}/200?0.1", [{}], num_clients=4, duration_s=0.3)
    assert len(seen.latencies_s) >= 4
    assert seen.answers_per_second <= 4 / 0.1


def test_closed_loop_stays_away_as_long_as_it_is_told_and_not_beyond_the_end(server):
    seen = run_closed_loop(f"{server}/429", [{}], num_clients=2, duration_s=1.3)
    assert (len(seen.latencies_s), seen.num_rejected, seen.num_failed) == (0, 4, 0)
    assert seen.duration_s < 2.0


@pytest.mark.parametrize(
    ("status", "refused", "failed"), [(429, 5, 0), (503, 5, 0), (500, 0, 5), (422, 0, 5)]
)
def test_refusals_and_failures_are_no_answers(server, status, refused, failed):
    seen = run_open_loop(f"{server}/{status}", [{}], requests_per_second=100, duration_s=0.05)
    assert (len(seen.latencies_s), seen.num_rejected, seen.num_failed) == (0, refused, failed)
    assert seen.quantile(0.5) == float("inf")


def test_nobody_there_is_a_failure():
    seen = run_open_loop("http://127.0.0.1:9", [{}], requests_per_second=100, duration_s=0.03)
    assert seen.num_failed == 3


def test_brief_run_holds_services_to_a_bound_of_the_full_one_within_five_minutes():
    assert BRIEF.p99_bounds_s.items() < FULL.p99_bounds_s.items()
    # Two searches that rise as far as they may, the clients, the overload, the ranking in process.
    num_loads = 2 * (1.25 + BRIEF.max_rate_steps) + 2 * len(BRIEF.client_counts) + 1
    num_loads += 2 * (BRIEF.num_repeats + 1)
    assert num_loads * BRIEF.duration_s < 300
