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

from as2ray import checkpoint, corpora
from as2ray.adapters.sentence_transformers import export
from as2ray.corpora.files import SourceMissingError
from as2ray.evaluation.cost import Shape, operations
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.evaluation.significance import compare
from as2ray.models.ranker import Ranker, resolve_precision
from as2ray.models.staged import StagedRanker
from as2ray.packaged import minilm
from as2ray.records import question_numbers, question_starts
from as2ray.text.files import PairFiles
from benchmarks import asnq_shaped
from benchmarks.report import Claim, arguments, finish, held_cores, hold_to_cores

PEERS = {
    "default": ("torch", {}),
    "bf16": ("torch", {"dtype": "bfloat16"}),
    "ONNX": ("onnx", {}),
    "OpenVINO": ("openvino", {}),
}
"""Backend and keywords of each side of sentence-transformers; the last two need `--peers`."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    questions: dict[int, int]
    """Questions of a pass, by candidates of each."""
    repeats: int
    judged: int
    """Questions on which the cascade's MAP is compared."""


FULL = Size({400: 4, 100: 12}, 5, 150)
SMALL = Size({8: 2}, 1, 6)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv, _more)
    size = SMALL if args.small else FULL
    hold_to_cores(args.cores)
    table = squad_table(args.data, args.small)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-ranking-") as folder:
        model = export(checkpoint.start(args.ranker or minilm()), Path(folder) / "model")
        ours = {"packed": checkpoint.load(model, device="cpu")}
        if args.cascade:
            ours["cascade"] = checkpoint.load(args.cascade, device="cpu")
        for candidates, questions in size.questions.items():
            rows = questions_of(table, candidates, questions)
            for kind, compared in _compare(ours, model, rows, args, size.repeats).items():
                results[f"{candidates} candidates, from {kind}"] = {
                    name: {peer: ratio.as_json() for peer, ratio in of.items()}
                    for name, of in compared.items()
                }
                claims += _claims(f"{candidates} candidates, from {kind}", compared)
            if candidates == max(size.questions):
                part = _part_of_gemm(ours["packed"], rows, size.repeats)
                results["part of the GEMM rate"] = part
                told = f"{part['model']:,.0f} of {part['gemm']:,.0f} GFLOP/s: {part['part']:.0%}"
                claims.append(Claim("packed reaches >= 60 % of GEMM", told, part["part"] >= 0.6))
        if args.cascade:
            judged = questions_of(table, max(size.questions), size.judged)
            claims.append(_quality(ours["cascade"], judged, results))
    finish("ranking", args, claims, results)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranker", type=Path, help="pointwise checkpoint; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")
    parser.add_argument("--peers", type=Path, help="Python with sentence-transformers' backends")


def squad_table(data: Path, small: bool) -> pa.Table:
    """SQuAD's dev part with whole articles; in a small run made-up words."""
    if small:
        with TemporaryDirectory() as folder:
            return PairFiles.find(asnq_shaped.write(Path(folder) / "made-up", 4_000, None)).table()
    try:
        return corpora.read("squad", "dev", data / "squad", candidates="article")
    except SourceMissingError as error:
        sys.exit(f"skipped: needs the release of SQuAD under --data\n{error}")


