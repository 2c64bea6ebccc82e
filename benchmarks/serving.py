"""Compares rerank services by the rate that they sustain within a bound on the p99 latency.

All services rank the same sentences over HTTP: questions of SQuAD's dev part with 100 and with 400
sentences of the article. They are measured in turns on the same cores, which they share with the
clients. as2ray serves a cascade (`--cascade`). FastAPI with sentence-transformers' CrossEncoder
serves a pointwise ranker of the same encoder, as does Infinity if `--infinity` names the Python of
an environment with `infinity-emb[torch,server]`. A rate is sustained if p99 is within the bound at
constant arrivals (open loop), and no request is rejected or fails. `--soak_s 600` then loads
as2ray's service for ten minutes. `--brief` makes the same comparisons once, with 100 sentences and
shorter loads: minutes instead of an hour. A service that still ranks requests that its clients gave
up is waited for before the next measurement.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from benchmarks.load import LoadResult, run_closed_loop, run_open_loop
from benchmarks.peer_processes import group_by_question
from benchmarks.ranking import load_squad_table, select_questions
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.service import find_free_port, run_service, serve_command, wait_until_idle
from benchmarks.soak import run_soak

RATE_FACTOR = 1.25
"""Factor from one arrival rate to the next in the search for the highest."""


QUEUE_SHARE = 0.75
"""Seconds of work that as2ray may queue, as a share of the smallest bound."""


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    p99_bounds_s: dict[int, float]
    """Bound on p99 in seconds, by the number of candidates of a request."""
    num_questions: int
    """Number of different questions, used in turn."""
    duration_s: float
    """Seconds of each load."""
    num_repeats: int
    client_counts: tuple[int, ...]
    """Numbers of clients in a closed loop."""
    num_busy_clients: int
    """Number of clients that keep the service busy in a closed loop."""
    max_rate_steps: int
    """Maximum number of higher arrival rates that are tried."""


FULL = Size({100: 2.0, 400: 8.0}, 12, 20.0, 3, (1, 4, 16, 64), 8, 40)
BRIEF = Size({100: 2.0}, 12, 10.0, 1, (4,), 8, 8)
SMALL = Size({8: 30.0}, 2, 0.5, 1, (2,), 2, 2)  # a bound for machines that run other tests, too


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = SMALL if args.small else BRIEF if args.brief else FULL
    limit_cores(args.cores)
    # A signal that ends the benchmark ends its services, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    table = load_squad_table(args.data, args.small)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-serving-") as folder, ExitStack() as stack:
        pointwise = export_cross_encoder(
            init_ranker(args.ranker or packaged_minilm()), Path(folder) / "model"
        )
        commands = {
            "as2ray": _build_as2ray_command(args, size),
            "CrossEncoder": _build_fastapi_command(pointwise, args),
        }
        if args.infinity:
            commands["Infinity"] = _build_infinity_command(pointwise, args)
        services = {
            name: stack.enter_context(run_service(command, args.start_timeout_s))
            for name, command in commands.items()
        }
        urls = {name: service.url for name, service in services.items()}
        ranker = load(args.cascade, device="cpu")
        for num_candidates, p99_bound_s in size.p99_bounds_s.items():
            rows = select_questions(table, num_candidates, size.num_questions)
            questions = group_by_question(rows)
            bodies = _build_requests(questions)
            setting = f"{num_candidates} candidates"
            ratios = _compare_sustained_rates(urls, bodies, p99_bound_s, size)
            to_cross_encoder = ratios["CrossEncoder"]
            sustained_rate = max(to_cross_encoder.rates)
            loads: dict[str, dict[str, LoadResult]] = {name: {} for name in services}
            for name, service in services.items():
                for num_clients in size.client_counts:
                    loads[name][str(num_clients)] = run_closed_loop(
                        service.url, bodies, num_clients, size.duration_s
                    )
                    wait_until_idle(service)
            overload = run_open_loop(urls["as2ray"], bodies, 3 * sustained_rate, size.duration_s)
            to_in_process = _compare_with_in_process(
                urls["as2ray"], bodies, ranker, questions, size
            )
            results[setting] = {
                "sustained": {name: ratio.as_json() for name, ratio in ratios.items()},
                "clients": {
                    name: {n: result.as_json() for n, result in results_by_clients.items()}
                    for name, results_by_clients in loads.items()
                },
                "overload": overload.as_json(),
                "in process": to_in_process.as_json(),
            }
            bounded_load = f"{setting}, p99 <= {p99_bound_s:g} s ({sustained_rate:.1f} questions/s)"
            p99_s = overload.quantile(0.99)
            claims += [
                Claim(
                    f"{bounded_load}: >= 5 x CrossEncoder",
                    str(to_cross_encoder),
                    to_cross_encoder.median >= 5,
                ),
                *(
                    Claim(f"{bounded_load}: x {name}", str(ratio), None)
                    for name, ratio in ratios.items()
                    if ratio is not to_cross_encoder
                ),
                Claim(
                    f"{setting}: >= 0.85 of in-process",
                    str(to_in_process),
                    to_in_process.median >= 0.85,
                ),
                Claim(
                    f"{setting}, three times that load: p99 <= 2 x bound",
                    f"p99 {p99_s:.2f} s, {overload.num_rejected} rejected",
                    overload.num_failed == 0 and p99_s <= 2 * p99_bound_s,
                ),
            ]
            if args.soak_s and num_candidates == min(size.p99_bounds_s):
                service = services["as2ray"]
                results["soak"], soak_claims = run_soak(
                    service.url, service.pid, bodies, sustained_rate, p99_bound_s, args.soak_s
                )
                claims += soak_claims
            # The benchmark takes an hour, so it also reports intermediate results.
            write_report("serving", args, claims, results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cascade", type=Path, required=True, help="checkpoint that as2ray serves")
    parser.add_argument("--brief", action="store_true", help="one repeat of short loads")
    parser.add_argument("--start_timeout_s", type=float, default=300.0, help="limit for a start")
    parser.add_argument("--soak_s", type=float, help="seconds at 80 %% of the sustained rate")
    parser.add_argument("--ranker", type=Path, help="what the others serve; by default MiniLM")
    parser.add_argument("--infinity", type=Path, help="Python with infinity-emb[torch,server]")


def _build_requests(questions: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Returns bodies in Infinity's format, which all services accept at `/rerank`."""
    return [{"query": question, "documents": texts} for question, texts in questions]


