"""Compares ranking with sentence-transformers' backends, in pairs per second.

All sides rank the same sentences with the same weights: questions of SQuAD's dev part with 400 and
with 100 sentences of the article. The baselines run in their own processes and wait while others
are measured. `--peers` names the Python of another environment for the baselines that need more:
`sentence-transformers[onnx,openvino]`, which conflicts with as2ray's environment, for its backends,
and the packages of as2ray's extra `peers` for networks in int8 (OpenVINO by NNCF, ONNX Runtime).
What is not installed is not measured. Each baseline but the default has the best of several batch
sizes. A cascade is the same encoder trained with exits (`--cascade`);
its MAP is compared with its own MAP when nothing is dropped. A small model is a rival of a cascade:
`--compare`, once or several times, names one that was trained on the same data, such as the
ranker's first layers, and the cascade's rate and MAP are compared with its.

`--family NAME`, once or several times, compares families of encoders instead: random weights of the
real shapes (XLM-R base, ModernBERT base, DeBERTa-v3 small and others), texts of WikiQA, 64
candidates for each question, the tokenizer of MiniLM, in bf16, from text. Each baseline ranks half
of a question's candidates once for each batch size, and only those near the fastest are measured
further. A decoder is compared with itself without shared prefixes instead, in CPU time, because
sentence-transformers cannot run it with this tokenizer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from as2ray.cascade.cost import EncoderShape, count_flops
from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.corpora.preparation import read_split
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.significance import compare_systems
from as2ray.models.encoder.encoder import set_depth
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from as2ray.models.precision import has_int8, resolve_dtype
from as2ray.models.quantization import MIN_PAIRS, fit_activation_ranges
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.filters import filter_table
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import question_indices, question_offsets
from as2ray.text.packing import TokenSequences
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, select_cores, write_report
from benchmarks.wikiqa_candidates import load_wikiqa_table, sample_candidates

PEER_BACKENDS = {
    "default": ("torch", {}),
    "bf16": ("torch", {"dtype": "bfloat16"}),
    "ONNX": ("onnx", {}),
    "OpenVINO": ("openvino", {}),
    "ONNX int8": ("onnx_int8", {}),
    "OpenVINO int8": ("openvino_int8", {}),
}
"""Backend and keyword arguments of each baseline."""

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


FAMILY_SEARCH = BatchSizeSearch((8, 32), 1, 32)
FAMILY_CANDIDATES = 64
"""Candidates of each question, in a comparison of families."""
FAMILY_REPEATS = 3

MAX_SLOWDOWN = 1.3
"""A family's baseline that takes this many times as long as the fastest is measured no further."""

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "xlm-roberta": {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1},
    "distilbert": {},
    "modernbert": {"local_attention": 128},
    "gte": {},
    "nomic_bert": {},
    "deberta-v2": {
        "vocab_size": 128_100,
        "num_hidden_layers": 6,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3_072,
    },
    "qwen3": {
        "hidden_size": 1_024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3_072,
        "tie_word_embeddings": True,
    },
}
"""Settings of the real shapes that are not transformers' defaults; DeBERTa's is v3 small, Qwen3's
Qwen3-Reranker-0.6B."""

SMALL_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 30_522,
}

MIN_FAMILY_RATIO = 2.5
"""Claimed ratio to the fastest peer of a family, at WikiQA's lengths."""


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    num_questions: dict[int, int]
    """Questions per pass, by the number of candidates of each."""
    num_repeats: int
    num_quality_questions: int
    """Questions on which the cascade's MAP is compared; with 0 no MAP is computed."""
    kinds: tuple[str, ...] = ("text", "tokens")
    """What is ranked."""


