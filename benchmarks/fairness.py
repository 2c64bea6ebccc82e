"""Measures what clients with large requests cost clients with small ones, and the other way round.

`as2ray serve` runs with its default settings. Small requests arrive at a constant rate: alone,
beside one client that sends requests of about 110,000 tokens one after the other, and beside six of
them. The claims are bounds on the p99 latency of small requests, and that a large client keeps most
of the rate that it has alone. `--url` names a service that runs already.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from benchmarks.chaos import QUESTION, SENTENCE, save_untrained_cascade
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.service import run_service, serve_command

SMALL_REQUEST: dict[str, Any] = {"query": QUESTION, "texts": [SENTENCE] * 8}
SMALL_PER_SECOND = 5.0
"""Arrivals of small requests; they take a few percent of the service's time."""

MAX_P99_S = {1: 0.6, 6: 1.0}
"""Bound on the p99 latency of small requests in seconds, by the number of large clients."""

MIN_RATE_SHARE = 0.85
"""Bound on the rate of a large client beside small requests, as a share of the rate alone."""

CLIENT_TIMEOUT_S = 120.0


@dataclass
class Phase:
    """What clients measured at the same time."""

    small_latencies_s: list[float] = field(default_factory=list)
    """Latencies from the planned time of each request that was answered."""
    num_small_failed: int = 0
    num_large: int = 0
    """Large requests that were answered."""
    num_large_refused: int = 0
    duration_s: float = 0.0

    @property
    def large_per_second(self) -> float:
        """Rate of answers to large requests."""
        return self.num_large / self.duration_s

    def quantile_ms(self, q: float) -> float:
        """Returns a quantile of the latencies of small requests in milliseconds."""
        return 1e3 * float(np.quantile(self.small_latencies_s, q))


async def measure(
    url: str, num_large_clients: int, duration_s: float, large_request: Any, has_small: bool = True
) -> Phase:
    """Runs clients for some seconds, and until every large request that was sent is answered.

    Args:
        url: Address of the service's `/rerank`.
        num_large_clients: Clients that send one large request after the other.
        duration_s: Seconds after which no large request is sent.
        large_request: Its body.
        has_small: Whether small requests are sent meanwhile.
    """
    phase, started_at = Phase(), time.perf_counter()
    limits = httpx.Limits(max_connections=None)

    async def send_small(client: httpx.AsyncClient, planned_at: float) -> None:
        try:
            response = await client.post(url, json=SMALL_REQUEST)
        except httpx.HTTPError:
            response = None
        if response is not None and response.status_code == 200:
            phase.small_latencies_s.append(time.perf_counter() - planned_at)
        else:
            phase.num_small_failed += 1

    async def run_large(client: httpx.AsyncClient) -> None:
        while time.perf_counter() - started_at < duration_s:
            response = await client.post(url, json=large_request)
            if response.status_code == 200:
                phase.num_large += 1
            else:
                phase.num_large_refused += 1
                await asyncio.sleep(float(response.headers.get("retry-after", 1)))

    async with (
        httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        large = [asyncio.create_task(run_large(client)) for _ in range(num_large_clients)]
        planned_at = started_at
        while time.perf_counter() - started_at < duration_s or not all(t.done() for t in large):
            if has_small:
                group.create_task(send_small(client, planned_at))
            planned_at += 1 / SMALL_PER_SECOND
            await asyncio.sleep(max(0.0, planned_at - time.perf_counter()))
        await asyncio.gather(*large)
    phase.duration_s = time.perf_counter() - started_at
    return phase


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    num_candidates, duration_s = (40, 1.0) if args.small else (1_000, 20.0)
    large_request = {"query": QUESTION, "texts": [SENTENCE * 10] * num_candidates}
    with ExitStack() as stack:
        url = f"{args.url}/rerank" if args.url else _start_service(args, stack)

        def run(
            num_large_clients: int, has_small: bool = True, seconds: float = duration_s
        ) -> Phase:
            return asyncio.run(measure(url, num_large_clients, seconds, large_request, has_small))

        run(1, seconds=0.5)  # the queue learns its rate
        phases = {
            "small alone": run(0),
            "large alone": run(1, has_small=False),
            **{f"beside {count}": run(count) for count in MAX_P99_S},
        }
    share = phases["beside 1"].large_per_second / phases["large alone"].large_per_second
    claims = [
        Claim("p99 of small requests alone", _describe(phases["small alone"]), None),
        *(
            Claim(
                f"beside {count} large clients: p99 <= {1e3 * bound_s:g} ms",
                _describe(phases[f"beside {count}"]),
                phases[f"beside {count}"].quantile_ms(0.99) <= 1e3 * bound_s,
            )
            for count, bound_s in MAX_P99_S.items()
        ),
        Claim(
            f"a large client keeps >= {MIN_RATE_SHARE:.0%} of its rate",
            f"{share:.2f}",
            share >= MIN_RATE_SHARE,
        ),
    ]
    write_report("fairness", args, claims, {name: asdict(p) for name, p in phases.items()})


def _start_service(args: argparse.Namespace, stack: ExitStack) -> str:
    """Starts a service that ends with the stack; returns the address of its `/rerank`."""
    limit_cores(args.cores)
    # A signal that ends the benchmark ends its service, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    folder = stack.enter_context(TemporaryDirectory(prefix="as2ray-fairness-"))
    cascade = args.cascade or save_untrained_cascade(Path(folder) / "cascade")
    service = run_service(serve_command(cascade), args.start_timeout_s)
    return stack.enter_context(service).url


def _describe(phase: Phase) -> str:
    return (
        f"p50 {phase.quantile_ms(0.5):.0f} ms, p99 {phase.quantile_ms(0.99):.0f} ms "
        f"({len(phase.small_latencies_s)} answered, {phase.num_small_failed} failed; large: "
        f"{phase.num_large} answered, {phase.num_large_refused} refused)"
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cascade", type=Path, help="checkpoint; by default an untrained MiniLM")
    parser.add_argument("--url", help="a service; by default one is started")
    parser.add_argument("--start_timeout_s", type=float, default=300.0, help="limit for a start")


if __name__ == "__main__":
    main()
