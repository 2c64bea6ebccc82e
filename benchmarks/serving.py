"""Serving: questions a second at a bound on p99, of our service and of its peers.

Knows the services as commands, and their clients. Must not know how they answer.

All rank the same real sentences, questions of SQuAD's dev part with 100 and with 400 sentences of
the article, over HTTP, in turns, on the same cores, which the clients share with them. Ours serves
a cascade (`--cascade`), FastAPI with sentence-transformers' CrossEncoder a pointwise ranker of the
same encoder, and so does Infinity, where `--infinity` names the Python of an environment with
`infinity-emb[torch,server]`. A rate is sustained if at constant arrivals (open loop) p99 is within
the bound and nothing was refused or failed. With `--soak 600` ours is then loaded for ten minutes.
A service that still ranks what its clients gave up is waited for before another is measured.
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
from benchmarks.ranking import group_by_question, load_squad_table, select_questions
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.service import find_free_port, run_service, wait_until_idle
from benchmarks.soak import run_soak

RATE_FACTOR = 1.25
"""From one arrival rate tried to the next."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    p99_bounds_s: dict[int, float]
    """Seconds that p99 may take, by candidates of a request."""
    num_questions: int
    """Different ones, in turn."""
    duration_s: float
    """Of each load."""
    num_repeats: int
    client_counts: tuple[int, ...]
    """At a time, in a closed loop."""
    num_busy_clients: int
    """That keep the service busy, in a closed loop."""
    max_rate_steps: int
    """Arrival rates tried at most, upwards."""


FULL = Size({100: 2.0, 400: 8.0}, 12, 20.0, 3, (1, 4, 16, 64), 8, 40)
SMALL = Size({8: 30.0}, 2, 0.5, 1, (2,), 2, 2)  # a machine busy with other tests keeps it, too


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    # Whoever ends the benchmark ends its services with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    table = load_squad_table(args.data, args.small)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-serving-") as folder, ExitStack() as stack:
        peer = export_cross_encoder(
            init_ranker(args.ranker or packaged_minilm()), Path(folder) / "model"
        )
        commands = {
            "as2ray": _build_as2ray_command(args),
            "CrossEncoder": _build_fastapi_command(peer, args),
        }
        if args.infinity:
            commands["Infinity"] = _build_infinity_command(peer, args)
        services = {
            name: stack.enter_context(run_service(command, args.start))
            for name, command in commands.items()
        }
        sides = {name: service.url for name, service in services.items()}
        ranker = load(args.cascade, device="cpu")
        for candidates, bound in size.p99_bounds_s.items():
            rows = select_questions(table, candidates, size.num_questions)
            questions = group_by_question(rows)
            bodies = _build_requests(questions)
            where = f"{candidates} candidates"
            compared = _compare_sustained_rates(sides, bodies, bound, size)
            found = compared["CrossEncoder"]
            latencies: dict[str, dict[str, LoadResult]] = {name: {} for name in services}
            for name, service in services.items():
                for clients in size.client_counts:
                    load = run_closed_loop(service.url, bodies, clients, size.duration_s)
                    latencies[name][str(clients)] = load
                    wait_until_idle(service)
            busy = run_open_loop(sides["as2ray"], bodies, 3 * max(found.rates), size.duration_s)
            kept = _compare_with_in_process(sides["as2ray"], bodies, ranker, questions, size)
            results[where] = {
                "sustained": {name: ratio.as_json() for name, ratio in compared.items()},
                "clients": {
                    name: {n: load.as_json() for n, load in loads.items()}
                    for name, loads in latencies.items()
                },
                "overload": busy.as_json(),
                "in process": kept.as_json(),
            }
            told = f"{where}, p99 <= {bound:g} s ({max(found.rates):.1f} questions/s)"
            refused = f"p99 {busy.quantile(0.99):.2f} s, {busy.num_rejected} refused"
            bounded = busy.num_failed == 0 and busy.quantile(0.99) <= 2 * bound
            claims += [
                Claim(f"{told}: >= 5 x CrossEncoder", str(found), found.median >= 5),
                *(
                    Claim(f"{told}: x {name}", str(ratio), None)
                    for name, ratio in compared.items()
                    if ratio is not found
                ),
                Claim(f"{where}: >= 0.85 of in-process", str(kept), kept.median >= 0.85),
                Claim(f"{where}, three times that load: p99 <= 2 x bound", refused, bounded),
            ]
            if args.soak and candidates == min(size.p99_bounds_s):
                url, pid = services["as2ray"].url, services["as2ray"].pid
                sustained = max(found.rates)
                results["soak"], more = run_soak(url, pid, bodies, sustained, bound, args.soak)
                claims += more
            write_report(
                "serving", args, claims, results
            )  # an hour in all: what is known so far is told


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cascade", type=Path, required=True, help="what our service serves")
    parser.add_argument("--start", type=float, default=300.0, help="seconds for a service to start")
    parser.add_argument("--soak", type=float, help="seconds at 80 %% of the sustained rate")
    parser.add_argument("--ranker", type=Path, help="what the peers serve; by default MiniLM")
    parser.add_argument("--infinity", type=Path, help="Python with infinity-emb[torch,server]")