FULL = Size({400: 4, 100: 12}, 5, 150)
BRIEF = Size({400: 4}, 3, 0, ("text",))
SMALL = Size({8: 2}, 1, 6)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = SMALL if args.small else BRIEF if args.brief else FULL
    limit_cores(args.cores)
    if args.family:
        write_report("ranking", args, *_compare_families(args, size))
        return
    table = load_squad_table(args.data, args.small)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-ranking-") as folder:
        model = export_cross_encoder(
            init_ranker(args.ranker or packaged_minilm()), Path(folder) / "model"
        )
        rankers = {"packed": as_packed_ranker(load(model, device="cpu"))}
        rankers["packed fp32"] = as_packed_ranker(load(model, dtype="fp32", device="cpu"))
        if args.cascade:
            rankers["cascade"] = as_packed_ranker(load(args.cascade, device="cpu"))
            rankers["cascade"].activation_ranges = ()
        smaller = {path.name: as_packed_ranker(load(path, device="cpu")) for path in args.compare}
        for ranker in smaller.values():
            ranker.activation_ranges = ()
        if has_int8():
            paths = {"packed": model, "cascade": args.cascade}
            for name in [name for name in rankers if name in paths]:
                fitted_on = table.slice(0, MIN_PAIRS) if args.small else table
                rankers[f"{name} int8"] = _load_int8(paths[name], fitted_on)
        rankers |= smaller
        for candidates, questions in size.num_questions.items():
            rows = select_questions(table, candidates, questions)
            for kind, ratios in _compare(rankers, model, rows, args, size).items():
                results[f"{candidates} candidates, from {kind}"] = {
                    name: {peer: ratio.as_json() for peer, ratio in ratios_by_peer.items()}
                    for name, ratios_by_peer in ratios.items()
                }
                setting = f"{candidates} candidates, from {kind}"
                claims += _build_claims(setting, ratios)
                for name in [name for name in smaller if args.cascade]:
                    rate = f"cascade, {setting}: times the rate of {name}"
                    claims.append(Claim(rate, str(ratios["cascade"][name]), None))
            if candidates == max(size.num_questions):
                gemm = _measure_gemm_share(rankers["packed"], rows, size.num_repeats)
                results["part of the GEMM rate"] = gemm
                measured = (
                    f"{gemm['model']:,.0f} of {gemm['gemm']:,.0f} GFLOP/s: {gemm['part']:.0%}"
                )
                claims.append(
                    Claim("packed reaches >= 60 % of GEMM", measured, gemm["part"] >= 0.6)
                )
        if size.num_quality_questions:
            claims += _compare_quality(rankers, model, args, results)
        if args.cascade and size.num_quality_questions:
            quality_rows = select_questions(
                table, max(size.num_questions), size.num_quality_questions
            )
            claims.append(_measure_quality(rankers["cascade"], quality_rows, results))
            for name, ranker in smaller.items():
                claims.append(_compare_map(rankers["cascade"], name, ranker, quality_rows, results))
    write_report("ranking", args, claims, results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranker", type=Path, help="pointwise checkpoint; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")
    parser.add_argument(
        "--family", action="append", choices=FAMILY_SHAPES, help="family with random weights"
    )
    parser.add_argument(
        "--compare", type=Path, action="append", default=[], help="checkpoint of a smaller model"
    )
    parser.add_argument("--brief", action="store_true", help="four questions, from text, no MAP")
    parser.add_argument("--questions", type=int, default=1, help="with --family: questions")
    parser.add_argument(
        "--candidates", type=int, default=FAMILY_CANDIDATES, help="with --family: of each question"
    )
    parser.add_argument("--layers", type=int, help="with --family: layers; by default all")
    parser.add_argument(
        "--repeats", type=int, default=FAMILY_REPEATS, help="with --family: passes of each side"
    )
    parser.add_argument("--backends", nargs="*", help="peers' backends; by default all there are")
    parser.add_argument("--without_peers", action="store_true", help="compare as2ray's own alone")
    parser.add_argument("--peers", type=Path, help="Python with sentence-transformers' backends")


def _compare_families(args: argparse.Namespace, size: Size) -> tuple[list[Claim], dict[str, Any]]:
    """Compares a random ranker of each family with sentence-transformers."""
    num_questions, num_candidates = (1, 8) if args.small else (args.questions, args.candidates)
    size = replace(size, num_repeats=1 if args.small else args.repeats, kinds=("text",))
    table = load_wikiqa_table(args.data, args.small)
    rows = sample_candidates(table, num_questions, num_candidates)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    for family in args.family:
        with TemporaryDirectory(prefix="as2ray-ranking-") as folder:
            model = _write_random_ranker(family, Path(folder) / "model", args.small, args.layers)
            ranker = as_packed_ranker(load(model, device="cpu", dtype="bf16"))
            if ranker.tokenizer.prompt:
                claims.append(
                    _compare_shared_prefixes(family, ranker, rows, size.num_repeats, results)
                )
                continue
            compared = _compare({"packed": ranker}, model, rows, args, size, FAMILY_SEARCH)
        for kind, ratios in compared.items():
            best = min(ratios["packed"], key=lambda peer: ratios["packed"][peer].median)
            ratio = ratios["packed"][best]
            rate = float(np.median(ratio.rates))
            claims.append(
                Claim(
                    f"{family}, from {kind} ({rate:,.0f} pairs/s): >= {MIN_FAMILY_RATIO:g} x best "
                    f"({best})",
                    str(ratio),
                    ratio.median >= MIN_FAMILY_RATIO,
                )
            )
            results[f"{family}, from {kind}"] = {
                peer: ratio.as_json() for peer, ratio in ratios["packed"].items()
            }
    return claims, results


def _compare_shared_prefixes(
    family: str, ranker: PackedRanker, rows: pa.Table, num_repeats: int, results: dict[str, Any]
) -> Claim:
    """Compares a decoder with itself, where each pair repeats the prefix of its question."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, shared = question_indices(rows), ranker.tokenizer.encode(*texts)
    prefixes = shared.prefixes
    assert prefixes is not None

    def build_workload(sequences: TokenSequences) -> Callable[[], float]:
        def workload() -> float:
            started_at = time.process_time()  # of all threads
            ranker.predict_sequences(sequences, question)
            return rows.num_rows / (time.process_time() - started_at)

        return workload

    workloads = [build_workload(part) for part in (shared, replace(shared, prefixes=None))]
    [ratio] = measure_alternately(workloads[0], workloads[1:], num_repeats)
    tokens = int(prefixes.lengths[prefixes.index].sum()) / int(shared.lengths.sum())
    results[f"{family}, prefixes once per question"] = {
        **ratio.as_json(),
        "share of prefix tokens": tokens,
    }
    rate = float(np.median(ratio.rates))
    name = (
        f"{family} ({rate:,.1f} pairs per CPU second): prefixes ({tokens:.0%} of the tokens) once"
    )
    return Claim(f"{name}: > 1 x whole prompts", str(ratio), ratio.median > 1)


def _write_random_ranker(
    family: str, folder: Path, small: bool, num_layers: int | None = None
) -> Path:
    """Writes a classifier with random weights of the real shape, and MiniLM's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    shape = {**FAMILY_SHAPES[family], **(SMALL_SHAPE if small else {})}
    if family == "distilbert" and small:
        shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    if family == "qwen3" and small:
        shape |= {"num_key_value_heads": 1, "head_dim": 16}
    if family == "modernbert":
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        shape |= dict.fromkeys(("bos_token_id", "cls_token_id"), first)
        shape |= dict.fromkeys(("eos_token_id", "sep_token_id"), last)
    config = AutoConfig.for_model(
        family, num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape
    )
    if num_layers is not None:
        set_depth(config, num_layers)
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config)
    network.save_pretrained(folder)
    if getattr(config, "type_vocab_size", 0) < 2:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    tokenizer.save_pretrained(folder)
    return folder


