"""Processes that rank with other libraries, and the ratio of rankers' rates to theirs."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.models.packed_ranker import PackedRanker
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.schema import question_indices, question_offsets
from benchmarks.ranking_stages import PairScorer
from benchmarks.report import select_cores

PEER_BACKENDS = {
    "default": ("torch", {}),
    "bf16": ("torch", {"dtype": "bfloat16"}),
    "ONNX": ("onnx", {}),
    "OpenVINO": ("openvino", {}),
    "ONNX int8": ("onnx_int8", {}),
    "OpenVINO int8": ("openvino_int8", {}),
}
"""Backend and keyword arguments of each baseline."""

OWN_BACKENDS = {name: ("as2ray", {"dtype": name}) for name in ("fp32", "bf16", "int8")}
"""The same of as2ray itself, whose memory is measured."""

INT8_PEERS = ("ONNX int8", "OpenVINO int8")
"""Baselines in int8, whose MAP is measured, too."""

DEFAULT_BATCH_SIZE = 32
"""CrossEncoder's default."""


@dataclass(frozen=True)
class BatchSizeSearch:
    """How a baseline finds its batch size, on the candidates of the first question."""

    batch_sizes: tuple[int, ...] = (8, 16, 32, 64)
    num_passes: int = 2
    """Passes with each size, of which the fastest counts."""
    num_pairs: int | None = None
    """Pairs of a pass; by default all."""


MAX_SLOWDOWN = 1.3
"""A family's baseline that takes this many times as long as the fastest is measured no further."""


def compare_rates(
    rankers: Mapping[str, PairScorer],
    peers: Mapping[str, "PeerProcess"],
    rows: pa.Table,
    num_repeats: int,
    kinds: Sequence[str] = ("text",),
) -> dict[str, dict[str, dict[str, SpeedRatio]]]:
    """Ends the peers; returns the ratio of each ranker to each other side, by what is ranked.

    Args:
        rankers: Rankers of as2ray, by name; what is no `PackedRanker` ranks text alone.
        peers: Processes from `start_peers`.
        rows: Pairs of whole questions.
        num_repeats: Passes of each side.
        kinds: What is ranked: `text`, `tokens` or both.
    """
    if len(peers) + len(rankers) == 1:
        sys.exit("there is nothing to compare with: no baseline is installed or chosen")
    results = {}
    try:
        for kind in kinds:
            measured = {
                name: ranker
                for name, ranker in rankers.items()
                if kind == "text" or isinstance(ranker, PackedRanker)
            }
            workloads = {
                name: _build_ranker_workload(ranker, rows, kind)
                for name, ranker in measured.items()
            }
            workloads |= {
                name: peer.build_workload(kind, rows.num_rows) for name, peer in peers.items()
            }
            first, *others = workloads.values()
            ratios = measure_alternately(first, others, num_repeats)
            rates = dict(
                zip(workloads, [ratios[0].rates, *(ratio.baseline_rates for ratio in ratios)])
            )
            results[kind] = {
                name: {
                    other: SpeedRatio(rates[name], rates[other])
                    for other in (*peers, *measured)
                    if other != name
                }
                for name in measured
            }
        for name, peer in peers.items():
            print(f"{name}: batch size {peer.batch_size}, peak memory {peer.peak_mb:,.0f} MB")
    finally:
        for peer in peers.values():
            peer.close()
    return results


def _build_ranker_workload(ranker: PairScorer, rows: pa.Table, kind: str) -> Callable[[], float]:
    """Returns a workload that scores whole questions, from text or from tokens."""
    texts, question = (
        (rows["question"].to_pylist(), rows["candidate"].to_pylist()),
        question_indices(rows),
    )
    predict = partial(ranker.predict_pairs, *texts, question)
    if kind == "tokens":
        assert isinstance(ranker, PackedRanker)
        predict = partial(ranker.predict_sequences, ranker.tokenizer.encode(*texts), question)

    def workload() -> float:
        started_at = time.perf_counter()
        predict()
        return rows.num_rows / (time.perf_counter() - started_at)

    return workload


