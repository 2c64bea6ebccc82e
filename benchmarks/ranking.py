"""Ranking: pairs a second of our packed ranker and cascade, and of sentence-transformers' backends.

Knows our rankers and a peer's process. Must not know Ray: all sides run on this machine alone.

All sides rank the same real sentences by the same weights: questions of SQuAD's dev part with 400
and with 100 sentences of the article. Peers run in processes of their own and wait while others
are measured; `--peers` names the Python of an environment with
`sentence-transformers[onnx,openvino]`, which cannot share ours; without it their default and their
bf16 are measured alone. A cascade is another training of the same encoder (`--cascade`), and its
MAP is compared with itself undropped.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from as2ray.cascade.cost import EncoderShape, count_flops
from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.corpora.preparation import read_split
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.significance import compare_systems
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.ranker import Ranker, resolve_dtype
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import question_indices, question_offsets
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, select_cores, write_report

PEER_BACKENDS = {
    "default": ("torch", {}),
    "bf16": ("torch", {"dtype": "bfloat16"}),
    "ONNX": ("onnx", {}),
    "OpenVINO": ("openvino", {}),
}
"""Backend and keywords of each side of sentence-transformers; the last two need `--peers`."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    num_questions: dict[int, int]
    """Questions of a pass, by candidates of each."""
    num_repeats: int
    num_quality_questions: int
    """Questions on which the cascade's MAP is compared."""