def load_squad_table(data_root: Path, small: bool) -> pa.Table:
    """Loads SQuAD's dev part with whole articles; a small run has made-up words."""
    if small:
        with TemporaryDirectory() as folder:
            return ParquetTable.open(
                asnq_shaped.write_corpus(Path(folder) / "made-up", 4_000, None)
            ).to_table()
    try:
        return read_split("squad", "dev", data_root / "squad", candidate_scope="article")
    except RawFileNotFoundError as error:
        sys.exit(f"skipped: needs the release of SQuAD under --data\n{error}")


def select_questions(table: pa.Table, num_candidates: int, num_questions: int) -> pa.Table:
    """Selects questions with exactly `num_candidates` candidates, which include their answers."""
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    enough = np.flatnonzero(sizes >= num_candidates)
    # Spread evenly over the articles.
    chosen = enough[np.linspace(0, len(enough) - 1, num_questions).astype(int)]
    label = table["label"].to_numpy()
    rows = []
    for start, size in zip(starts[chosen], sizes[chosen]):
        question_rows = np.arange(start, start + size)
        best_first = question_rows[np.argsort(-label[question_rows], kind="stable")]
        rows.append(np.sort(best_first[:num_candidates]))
    return table.take(pa.array(np.concatenate(rows)))


def _compare(
    rankers: dict[str, PackedRanker],
    model_path: Path,
    rows: pa.Table,
    args: argparse.Namespace,
    size: Size,
    search: BatchSizeSearch = BatchSizeSearch(),
) -> dict[str, dict[str, dict[str, SpeedRatio]]]:
    """Returns the ratio of each ranker to each baseline, from text and from tokens."""
    names = [x for x in PEER_BACKENDS if x not in INT8_PEERS or search is not FAMILY_SEARCH]
    peers = _start_peers(model_path, rows, args, names, search)
    if search is FAMILY_SEARCH:
        peers = _keep_fastest(peers)
    if len(peers) + len(rankers) == 1:
        sys.exit("there is nothing to compare with: no baseline is installed or chosen")
    results = {}
    try:
        for kind in size.kinds:
            workloads = {
                name: _build_ranker_workload(ranker, rows, kind) for name, ranker in rankers.items()
            }
            workloads |= {
                name: peer.build_workload(kind, rows.num_rows) for name, peer in peers.items()
            }
            first, *others = workloads.values()
            ratios = measure_alternately(first, others, size.num_repeats)
            rates = dict(
                zip(workloads, [ratios[0].rates, *(ratio.baseline_rates for ratio in ratios)])
            )
            results[kind] = {
                name: {
                    other: SpeedRatio(rates[name], rates[other])
                    for other in (*peers, *rankers)
                    if other != name
                }
                for name in rankers
            }
        for name, peer in peers.items():
            print(f"{name}: batch size {peer.batch_size}, peak memory {peer.peak_mb:,.0f} MB")
    finally:
        for peer in peers.values():
            peer.close()
    return results


