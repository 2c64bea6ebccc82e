"""Measures ranking and training on a GPU: packed against padded, and the time a cascade saves.

Both sides score the same token sequences, questions with 400 sentences each, with the same weights
in bf16 or fp16 (`--dtype`). The padded side is transformers' SDPA attention over sequences sorted
by length, in batches of as many tokens, including padding, as the packed side. The weights are
random, because time does not depend on them. A request of 30 candidates is timed alone, as a
service gets it. A training step has dropout, clipped gradients and AdamW on both sides. A cascade's
saving depends on weights, so it needs a trained cascade (`--cascade`); it is compared with the
operations that packed layers run.

With 30 minutes of a GPU, run in this order. Speed comes first, because no large pretrained weights
are at hand. Train the cascade before, on CPUs (`pipelines.cascade`, `cascade_minilm.yaml`).

    python -m benchmarks.gpu --small          does everything run on this machine?
    python -m benchmarks.gpu --cascade DIR    pairs/s, share of one product (MFU), memory, saving
    python -m benchmarks.plan --device cuda   operations a second of training, hours of the papers
    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --profile node
                                              one paper end to end (with --output DIR)

There is no 8-bit format on GPUs: int8 is for CPUs, and fp8 is not built.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from as2ray.cascade.cost import EncoderShape, count_flops
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from as2ray.models.precision import resolve_dtype
from as2ray.models.ranker import positive_probability
from as2ray.profiling.speed_ratio import measure_alternately
from as2ray.tables.schema import question_indices
from as2ray.text.packing import TokenSequences
from benchmarks.ranking import load_squad_table, select_questions
from benchmarks.report import Claim, parse_arguments, write_report

SHAPES = {
    "MiniLM": EncoderShape(384, 1_536, 384, 6),
    "RoBERTa-base": EncoderShape(),
    "RoBERTa-large": EncoderShape(1_024, 4_096, 1_024, 24),
}
"""Measured encoders. All have the vocabulary of `--encoder`; attention heads have 64 dimensions,
MiniLM's 32."""

MIN_PRODUCT_SHARE = 0.5
"""Share of the rate of one large product that ranking must reach on a GPU."""

MAX_SCORE_DIFFERENCE = 0.02
"""Maximum difference of a probability that bf16 may cause."""


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    shapes: tuple[str, ...]
    num_questions: int
    num_candidates: int
    max_batch_tokens: int
    """Token budget of a batch."""
    matmul_size: int
    """Rows and columns of the matrices whose product gives the device's peak rate."""
    num_repeats: int
    num_training_pairs: int
    """Pairs of a training step."""
    num_requests: int
    """Requests per repeat."""


FULL = Size(tuple(SHAPES), 64, 400, 131_072, 8_192, 5, 512, 20)
SMALL = Size(("MiniLM",), 2, 8, 512, 512, 1, 4, 2)

