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
ranker's first layers, and the cascade's rate and MAP are compared with its. Each exit of the
cascade is a rival, too, as the last one for all candidates: so are layerwise rerankers cut, such as
FlagEmbedding's, of which no checkpoint has weights that could be compared. With `--encoder`,
embeddings of the sentences lie ready, as in an index, and candidates that are far less similar to
the question than the best one are dropped before they are tokenized. How far is chosen on other
questions, such that the loss of the cascade's first candidate is bounded (`--max_loss`).

`--family NAME`, once or several times, compares families of encoders instead: random weights of the
real shapes (XLM-R base, ModernBERT base, DeBERTa-v3 small and others), texts of WikiQA, 64
candidates for each question, the tokenizer of MiniLM, in bf16, from text. Each baseline ranks half
of a question's candidates once for each batch size, and only those near the fastest are measured
further. A decoder is compared with itself without shared prefixes instead, in CPU time, because
sentence-transformers cannot run it with this tokenizer.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional

from as2ray.cascade.cost import EncoderShape, count_flops
from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.corpora.preparation import read_split
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.evaluation.significance import compare_systems
from as2ray.models.cascade import CascadeRanker
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from as2ray.models.precision import has_int8, resolve_dtype
from as2ray.models.quantization import MIN_PAIRS, fit_activation_ranges
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.filters import filter_table
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import question_indices, question_offsets
from benchmarks import asnq_shaped
from benchmarks.peer_processes import (
    INT8_PEERS,
    PEER_BACKENDS,
    PeerProcess,
    compare_rates,
    measure_memory,
    start_peers,
)
from benchmarks.ranking_families import (
    FAMILY_CANDIDATES,
    FAMILY_REPEATS,
    FAMILY_SHAPES,
    compare_families,
)
from benchmarks.ranking_stages import CutRanker, PairScorer, SimilarityStage
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report


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
    num_calibration_questions: int = 200
    """Questions that choose how many candidates stored similarities drop."""


FULL = Size({400: 4, 100: 12}, 5, 150)
BRIEF = Size({400: 4}, 3, 0, ("text",), 100)
SMALL = Size({8: 2}, 1, 6, num_calibration_questions=60)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = _choose_size(args)
    limit_cores(args.cores)
    if args.family:
        write_report("ranking", args, *compare_families(args))
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
        scorers: dict[str, PairScorer] = {**rankers}
        if args.cascade:
            name = "cascade int8" if "cascade int8" in rankers else "cascade"
            scorers |= _build_rivals(name, rankers[name], table, size, args, results)
        for candidates, questions in size.num_questions.items():
            rows = select_questions(table, candidates, questions)
            peers = start_peers(model, rows, args, PEER_BACKENDS)
            compared = compare_rates(scorers, peers, rows, size.num_repeats, size.kinds)
            for kind, ratios in compared.items():
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
                results["peak memory, MB"] = _measure_memory(rankers, peers, rows, args)
                claims += _measure_unscored(scorers, rows, results)
                gemm = _measure_gemm_share(rankers["packed"], rows, size.num_repeats)
                results["part of the GEMM rate"] = gemm
                share = f"{gemm['model']:,.0f} of {gemm['gemm']:,.0f} GFLOP/s: {gemm['part']:.0%}"
                claims.append(Claim("packed reaches >= 60 % of GEMM", share, gemm["part"] >= 0.6))
        if size.num_quality_questions:
            claims += _compare_quality(rankers, model, args, results)
        if args.cascade and (num_questions := _num_quality_questions(size, args)):
            quality_rows = select_questions(table, max(size.num_questions), num_questions)
            claims.append(_measure_quality(rankers["cascade"], quality_rows, results))
            claims += _compare_map(scorers, list(smaller), quality_rows, args, results)
    write_report("ranking", args, claims, results)


def _measure_memory(
    rankers: Mapping[str, PackedRanker],
    peers: Mapping[str, PeerProcess],
    rows: pa.Table,
    args: argparse.Namespace,
) -> dict[str, float | None]:
    """Returns the largest resident memory of a process of each side, in MB."""
    peaks: dict[str, float | None] = {name: peer.peak_mb for name, peer in peers.items()}
    with TemporaryDirectory(prefix="as2ray-memory-") as folder:
        for number, name in enumerate(["packed"] if args.small else rankers):
            path = save(rankers[name], Path(folder) / str(number))
            peaks[name] = measure_memory(rankers[name].dtype_name, path, rows, args)
    return peaks


def _choose_size(args: argparse.Namespace) -> Size:
    size = SMALL if args.small else BRIEF if args.brief else FULL
    counts = {max(size.num_questions): args.questions} if args.questions else size.num_questions
    return replace(size, num_questions=counts)