def _build_ranker_workload(ranker: PackedRanker, rows: pa.Table, kind: str) -> Callable[[], float]:
    """Returns a workload that scores whole questions, from text or from tokens."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, encoded = question_indices(rows), ranker.tokenizer.encode(*texts)

    def workload() -> float:
        started_at = time.perf_counter()
        if kind == "text":
            ranker.predict_pairs(*texts, question)
        else:
            ranker.predict_sequences(encoded, question)
        return rows.num_rows / (time.perf_counter() - started_at)

    return workload


def _start_peers(
    model_path: Path,
    rows: pa.Table,
    args: argparse.Namespace,
    names: Sequence[str],
    search: BatchSizeSearch = BatchSizeSearch(),
) -> dict[str, "_PeerProcess"]:
    """Starts the baselines whose packages are there."""
    if args.without_peers:
        return {}
    names = [x for x in names if args.backends is None or x in args.backends]
    peers = {name: _PeerProcess(name, model_path, rows, args, search) for name in names}
    for name, peer in peers.items():
        if peer.problem:
            peer.close()
            print(f"{name} is not measured: {peer.problem}")
    return {name: peer for name, peer in peers.items() if not peer.problem}


def _keep_fastest(peers: dict[str, "_PeerProcess"]) -> dict[str, "_PeerProcess"]:
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


class _PeerProcess:
    """A process that ranks with another library whenever it is asked to."""

    def __init__(
        self,
        name: str,
        model_path: Path,
        rows: pa.Table,
        args: argparse.Namespace,
        search: BatchSizeSearch,
    ) -> None:
        backend, keywords = PEER_BACKENDS[name]
        python = sys.executable if backend == "torch" else str(args.peers or sys.executable)
        takes_default = name == "default" or args.small
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


def _load_int8(path: Path, table: pa.Table) -> PackedRanker:
    """Loads a ranker that ranks in int8, with ranges fitted to the table if it has none."""
    ranker = as_packed_ranker(load(path, device="cpu"))
    if not ranker.activation_ranges:
        fit_activation_ranges(ranker, table)
    ranker.dtype = "int8"
    return ranker


def _build_claims(setting: str, ratios: dict[str, dict[str, SpeedRatio]]) -> list[Claim]:
    claims = []
    for name, peer, goal in (
        ("packed int8", "OpenVINO int8", 1.2),
        ("cascade int8", "OpenVINO int8", 3.0),
        ("cascade int8", "default", 16.0),
    ):
        if peer in ratios.get(name, {}):
            ratio = ratios[name][peer]
            claim = f"{name}, {setting}: >= {goal:g} x {peer}"
            claims.append(Claim(claim, str(ratio), ratio.median >= goal))
    for name in ("packed", "cascade"):
        if f"{name} int8" in ratios:
            ratio = ratios[f"{name} int8"][name]
            rate = float(np.median(ratio.rates))
            claim = f"{name} int8, {setting} ({rate:,.0f} pairs/s): >= 1.3 x {name}"
            claims.append(Claim(claim, str(ratio), ratio.median >= 1.3))
    for name, min_to_default, min_to_best in (("packed", 4.0, 1.0), ("cascade", 10.0, 2.5)):
        if name not in ratios or "default" not in ratios[name]:
            continue
        default = ratios[name]["default"]
        rate = float(np.median(default.rates))
        ranker = f"{name}, {setting} ({rate:,.0f} pairs/s)"
        claims.append(
            Claim(
                f"{ranker}: >= {min_to_default:g} x default",
                str(default),
                default.median >= min_to_default,
            )
        )
        peers = [peer for peer in ratios[name] if peer in PEER_BACKENDS and peer not in INT8_PEERS]
        best = min(peers, key=lambda peer: ratios[name][peer].median)
        ratio = ratios[name][best]
        claims.append(
            Claim(
                f"{ranker}: >= {min_to_best:g} x best ({best})",
                str(ratio),
                ratio.median >= min_to_best,
            )
        )
    return claims


def _measure_gemm_share(ranker: PackedRanker, rows: pa.Table, num_repeats: int) -> dict[str, float]:
    """Returns the GFLOP/s of the packed forward pass and of one large product, and their ratio."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    encoded, question = ranker.tokenizer.encode(*texts), question_indices(rows)
    shape = EncoderShape.from_config(ranker.network.config)
    num_flops = count_flops(
        shape, [shape.num_layers], [encoded.lengths.astype(np.float64)], sequential=True
    )
    dtype = resolve_dtype(ranker.dtype)
    left = torch.randn(ranker.max_batch_tokens, shape.hidden_size).to(dtype)
    right = torch.randn(shape.intermediate_size, shape.hidden_size).to(dtype)

    def forward() -> float:
        started_at = time.perf_counter()
        ranker.predict_sequences(encoded, question)
        return num_flops / (time.perf_counter() - started_at) / 1e9

    def gemm() -> float:
        started_at = time.perf_counter()
        for _ in range(20):
            functional.linear(left, right)
        return 20 * 2 * left.numel() * len(right) / (time.perf_counter() - started_at) / 1e9

    (ratio,) = measure_alternately(forward, [gemm], num_repeats)
    rates = {"model": float(np.median(ratio.rates)), "gemm": float(np.median(ratio.baseline_rates))}
    return {**rates, "part": ratio.median}