REQUEST_SIZE = 30
"""Candidates of a request whose latency is measured."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    size = SMALL if args.small else FULL
    if args.device.type != "cuda" and not args.small:
        sys.exit("skipped: needs a CUDA GPU")
    rows = select_questions(
        load_squad_table(args.data, args.small), size.num_candidates, size.num_questions
    )
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question_index, claims, results = question_indices(rows), [], {}
    for name in size.shapes if args.shapes is None else args.shapes:
        with TemporaryDirectory(prefix="as2ray-gpu-") as folder:
            path = _write_random_checkpoint(
                SHAPES[name], args.encoder or packaged_minilm(), Path(folder)
            )
            ranker = as_packed_ranker(
                load(path, device=args.device, max_length=128, dtype=args.dtype)
            )
            padded = _PaddedRanker(path, ranker, size.max_batch_tokens)
            training = _compare_training(path, rows, args, size)
        ranker.max_batch_tokens = size.max_batch_tokens
        encoded = ranker.tokenizer.encode(*texts)
        results[name] = _compare(ranker, padded, encoded, question_index, size)
        results[name] |= training
        claims += _build_claims(name, results[name], args.device.type == "cuda")
    if args.cascade:
        results["cascade"], claim = _measure_saving(args, rows, size)
        claims.append(claim)
    write_report("gpu", args, claims, results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default_device))
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16"), default="auto")
    parser.add_argument("--encoder", type=Path, help="BERT with the tokenizer; by default MiniLM")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="encoders; by default all")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")


def _write_random_checkpoint(shape: EncoderShape, encoder: Path, folder: Path) -> Path:
    """Writes a checkpoint of random weights with the encoder's tokenizer."""
    config = AutoConfig.from_pretrained(encoder)
    config.update(
        {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": 12 if shape.hidden_size == 384 else shape.hidden_size // 64,
            "num_labels": 1,
        }
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


class _PaddedRanker:
    """The network of a checkpoint, run by transformers over padded batches.

    Args:
        path: The checkpoint.
        ranker: The packed ranker of the same checkpoint, for its device and number format.
        max_batch_tokens: Token budget of a batch, including padding.
    """

    def __init__(self, path: Path, ranker: PackedRanker, max_batch_tokens: int) -> None:
        self.device, self.max_batch_tokens = ranker.device, max_batch_tokens
        self.network = (
            AutoModelForSequenceClassification.from_pretrained(
                path,
                attn_implementation="sdpa",
                dtype=resolve_dtype(ranker.dtype, self.device),
            )
            .to(self.device)
            .eval()
        )

    @torch.inference_mode()
    def predict_sequences(self, encoded: TokenSequences) -> np.ndarray:
        """Returns probabilities in the order of the sequences, shape [sequences]."""
        probabilities = np.empty(len(encoded), np.float32)
        for indices, batch in self.iter_batches(encoded):
            probabilities[indices] = (
                positive_probability(self.network(**batch).logits).cpu().numpy()
            )
        return probabilities

    def iter_batches(
        self, encoded: TokenSequences
    ) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        """Yields the indices and the padded inputs of each batch."""
        order = np.argsort(-encoded.lengths, kind="stable")
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        start = 0
        while start < len(order):
            max_length = int(encoded.lengths[order[start]])
            indices = order[start : start + max(1, self.max_batch_tokens // max_length)]
            start += len(indices)
            column = np.arange(max_length)
            is_token = column < encoded.lengths[indices, None]
            source = np.where(is_token, starts[indices, None] + column, 0)
            inputs = {
                "input_ids": np.where(is_token, encoded.token_ids[source], 0),
                "token_type_ids": np.where(is_token, encoded.token_types[source], 0),
                "attention_mask": is_token,
            }
            tensors = {n: torch.from_numpy(v.astype(np.int64)) for n, v in inputs.items()}
            yield indices, {n: tensor.to(self.device) for n, tensor in tensors.items()}


def _compare(
    ranker: PackedRanker,
    padded: _PaddedRanker,
    encoded: TokenSequences,
    question_index: np.ndarray,
    size: Size,
) -> dict[str, Any]:
    """Returns rates, peak memory and the largest difference of a score."""

    def packed() -> np.ndarray:
        return ranker.predict_sequences(encoded, question_index).scores

    memory = {
        "packed": _measure_peak_memory(packed),
        "padded": _measure_peak_memory(lambda: padded.predict_sequences(encoded)),
    }
    max_difference = float(np.max(np.abs(packed() - padded.predict_sequences(encoded))))
    (ratio,) = measure_alternately(
        _build_workload(packed, len(encoded)),
        [_build_workload(lambda: padded.predict_sequences(encoded), len(encoded))],
        size.num_repeats,
    )
    request, index = encoded.take(np.arange(REQUEST_SIZE) % len(encoded)), np.zeros(REQUEST_SIZE)
    (request_ratio,) = measure_alternately(
        _build_request_workload(
            lambda: ranker.predict_sequences(request, index), size.num_requests
        ),
        [_build_request_workload(lambda: padded.predict_sequences(request), size.num_requests)],
        size.num_repeats,
    )
    shape = EncoderShape.from_config(ranker.network.config)
    lengths = [encoded.lengths.astype(np.float64)]
    total_flops = count_flops(shape, [shape.num_layers], lengths, sequential=True)
    flops_per_pair = total_flops / len(encoded)
    matmul_rate = _measure_matmul(size.matmul_size, ranker)
    return {
        "pairs a second": ratio.as_json(),
        "requests a second": request_ratio.as_json(),
        "operations a pair": flops_per_pair,
        "product": matmul_rate,
        "part of the product": float(np.median(ratio.rates)) * flops_per_pair / matmul_rate,
        "peak memory, MB": memory,
        "largest difference": max_difference,
    }


def _build_claims(name: str, results: dict[str, Any], is_gpu: bool) -> list[Claim]:
    rates = results["pairs a second"]
    flops_per_pair, memory = results["operations a pair"], results["peak memory, MB"]
    tflops = (
        float(np.median(rates[side])) * flops_per_pair / 1e12
        for side in ("rates", "baseline_rates")
    )
    measured = f"{np.median(rates['rates']):,.0f} pairs/s, {_format_ratio(rates)} x padded SDPA"
    max_difference = results["largest difference"]
    request, training = results["requests a second"], results["training, pairs a second"]
    training_memory = ", ".join(
        "unknown" if mb is None else f"{mb:,.0f}" for mb in results["training memory, MB"].values()
    )
    return [
        Claim(f"{name}, packed", measured, None),
        Claim(
            f"{name}: a request of {REQUEST_SIZE} candidates",
            f"{1e3 / np.median(request['rates']):.2f} ms, {_format_ratio(request)} x padded SDPA",
            None,
        ),
        Claim(
            f"{name}: training",
            f"{np.median(training['rates']):,.0f} pairs/s, {_format_ratio(training)} x padded "
            f"SDPA; memory in MB, packed and padded: {training_memory}",
            None,
        ),
        Claim(
            f"{name}: TFLOP/s packed, padded; of one large product >= {MIN_PRODUCT_SHARE:.0%}",
            f"{', '.join(f'{rate:.2f}' for rate in tflops)}; {results['product'] / 1e12:.2f} "
            f"({results['part of the product']:.0%})",
            results["part of the product"] >= MIN_PRODUCT_SHARE if is_gpu else None,
        ),
        Claim(
            f"{name}: peak memory in MB, packed and padded",
            ", ".join("unknown" if mb is None else f"{mb:,.0f}" for mb in memory.values()),
            None,
        ),
        Claim(
            f"{name}: scores differ by <= {MAX_SCORE_DIFFERENCE}",
            f"{max_difference:.4f}",
            max_difference <= MAX_SCORE_DIFFERENCE,
        ),
    ]


def _format_ratio(ratio: dict[str, Any]) -> str:
    of = ratio["ratio"]
    return f"{of['median']:.2f} ({of['min']:.2f}..{of['max']:.2f})"


def _compare_training(
    path: Path, rows: pa.Table, args: argparse.Namespace, size: Size
) -> dict[str, Any]:
    """Returns rates and peak memory of training steps over packed and over padded pairs."""
    ranker = as_packed_ranker(load(path, device=args.device, max_length=128, dtype=args.dtype))
    ranker.use_fused_layers = False
    chosen = np.random.default_rng(0).choice(len(rows), size.num_training_pairs, replace=False)
    pairs = rows.take(pa.array(chosen))
    encoded = ranker.tokenizer.encode(pairs["question"].to_pylist(), pairs["candidate"].to_pylist())
    padded = _PaddedRanker(path, ranker, encoded.lengths.max() * len(encoded))
    padded.network.float().train()
    batch = encoded.pack(np.arange(len(encoded)), {})
    ((_, inputs),) = padded.iter_batches(encoded)
    labels = torch.randint(2, (len(encoded), 1), device=args.device, dtype=torch.float32)
    steps = {
        "packed": _build_step(ranker.train(), lambda: ranker(batch), labels, ranker),
        "padded": _build_step(
            padded.network, lambda: padded.network(**inputs).logits, labels, ranker
        ),
    }
    memory = {name: _measure_peak_memory(step) for name, step in steps.items()}
    workload, baseline = (_build_workload(step, len(encoded)) for step in steps.values())
    (ratio,) = measure_alternately(workload, [baseline], size.num_repeats)
    return {"training, pairs a second": ratio.as_json(), "training memory, MB": memory}


def _build_step(
    model: nn.Module, forward: Callable[[], Tensor], labels: Tensor, ranker: PackedRanker
) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def step() -> object:
        with ranker.autocast():
            loss = functional.binary_cross_entropy_with_logits(forward().float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the step

    return step


def _measure_saving(
    args: argparse.Namespace, rows: pa.Table, size: Size
) -> tuple[dict[str, Any], Claim]:
    """Compares the time that the cascade saves, from tokens to scores, with the counted FLOPs."""
    ranker = as_packed_ranker(load(args.cascade, device=args.device, dtype=args.dtype))
    ranker.max_batch_tokens = size.max_batch_tokens
    encoded = ranker.tokenizer.encode(rows["question"].to_pylist(), rows["candidate"].to_pylist())
    question_index = question_indices(rows)

    def rank_with_drops() -> object:
        return ranker.predict_sequences(encoded, question_index)

    def rank_completely() -> object:
        return ranker.predict_scores(ranker.pack(encoded), len(encoded))

    (ratio,) = measure_alternately(
        _build_workload(rank_with_drops, 1),
        [_build_workload(rank_completely, 1)],
        size.num_repeats,
    )
    relative_time = 1 / ratio.median
    relative_flops = _count_relative_flops(ranker, encoded, question_index)
    claim = Claim(
        "cascade's time is what the operations say, within 10 %",
        f"{relative_time:.2f} of the time, {relative_flops:.2f} of the operations",
        abs(relative_time / relative_flops - 1) <= 0.1,
    )
    return {"time": ratio.as_json(), "operations": relative_flops}, claim


def _count_relative_flops(
    ranker: PackedRanker, encoded: TokenSequences, question_index: np.ndarray
) -> float:
    """Returns the FLOPs that dropping leaves of those that ranking completely runs.

    A finished ranker's classifier reads the first token, so the last layer is not run as a whole.
    """
    stage_index = ranker.predict_sequences(encoded, question_index).stage_index
    assert stage_index is not None
    shape, lengths = EncoderShape.from_config(ranker.network.config), encoded.lengths.astype(float)
    stages = range(len(ranker.exit_layers))
    scored = [lengths[stage_index >= stage] for stage in stages]
    reads_first_token = getattr(ranker.network.config, "as2ray", {}).get("has_classifier", False)
    flops = []
    for exit_layers, stage_lengths in (
        (ranker.exit_layers, scored),
        (ranker.exit_layers[-1:], [lengths]),
    ):
        total = count_flops(shape, exit_layers, stage_lengths)
        if reads_first_token:
            last = stage_lengths[-1]
            total -= (shape.layer_flops(last) - shape.pooled_layer_flops(last)).sum()
        flops.append(total)
    return float(flops[0] / flops[1])


def _build_workload(function: Callable[[], object], num_units: int) -> Callable[[], float]:
    """Returns a workload whose rate is units per second; its scores end on the CPU."""

    def workload() -> float:
        started_at = time.perf_counter()
        function()
        return num_units / (time.perf_counter() - started_at)

    return workload


def _build_request_workload(
    function: Callable[[], object], num_requests: int
) -> Callable[[], float]:
    """Returns a workload whose rate is requests per second, one after the other."""

    def workload() -> float:
        times_s = []
        for _ in range(num_requests):
            started_at = time.perf_counter()
            function()
            times_s.append(time.perf_counter() - started_at)
        return 1 / float(np.median(times_s))

    return workload


def _measure_peak_memory(function: Callable[[], object]) -> float | None:
    """Returns the peak GPU memory of a call in MB, including weights; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() / 1024**2


def _measure_matmul(matmul_size: int, ranker: PackedRanker) -> float:
    """Returns the FLOP/s of one large matrix product in the ranker's number format."""
    dtype = resolve_dtype(ranker.dtype, ranker.device)
    left, right = (
        torch.randn(matmul_size, matmul_size, device=ranker.device, dtype=dtype) for _ in range(2)
    )

    def multiply() -> object:
        return torch.mm(left, right)[0, 0].item()  # waits for the product

    multiply()
    return float(np.median([_build_workload(multiply, 2 * matmul_size**3)() for _ in range(5)]))


if __name__ == "__main__":
    main()