def questions_of(table: pa.Table, candidates: int, questions: int) -> pa.Table:
    """So many questions with so many candidates, an answer among them wherever there is one."""
    starts = question_starts(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    enough = np.flatnonzero(sizes >= candidates)
    # Spread over the articles: a question of each in turn.
    chosen = enough[np.linspace(0, len(enough) - 1, questions).astype(int)]
    label = table["label"].to_numpy()
    rows = []
    for start, size in zip(starts[chosen], sizes[chosen]):
        own = np.arange(start, start + size)
        best_first = own[np.argsort(-label[own], kind="stable")]
        rows.append(np.sort(best_first[:candidates]))
    return table.take(pa.array(np.concatenate(rows)))


def _compare(
    ours: dict[str, Ranker],
    model: Path,
    rows: pa.Table,
    args: argparse.Namespace,
    repeats: int,
) -> dict[str, dict[str, dict[str, Ratio]]]:
    """From text and from tokens, for each side of ours and each peer how many times as fast ours
    is."""
    names = [name for name in PEERS if args.peers or PEERS[name][0] == "torch"]
    peers = {name: _Peer(name, model, rows, args) for name in names}
    found = {}
    try:
        for kind in ("text", "tokens"):
            sides = {name: _ours(ranker, rows, kind) for name, ranker in ours.items()}
            sides |= {name: peer.side(kind, rows.num_rows) for name, peer in peers.items()}
            first, *others = sides.values()
            ratios = alternate(first, others, repeats)
            rates = dict(zip(sides, [ratios[0].ours, *(ratio.theirs for ratio in ratios)]))
            found[kind] = {
                name: {peer: Ratio(rates[name], rates[peer]) for peer in peers} for name in ours
            }
    finally:
        for peer in peers.values():
            peer.end()
    return found


def _ours(ranker: Ranker, rows: pa.Table, kind: str) -> Callable[[], float]:
    """Our side: whole questions, from text or from tokens, to scores."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, encoded = question_numbers(rows), ranker.tokenizer.encode(*texts)

    def side() -> float:
        began = time.perf_counter()
        if kind == "text":
            ranker.score_pairs(*texts, question)
        else:
            ranker.score_sequences(encoded, question)
        return rows.num_rows / (time.perf_counter() - began)

    return side


class _Peer:
    """A process with one of sentence-transformers' backends, told to pass over the text."""

    def __init__(self, name: str, model: Path, rows: pa.Table, args: argparse.Namespace) -> None:
        backend, keywords = PEERS[name]
        python = sys.executable if backend == "torch" else str(args.peers)
        script = Path(__file__).with_name("ranking_peer.py")
        self.process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(
            json.dumps(
                {
                    "model": str(model),
                    "max_length": 128,
                    "backend": backend,
                    "model_kwargs": keywords,
                    "cores": held_cores(args.cores),
                    "questions": by_question(rows),
                }
            )
        )
        self._hear()

    def side(self, kind: str, pairs: int) -> Callable[[], float]:
        """Pairs a second of a pass."""

        def measure() -> float:
            self._say(kind)
            return pairs / float(self._hear()["seconds"])

        return measure

    def end(self) -> None:
        """Lets the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("as2ray-peer "):
                found: dict[str, Any] = json.loads(line.removeprefix("as2ray-peer "))
                return found
        sys.exit(f"a peer ended with {self.process.wait()}; its error stands above")


def by_question(rows: pa.Table) -> list[tuple[str, list[str]]]:
    """Each question with its candidates, in order."""
    starts = question_starts(rows["question_id"])
    ends = [*starts[1:], rows.num_rows]
    questions, texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    return [(questions[start], texts[start:end]) for start, end in zip(starts, ends)]


def _claims(where: str, compared: dict[str, dict[str, Ratio]]) -> list[Claim]:
    claims = []
    for name, least, beats in (("packed", 4.0, 1.0), ("cascade", 10.0, 2.5)):
        if name not in compared:
            continue
        default = compared[name]["default"]
        rate = float(np.median(default.ours))
        told = f"{name}, {where} ({rate:,.0f} pairs/s)"
        claims.append(
            Claim(f"{told}: >= {least:g} x default", str(default), default.median >= least)
        )
        best = min(compared[name], key=lambda peer: compared[name][peer].median)
        ratio = compared[name][best]
        claims.append(
            Claim(f"{told}: >= {beats:g} x best ({best})", str(ratio), ratio.median >= beats)
        )
    return claims


def _part_of_gemm(ranker: Ranker, rows: pa.Table, repeats: int) -> dict[str, float]:
    """GFLOP/s of the packed forward pass and of one large product, and their ratio."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    encoded, question = ranker.tokenizer.encode(*texts), question_numbers(rows)
    shape = Shape.of(ranker.network.config)
    work = operations(shape, [shape.layers], [encoded.lengths.astype(np.float64)], sequential=True)
    dtype = resolve_precision(ranker.precision)
    left = torch.randn(ranker.max_tokens, shape.hidden).to(dtype)
    right = torch.randn(shape.intermediate, shape.hidden).to(dtype)

    def forward() -> float:
        began = time.perf_counter()
        ranker.score_sequences(encoded, question)
        return work / (time.perf_counter() - began) / 1e9

    def gemm() -> float:
        began = time.perf_counter()
        for _ in range(20):
            functional.linear(left, right)
        return 20 * 2 * left.numel() * len(right) / (time.perf_counter() - began) / 1e9

    (ratio,) = alternate(forward, [gemm], repeats)
    rates = {"model": float(np.median(ratio.ours)), "gemm": float(np.median(ratio.theirs))}
    return {**rates, "part": ratio.median}


def _quality(ranker: Ranker, rows: pa.Table, results: dict[str, Any]) -> Claim:
    """The cascade's MAP with its drop ratios against itself with nothing dropped, paired."""
    assert isinstance(ranker, StagedRanker)
    measured = [
        evaluate(rows, ranker.score_table(rows, drop).rank_by, ["AP"], filter="clean")
        for drop in (0.0, None)
    ]
    test = compare(measured[0].per_question, measured[1].per_question, "AP")
    low, high = test.interval
    results["quality"] = {
        "questions": measured[0].counts.questions,
        "undropped": measured[0].measures["AP"],
        "dropped": measured[1].measures["AP"],
        "drop": ranker.drop,
        "exits": list(ranker.exits),
        "p": test.p_randomisation,
    }
    told = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}], p {test.p_randomisation:.3f}"
    return Claim("cascade loses <= 0.005 MAP", told, test.difference >= -0.005)


if __name__ == "__main__":
    main()