def _build_requests(questions: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Bodies in Infinity's form, which all of the services take at `/rerank`."""
    return [{"query": question, "documents": texts} for question, texts in questions]


def _find_highest_rate(url: str, bodies: Sequence[Any], p99_bound_s: float, size: Size) -> float:
    """The highest arrival rate tried at which p99 is within the bound, in requests a second."""
    seconds = size.duration_s

    def holds(rate: float) -> bool:
        seen = run_open_loop(url, bodies, rate, seconds)
        return not (seen.num_rejected or seen.num_failed or seen.quantile(0.99) > p99_bound_s)

    rate = 1.0 / run_closed_loop(url, bodies, 1, seconds / 4).quantile(0.5)
    if holds(rate):
        tried = (rate * RATE_FACTOR**step for step in range(1, size.max_rate_steps + 1))
        return max(takewhile(holds, tried), default=rate)
    while rate * seconds >= 1:
        rate /= RATE_FACTOR
        if holds(rate):
            return rate
    sys.exit(
        f"{url} sustains no rate: one request in {seconds:g} s is refused or over {p99_bound_s:g} s"
    )


def _compare_sustained_rates(
    urls: dict[str, str], bodies: Sequence[Any], p99_bound_s: float, size: Size
) -> dict[str, SpeedRatio]:
    """By peer, how many times its highest rate ours is, in turns."""
    # Without a round to warm up: each search begins with a client of its own.
    first, *others = (
        lambda url=url: _find_highest_rate(url, bodies, p99_bound_s, size) for url in urls.values()
    )
    _, *peers = urls
    return dict(zip(peers, measure_alternately(first, others, size.num_repeats, warm_up=False)))


def _compare_with_in_process(
    url: str,
    bodies: Sequence[Any],
    ranker: Any,
    questions: Sequence[tuple[str, list[str]]],
    size: Size,
) -> SpeedRatio:
    """What the busy service keeps of the throughput of `rank_many` in this process, in turns."""

    def inside() -> float:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < size.duration_s:
            ranker.rank_many(questions)
            done += len(questions)
        return done / (time.perf_counter() - began)

    def served() -> float:
        return run_closed_loop(
            url, bodies, size.num_busy_clients, size.duration_s
        ).answers_per_second

    (kept,) = measure_alternately(served, [inside], size.num_repeats)
    return kept


def _build_as2ray_command(args: argparse.Namespace) -> tuple[int, list[str]]:
    port = find_free_port()
    code = "from as2ray.cli.main import main; main()"
    replicas = {"cpus": max(1, args.cores - 0.5), "gateway_cpus": 0.1}
    flags = [f"--settings.replicas.{name}={value}" for name, value in replicas.items()]
    return port, [
        *(sys.executable, "-c", code, "serve", f"--model={args.cascade}", f"--port={port}"),
        # With the two batches that are being ranked, what takes somewhat over the bound.
        *(*flags, "--settings.batches.waiting_tokens=49152", "--settings.limits.tokens=49152"),
    ]


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