FULL = Size({400: 4, 100: 12}, 5, 150)
SMALL = Size({8: 2}, 1, 6)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    table = load_squad_table(args.data, args.small)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-ranking-") as folder:
        model = export_cross_encoder(
            init_ranker(args.ranker or packaged_minilm()), Path(folder) / "model"
        )
        ours = {"packed": load(model, device="cpu")}
        if args.cascade:
            ours["cascade"] = load(args.cascade, device="cpu")
        for candidates, questions in size.num_questions.items():
            rows = select_questions(table, candidates, questions)
            for kind, compared in _compare(ours, model, rows, args, size.num_repeats).items():
                results[f"{candidates} candidates, from {kind}"] = {
                    name: {peer: ratio.as_json() for peer, ratio in of.items()}
                    for name, of in compared.items()
                }
                claims += _build_claims(f"{candidates} candidates, from {kind}", compared)
            if candidates == max(size.num_questions):
                part = _measure_gemm_share(ours["packed"], rows, size.num_repeats)
                results["part of the GEMM rate"] = part
                told = f"{part['model']:,.0f} of {part['gemm']:,.0f} GFLOP/s: {part['part']:.0%}"
                claims.append(Claim("packed reaches >= 60 % of GEMM", told, part["part"] >= 0.6))
        if args.cascade:
            judged = select_questions(table, max(size.num_questions), size.num_quality_questions)
            claims.append(_measure_quality(ours["cascade"], judged, results))
    write_report("ranking", args, claims, results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranker", type=Path, help="pointwise checkpoint; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")
    parser.add_argument("--peers", type=Path, help="Python with sentence-transformers' backends")


def load_squad_table(data_root: Path, small: bool) -> pa.Table:
    """SQuAD's dev part with whole articles; in a small run made-up words."""
    if small:
        with TemporaryDirectory() as folder:
            return ParquetTable.open(
                asnq_shaped.write_corpus(Path(folder) / "made-up", 4_000, None)
            ).to_table()
    try:
        return read_split("squad", "dev", data_root / "squad", candidates="article")
    except RawFileNotFoundError as error:
        sys.exit(f"skipped: needs the release of SQuAD under --data\n{error}")


def select_questions(table: pa.Table, num_candidates: int, num_questions: int) -> pa.Table:
    """So many questions with so many candidates, an answer among them wherever there is one."""
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    enough = np.flatnonzero(sizes >= num_candidates)
    # Spread over the articles: a question of each in turn.
    chosen = enough[np.linspace(0, len(enough) - 1, num_questions).astype(int)]
    label = table["label"].to_numpy()
    rows = []
    for start, size in zip(starts[chosen], sizes[chosen]):
        own = np.arange(start, start + size)
        best_first = own[np.argsort(-label[own], kind="stable")]
        rows.append(np.sort(best_first[:num_candidates]))
    return table.take(pa.array(np.concatenate(rows)))


def _compare(
    rankers: dict[str, Ranker],
    model_path: Path,
    rows: pa.Table,
    args: argparse.Namespace,
    num_repeats: int,
) -> dict[str, dict[str, dict[str, SpeedRatio]]]:
    """From text and from tokens, for each side of ours and each peer how many times as fast ours
    is."""
    names = [name for name in PEER_BACKENDS if args.peers or PEER_BACKENDS[name][0] == "torch"]
    peers = {name: _PeerProcess(name, model_path, rows, args) for name in names}
    found = {}
    try:
        for kind in ("text", "tokens"):
            sides = {
                name: _build_ranker_workload(ranker, rows, kind) for name, ranker in rankers.items()
            }
            sides |= {
                name: peer.build_workload(kind, rows.num_rows) for name, peer in peers.items()
            }
            first, *others = sides.values()
            ratios = measure_alternately(first, others, num_repeats)
            rates = dict(zip(sides, [ratios[0].rates, *(ratio.baseline_rates for ratio in ratios)]))
            found[kind] = {
                name: {peer: SpeedRatio(rates[name], rates[peer]) for peer in peers}
                for name in rankers
            }
    finally:
        for peer in peers.values():
            peer.close()
    return found


def _build_ranker_workload(ranker: Ranker, rows: pa.Table, kind: str) -> Callable[[], float]:
    """Our side: whole questions, from text or from tokens, to scores."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, encoded = question_indices(rows), ranker.tokenizer.encode(*texts)

    def side() -> float:
        began = time.perf_counter()
        if kind == "text":
            ranker.predict_pairs(*texts, question)
        else:
            ranker.predict_sequences(encoded, question)
        return rows.num_rows / (time.perf_counter() - began)

    return side


class _PeerProcess:
    """A process with one of sentence-transformers' backends, told to pass over the text."""

    def __init__(
        self, name: str, model_path: Path, rows: pa.Table, args: argparse.Namespace
    ) -> None:
        backend, keywords = PEER_BACKENDS[name]
        python = sys.executable if backend == "torch" else str(args.peers)
        script = Path(__file__).with_name("ranking_peer.py")
        self.process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
                }
            )
        )
        self._receive()

    def build_workload(self, kind: str, num_pairs: int) -> Callable[[], float]:
        """Pairs a second of a pass."""

        def measure() -> float:
            self._send(kind)
            return num_pairs / float(self._receive()["seconds"])

        return measure

    def close(self) -> None:
        """Lets the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("as2ray-peer "):
                found: dict[str, Any] = json.loads(line.removeprefix("as2ray-peer "))
                return found
        sys.exit(f"a peer ended with {self.process.wait()}; its error stands above")


def group_by_question(rows: pa.Table) -> list[tuple[str, list[str]]]:
    """Each question with its candidates, in order."""
    starts = question_offsets(rows["question_id"])
    ends = [*starts[1:], rows.num_rows]
    questions, texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    return [(questions[start], texts[start:end]) for start, end in zip(starts, ends)]


def _build_claims(setting: str, ratios: dict[str, dict[str, SpeedRatio]]) -> list[Claim]:
    claims = []
    for name, least, beats in (("packed", 4.0, 1.0), ("cascade", 10.0, 2.5)):
        if name not in ratios:
            continue
        default = ratios[name]["default"]
        rate = float(np.median(default.rates))
        told = f"{name}, {setting} ({rate:,.0f} pairs/s)"
        claims.append(
            Claim(f"{told}: >= {least:g} x default", str(default), default.median >= least)
        )
        best = min(ratios[name], key=lambda peer: ratios[name][peer].median)
        ratio = ratios[name][best]
        claims.append(
            Claim(f"{told}: >= {beats:g} x best ({best})", str(ratio), ratio.median >= beats)
        )
    return claims


def _measure_gemm_share(ranker: Ranker, rows: pa.Table, num_repeats: int) -> dict[str, float]:
    """GFLOP/s of the packed forward pass and of one large product, and their ratio."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    encoded, question = ranker.tokenizer.encode(*texts), question_indices(rows)
    shape = EncoderShape.from_config(ranker.network.config)
    work = count_flops(
        shape, [shape.num_layers], [encoded.lengths.astype(np.float64)], sequential=True
    )
    dtype = resolve_dtype(ranker.dtype)
    left = torch.randn(ranker.max_batch_tokens, shape.hidden_size).to(dtype)
    right = torch.randn(shape.intermediate_size, shape.hidden_size).to(dtype)

    def forward() -> float:
        began = time.perf_counter()
        ranker.predict_sequences(encoded, question)
        return work / (time.perf_counter() - began) / 1e9

    def gemm() -> float:
        began = time.perf_counter()
        for _ in range(20):
            functional.linear(left, right)
        return 20 * 2 * left.numel() * len(right) / (time.perf_counter() - began) / 1e9

    (ratio,) = measure_alternately(forward, [gemm], num_repeats)
    rates = {"model": float(np.median(ratio.rates)), "gemm": float(np.median(ratio.baseline_rates))}
    return {**rates, "part": ratio.median}


def _measure_quality(ranker: Ranker, rows: pa.Table, results: dict[str, Any]) -> Claim:
    """The cascade's MAP with its drop ratios against itself with nothing dropped, paired."""
    assert isinstance(ranker, MultiStageRanker)
    measured = [
        evaluate(rows, ranker.predict_table(rows, drop).sort_keys, ["AP"], question_filter="clean")
        for drop in (0.0, None)
    ]
    test = compare_systems(measured[0].per_question, measured[1].per_question, "AP")
    low, high = test.interval
    results["quality"] = {
        "questions": measured[0].counts.num_questions,
        "undropped": measured[0].measures["AP"],
        "dropped": measured[1].measures["AP"],
        "drop": ranker.drop_ratios,
        "exits": list(ranker.exit_layers),
        "p": test.p_randomization,
    }
    told = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}], p {test.p_randomization:.3f}"
    return Claim("cascade loses <= 0.005 MAP", told, test.difference >= -0.005)


if __name__ == "__main__":
    main()