def _compare_quality(
    rankers: dict[str, PackedRanker],
    model_path: Path,
    args: argparse.Namespace,
    results: dict[str, Any],
) -> list[Claim]:
    """Compares MAP on WikiQA's test part with that of the same ranker in fp32, or not in int8."""
    if args.small or not args.ranker:
        return []
    try:
        rows = filter_table(read_split("wikiqa", "test", args.data / "wikiqa"), "clean")
    except RawFileNotFoundError:
        return []
    quality = {
        name: evaluate(rows, ranker.predict_table(rows).sort_keys, ["AP"])
        for name, ranker in rankers.items()
    }
    for name, peer in _start_peers(model_path, rows, args, INT8_PEERS).items():
        quality[name] = evaluate(rows, peer.predict(), ["AP"])
        peer.close()
    results["WikiQA MAP"] = {name: result.measures["AP"] for name, result in quality.items()}
    claims = []
    for name, baseline in (
        ("packed", "packed fp32"),
        ("packed int8", "packed fp32"),
        ("cascade int8", "cascade"),
    ):
        if name not in quality:
            continue
        test = compare_systems(quality[baseline].per_question, quality[name].per_question, "AP")
        low, high = test.interval
        measured = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}]"
        claim = f"{name} loses <= 0.003 MAP against {baseline} on WikiQA"
        claims.append(Claim(claim, measured, test.difference >= -0.003))
    return claims


def _measure_quality(ranker: PackedRanker, rows: pa.Table, results: dict[str, Any]) -> Claim:
    """Compares the cascade's MAP with its drop ratios to its MAP when nothing is dropped."""
    assert isinstance(ranker, MultiStageRanker)
    complete, pruned = (
        evaluate(
            rows, ranker.predict_table(rows, drop_ratios).sort_keys, ["AP"], question_filter="clean"
        )
        for drop_ratios in (0.0, None)
    )
    test = compare_systems(complete.per_question, pruned.per_question, "AP")
    low, high = test.interval
    results["quality"] = {
        "questions": complete.counts.num_questions,
        "undropped": complete.measures["AP"],
        "dropped": pruned.measures["AP"],
        "drop_ratios": ranker.drop_ratios,
        "exit_layers": list(ranker.exit_layers),
        "p": test.p_randomization,
    }
    measured = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}], p {test.p_randomization:.3f}"
    return Claim("cascade loses <= 0.005 MAP", measured, test.difference >= -0.005)


def _compare_map(
    cascade: PackedRanker, name: str, smaller: PackedRanker, rows: pa.Table, results: dict[str, Any]
) -> Claim:
    """Compares the cascade's MAP with that of a smaller model."""
    theirs, ours = (
        evaluate(rows, ranker.predict_table(rows).sort_keys, ["AP"], question_filter="clean")
        for ranker in (smaller, cascade)
    )
    test = compare_systems(theirs.per_question, ours.per_question, "AP")
    low, high = test.interval
    results[f"MAP of {name}"] = theirs.measures["AP"]
    measured = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}], p {test.p_randomization:.3f}"
    return Claim(f"MAP of the cascade above that of {name}", measured, None)


if __name__ == "__main__":
    main()