def _find_highest_rate(url: str, bodies: Sequence[Any], p99_bound_s: float, size: Size) -> float:
    """Returns the highest arrival rate at which p99 is within the bound, in requests per second."""
    duration_s = size.duration_s

    def is_sustained(rate: float) -> bool:
        load = run_open_loop(url, bodies, rate, duration_s)
        return not (load.num_rejected or load.num_failed or load.quantile(0.99) > p99_bound_s)

    rate = 1.0 / run_closed_loop(url, bodies, 1, duration_s / 4).quantile(0.5)
    if is_sustained(rate):
        rates = (rate * RATE_FACTOR**step for step in range(1, size.max_rate_steps + 1))
        return max(takewhile(is_sustained, rates), default=rate)
    while rate * duration_s >= 1:
        rate /= RATE_FACTOR
        if is_sustained(rate):
            return rate
    sys.exit(
        f"{url} sustains no rate: one request in {duration_s:g} s is rejected, fails or takes more "
        f"than {p99_bound_s:g} s"
    )


def _compare_sustained_rates(
    urls: dict[str, str], bodies: Sequence[Any], p99_bound_s: float, size: Size
) -> dict[str, SpeedRatio]:
    """Returns the ratio of as2ray's highest sustained rate to each other service's."""
    # No warm-up round: each search begins with a closed loop.
    first, *others = (
        lambda url=url: _find_highest_rate(url, bodies, p99_bound_s, size) for url in urls.values()
    )
    _, *names = urls
    return dict(zip(names, measure_alternately(first, others, size.num_repeats, warm_up=False)))


def _compare_with_in_process(
    url: str,
    bodies: Sequence[Any],
    ranker: Any,
    questions: Sequence[tuple[str, list[str]]],
    size: Size,
) -> SpeedRatio:
    """Returns the ratio of the busy service's throughput to that of `rank_many` in this process."""

    def rank_in_process() -> float:
        started_at, num_ranked = time.perf_counter(), 0
        while time.perf_counter() - started_at < size.duration_s:
            ranker.rank_many(questions)
            num_ranked += len(questions)
        return num_ranked / (time.perf_counter() - started_at)

    def rank_by_service() -> float:
        return run_closed_loop(
            url, bodies, size.num_busy_clients, size.duration_s
        ).answers_per_second

    (ratio,) = measure_alternately(rank_by_service, [rank_in_process], size.num_repeats)
    return ratio


def _build_as2ray_command(args: argparse.Namespace, size: Size) -> tuple[int, list[str]]:
    replicas = {"num_cpus": max(1, args.cores - 0.5), "gateway_num_cpus": 0.1}
    flags = [f"--settings.replicas.{name}={value}" for name, value in replicas.items()]
    return serve_command(
        args.cascade,
        *flags,
        # With two running batches, a full queue takes somewhat longer than the bound.
        f"--settings.batching.max_queue_s={QUEUE_SHARE * min(size.p99_bounds_s.values()):g}",
        "--settings.batching.max_queued_tokens=98304",
        "--settings.limits.max_request_tokens=49152",
    )


def _build_fastapi_command(model: Path, args: argparse.Namespace) -> tuple[int, list[str]]:
    port, script = find_free_port(), Path(__file__).with_name("serving_peer.py")
    flags = [f"--model={model}", f"--port={port}", f"--cores={args.cores}"]
    return port, [sys.executable, str(script), *flags]


def _build_infinity_command(model: Path, args: argparse.Namespace) -> tuple[int, list[str]]:
    port = find_free_port()
    flags = [f"--model-id={model}", f"--port={port}", "--host=127.0.0.1", "--device=cpu"]
    command = [str(args.infinity.with_name("infinity_emb")), "v2", *flags]
    return port, [*command, "--engine=torch", "--log-level=error"]


if __name__ == "__main__":
    main()