def _open_share(text: str) -> float:
    if not 0 < (share := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, not {text}")
    return share


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranker", type=Path, help="pointwise checkpoint; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")
    parser.add_argument(
        "--family", action="append", choices=FAMILY_SHAPES, help="family with random weights"
    )
    parser.add_argument(
        "--compare", type=Path, action="append", default=[], help="checkpoint of a smaller model"
    )
    parser.add_argument("--encoder", help="sentence encoder of stored embeddings, for --cascade")
    parser.add_argument(
        "--max_loss", type=_open_share, default=0.03, help="with --encoder: bound on the loss"
    )
    parser.add_argument("--brief", action="store_true", help="four questions, from text, no MAP")
    parser.add_argument(
        "--quality_questions", type=int, help="questions of which MAP of a cascade is compared"
    )
    parser.add_argument(
        "--questions", type=int, help="questions of a pass; with --family by default one"
    )
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


def _measure_unscored(
    scorers: Mapping[str, PairScorer], rows: pa.Table, results: dict[str, Any]
) -> list[Claim]:
    """Measures which share of the candidates leave before they are tokenized.

    Behind similarities also the time of each step.
    """
    texts, shares = (rows["question"].to_pylist(), rows["candidate"].to_pylist()), {}
    for name, scorer in scorers.items():
        if isinstance(scorer, MultiStageRanker | SimilarityStage):
            stage_index = scorer.predict_pairs(*texts, question_indices(rows)).stage_index
            shares[name] = float(np.mean(stage_index == NOT_SCORED))
        if isinstance(scorer, SimilarityStage):
            results["ms of a question"] = scorer.profile(*texts, question_indices(rows))
    results["gone before they are tokenized"] = shares
    return [
        Claim(f"{name}: >= 70 % gone before they are tokenized", f"{share:.0%}", share >= 0.7)
        for name, share in shares.items()
        if isinstance(scorers[name], SimilarityStage)
    ]


def _num_quality_questions(size: Size, args: argparse.Namespace) -> int:
    given: int | None = args.quality_questions
    return size.num_quality_questions if given is None else given


def _build_rivals(
    name: str,
    cascade: PackedRanker,
    table: pa.Table,
    size: Size,
    args: argparse.Namespace,
    results: dict[str, Any],
) -> dict[str, PairScorer]:
    """Returns the cascade cut after each exit, and with `--encoder` behind stored similarities."""
    rivals: dict[str, PairScorer] = {}
    if isinstance(cascade, CascadeRanker):
        for index, layer in enumerate(cascade.exit_layers[:-1]):
            rivals[f"{name}, all leave after layer {layer}"] = CutRanker(cascade, index)
    if args.encoder:
        num_candidates = max(size.num_questions)
        counts = [*size.num_questions.items()]
        counts.append((num_candidates, max(1, _num_quality_questions(size, args))))
        measured = pa.concat_tables([select_questions(table, *count) for count in counts])
        others = table.filter(pc.invert(pc.is_in(table["question_id"], measured["question_id"])))
        calibration = select_questions(others, num_candidates, size.num_calibration_questions)
        texts = [*measured["candidate"].to_pylist(), *calibration["candidate"].to_pylist()]
        encoder = load_sentence_encoder(args.encoder, device="cpu")
        stage = SimilarityStage.from_texts(cascade, encoder, texts)
        stage = stage.with_bounded_loss(calibration, 0.5 if args.small else args.max_loss)
        rivals[f"{name} after similarities"] = stage
        results["largest gap of similarities"] = stage.max_gap
    return rivals


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
        ("cascade int8 after similarities", "default", 60.0),
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
    for name, peer in start_peers(model_path, rows, args, INT8_PEERS).items():
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
    scorers: Mapping[str, PairScorer],
    smaller: Sequence[str],
    rows: pa.Table,
    args: argparse.Namespace,
    results: dict[str, Any],
) -> list[Claim]:
    """Compares MAP of all with that of the ranker, and the cascade's with that of smaller models.

    Without `--ranker` the ranker was never trained, so nothing is compared with it.
    """
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    quality: dict[str, EvaluationResult] = {}
    for name, scorer in scorers.items():
        if name == "packed fp32":  # far slower than others, and as good as bf16
            continue
        keys = scorer.predict_pairs(*texts, question_indices(rows)).sort_keys
        quality[name] = evaluate(rows, keys, ["AP"], question_filter="clean")
    results["MAP"] = {name: result.measures["AP"] for name, result in quality.items()}
    pairs = [("cascade", name) for name in smaller]
    if args.ranker:
        pairs += [(name, "packed") for name in quality if name not in ("packed", *smaller)]
    claims = []
    for name, baseline in pairs:
        test = compare_systems(quality[baseline].per_question, quality[name].per_question, "AP")
        low, high = test.interval
        measured = f"{test.difference:+.4f} [{low:+.4f}, {high:+.4f}], p {test.p_randomization:.3f}"
        results[f"MAP of {name} against {baseline}"] = measured
        claims.append(Claim(f"MAP of {name} above that of {baseline}", measured, None))
    return claims


if __name__ == "__main__":
    main()