def start_peers(
    model_path: Path,
    rows: pa.Table,
    args: argparse.Namespace,
    names: Sequence[str],
    search: BatchSizeSearch = BatchSizeSearch(),
) -> dict[str, "PeerProcess"]:
    """Starts the baselines whose packages are there."""
    if args.without_peers:
        return {}
    names = [x for x in names if args.backends is None or x in args.backends]
    peers = {name: PeerProcess(name, model_path, rows, args, search) for name in names}
    for name, peer in peers.items():
        if peer.problem:
            peer.close()
            print(f"{name} is not measured: {peer.problem}")
    return {name: peer for name, peer in peers.items() if not peer.problem}


def measure_memory(
    dtype: str, model_path: Path, rows: pa.Table, args: argparse.Namespace
) -> float | None:
    """Returns the largest resident memory of a process in which as2ray ranks the rows, in MB."""
    process = PeerProcess(dtype, model_path, rows, args, backends=OWN_BACKENDS)
    try:
        if process.problem:
            print(f"the memory of as2ray is not measured: {process.problem}")
            return None
        process.build_workload("text", rows.num_rows)()
        return process.peak_mb
    finally:
        process.close()


def keep_fastest(peers: dict[str, "PeerProcess"]) -> dict[str, "PeerProcess"]:
    """Ends baselines that were far slower than the fastest when they looked for a batch size."""
    fastest = min((peer.seconds for peer in peers.values()), default=0.0)
    kept = {}
    for name, peer in peers.items():
        if peer.seconds <= MAX_SLOWDOWN * fastest:
            kept[name] = peer
            continue
        peer.close()
        slowdown = peer.seconds / fastest
        print(f"{name}: {slowdown:.1f} times as long as the fastest (batch size {peer.batch_size})")
    return kept


class PeerProcess:
    """A process that ranks with another library whenever it is asked to."""

    def __init__(
        self,
        name: str,
        model_path: Path,
        rows: pa.Table,
        args: argparse.Namespace,
        search: BatchSizeSearch = BatchSizeSearch(),
        backends: Mapping[str, tuple[str, dict[str, str]]] = PEER_BACKENDS,
    ) -> None:
        backend, keywords = backends[name]
        is_here = backend in ("torch", "as2ray")
        python = sys.executable if is_here else str(args.peers or sys.executable)
        takes_default = name == "default" or backend == "as2ray" or args.small
        script = Path(__file__).with_name("ranking_peer.py")
        self.process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} if is_here else None,
        )
        self._send(
            json.dumps(
                {
                    "model": str(model_path),
                    "max_length": 128,
                    "backend": backend,
                    "model_kwargs": keywords,
                    "cores": select_cores(args.cores),
                    "questions": group_by_question(rows),
                    **asdict(search),
                    "batch_sizes": [DEFAULT_BATCH_SIZE] if takes_default else search.batch_sizes,
                }
            )
        )
        message = self._read_message()
        self.problem: str | None = None
        """Why it cannot be measured."""
        if message is None:  # such as a backend that cannot export this family
            message = {}
            self.problem = f"exit code {self.process.wait()}; its error is printed above"
        elif "missing" in message:
            self.problem = f"{', '.join(message['missing'])} is not installed"
        self.batch_size: int | None = message.get("batch_size")
        self.seconds: float = message.get("seconds", 0.0)
        """The fastest pass of its search for a batch size."""
        self.peak_mb = 0.0
        """Largest resident memory of the process after its last pass."""

    def build_workload(self, kind: str, num_pairs: int) -> Callable[[], float]:
        """Returns a workload that ranks all pairs once; its rate is pairs per second."""

        def workload() -> float:
            self._send(kind)
            message = self._receive()
            self.peak_mb = float(message["peak_mb"])
            return num_pairs / float(message["seconds"])

        return workload

    def predict(self) -> np.ndarray:
        """Returns the score of each pair, shape [pairs]."""
        self._send("scores")
        return np.array(self._receive()["scores"])

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        message = self._read_message()
        if message is None:
            sys.exit(
                f"a baseline ended with exit code {self.process.wait()}; its error is printed above"
            )
        return message

    def _read_message(self) -> dict[str, Any] | None:
        """Returns the next message; None if the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("as2ray-peer "):
                message: dict[str, Any] = json.loads(line.removeprefix("as2ray-peer "))
                return message
        return None


def group_by_question(rows: pa.Table) -> list[tuple[str, list[str]]]:
    """Returns each question with its candidates, in order."""
    starts = question_offsets(rows["question_id"])
    ends = [*starts[1:], rows.num_rows]
    questions, texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    return [(questions[start], texts[start:end]) for start, end in zip(starts, ends)]
