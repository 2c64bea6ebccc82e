"""Ranking on a GPU: packed attention against padded, and a cascade's saving against its count.

Knows encoders' shapes and one device. Must not know Ray, nor peers: `benchmarks.ranking` does.

Both sides score the same token sequences, real questions with 400 sentences each, by the same
weights in bf16. The padded side is transformers' own: its SDPA attention over sequences sorted by
length, in batches of the packed side's budget, padding counted. The weights are random, for time
does not ask for them; a cascade's saving does, so it needs a trained one (`--cascade`).
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
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from as2ray.cascade.cost import EncoderShape, count_flops
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.models.ranker import Ranker, positive_probability, resolve_dtype
from as2ray.profiling.savings import measure_savings
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
"""What is measured. All have the encoder's vocabulary and heads of 64, MiniLM of 32."""

MAX_SCORE_DIFFERENCE = 0.02
"""Most by which bf16 may move a probability."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    shapes: tuple[str, ...]
    num_questions: int
    num_candidates: int
    max_batch_tokens: int
    """Of a batch."""
    matmul_size: int
    """Rows and columns of the matrices whose product the device's rate is taken from."""
    num_repeats: int


FULL = Size(tuple(SHAPES), 64, 400, 131_072, 8_192, 5)
SMALL = Size(("MiniLM",), 2, 8, 512, 512, 1)


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
    question, claims, results = question_indices(rows), [], {}
    for name in size.shapes:
        with TemporaryDirectory(prefix="as2ray-gpu-") as folder:
            path = _write_random_checkpoint(
                SHAPES[name], args.encoder or packaged_minilm(), Path(folder)
            )
            ranker = load(path, device=args.device, max_length=128)
            padded = _PaddedRanker(path, ranker, size.max_batch_tokens)
        ranker.max_batch_tokens = size.max_batch_tokens
        encoded = ranker.tokenizer.encode(*texts)
        results[name] = _compare(ranker, padded, encoded, question, size)
        claims += _build_claims(name, results[name])
    if args.cascade:
        results["cascade"], claim = _measure_saving(args, rows, size)
        claims.append(claim)
    write_report("gpu", args, claims, results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--encoder", type=Path, help="BERT whose words are used; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")


def _write_random_checkpoint(shape: EncoderShape, encoder: Path, folder: Path) -> Path:
    """A checkpoint of random weights in the encoder's words."""
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
    """The same network as transformers runs it.

    Args:
        path: Its checkpoint.
        ranker: Ours of the same checkpoint, for device, precision and padding.
        tokens: Of a batch, padding counted.
    """

    def __init__(self, path: Path, ranker: Ranker, max_batch_tokens: int) -> None:
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
        """Probabilities in the order of the sequences, shape [sequences]."""
        found = np.empty(len(encoded), np.float32)
        for which, batch in self._iter_batches(encoded):
            found[which] = positive_probability(self.network(**batch).logits).cpu().numpy()
        return found

    def _iter_batches(
        self, encoded: TokenSequences
    ) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        order = np.argsort(-encoded.lengths, kind="stable")
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        begun = 0
        while begun < len(order):
            longest = int(encoded.lengths[order[begun]])
            which = order[begun : begun + max(1, self.max_batch_tokens // longest)]
            begun += len(which)
            column = np.arange(longest)
            real = column < encoded.lengths[which, None]
            source = np.where(real, starts[which, None] + column, 0)
            inputs = {
                "input_ids": np.where(real, encoded.token_ids[source], 0),
                "token_type_ids": np.where(real, encoded.token_types[source], 0),
                "attention_mask": real,
            }
            tensors = {n: torch.from_numpy(v.astype(np.int64)) for n, v in inputs.items()}
            yield which, {n: tensor.to(self.device) for n, tensor in tensors.items()}


def _compare(
    ranker: Ranker,
    padded: _PaddedRanker,
    encoded: TokenSequences,
    question_index: np.ndarray,
    size: Size,
) -> dict[str, Any]:
    """Rates, memory and the largest difference of a score."""

    def packed() -> np.ndarray:
        return ranker.predict_sequences(encoded, question_index).scores

    memory = {
        "packed": _measure_peak_memory(packed),
        "padded": _measure_peak_memory(lambda: padded.predict_sequences(encoded)),
    }
    moved = float(np.max(np.abs(packed() - padded.predict_sequences(encoded))))
    (ratio,) = measure_alternately(
        _build_workload(packed, len(encoded)),
        [_build_workload(lambda: padded.predict_sequences(encoded), len(encoded))],
        size.num_repeats,
    )
    shape = EncoderShape.from_config(ranker.network.config)
    lengths = [encoded.lengths.astype(np.float64)]
    each = count_flops(shape, [shape.num_layers], lengths, sequential=True) / len(encoded)
    product = _measure_matmul(size.matmul_size, ranker)
    return {
        "pairs a second": ratio.as_json(),
        "operations a pair": each,
        "product": product,
        "part of the product": float(np.median(ratio.rates)) * each / product,
        "peak memory, MB": memory,
        "largest difference": moved,
    }


def _build_claims(name: str, results: dict[str, Any]) -> list[Claim]:
    rates, ratio = results["pairs a second"], results["pairs a second"]["ratio"]
    each, memory = results["operations a pair"], results["peak memory, MB"]
    used = (float(np.median(rates[side])) * each / 1e12 for side in ("ours", "theirs"))
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
    told = f"{np.median(rates['ours']):,.0f} pairs/s, {spread} x padded SDPA"
    moved = results["largest difference"]
    return [
        Claim(f"{name}, packed", told, None),
        Claim(
            f"{name}: TFLOP/s packed, padded; of one large product",
            f"{', '.join(f'{rate:.2f}' for rate in used)}; {results['product'] / 1e12:.2f} "
            f"({results['part of the product']:.0%})",
            None,
        ),
        Claim(
            f"{name}: peak memory in MB, packed and padded",
            ", ".join("not told" if of is None else f"{of:,.0f}" for of in memory.values()),
            None,
        ),
        Claim(
            f"{name}: scores differ by <= {MAX_SCORE_DIFFERENCE}",
            f"{moved:.4f}",
            moved <= MAX_SCORE_DIFFERENCE,
        ),
    ]


def _measure_saving(
    args: argparse.Namespace, rows: pa.Table, size: Size
) -> tuple[dict[str, Any], Claim]:
    """What the cascade saves by the clock, from tokens to scores, and by the count."""
    ranker = load(args.cascade, device=args.device)
    ranker.max_batch_tokens = size.max_batch_tokens
    encoded = ranker.tokenizer.encode(rows["question"].to_pylist(), rows["candidate"].to_pylist())
    question = question_indices(rows)

    def dropping() -> object:
        return ranker.predict_sequences(encoded, question)

    def whole() -> object:
        return ranker.predict_scores(ranker.pack(encoded), len(encoded))

    (ratio,) = measure_alternately(
        _build_workload(dropping, 1), [_build_workload(whole, 1)], size.num_repeats
    )
    taken, counted = 1 / ratio.median, measure_savings(ranker, rows, num_repeats=1).relative_flops
    told = f"{taken:.2f} of the time, {counted:.2f} of the operations"
    claim = "cascade's saving is what was counted, within 10 %"
    found = {"time": ratio.as_json(), "operations": counted}
    return found, Claim(claim, told, abs(taken / counted - 1) <= 0.1)


def _build_workload(function: Callable[[], object], num_units: int) -> Callable[[], float]:
    """Units a second; the work ends with its scores on the CPU."""

    def side() -> float:
        began = time.perf_counter()
        function()
        return num_units / (time.perf_counter() - began)

    return side


def _measure_peak_memory(function: Callable[[], object]) -> float | None:
    """Most memory of the GPU that the work takes, its weights counted, in MB."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() / 1024**2


def _measure_matmul(matmul_size: int, ranker: Ranker) -> float:
    """Operations a second of one large product in the ranker's precision."""
    dtype = resolve_dtype(ranker.dtype, ranker.device)
    left, right = (
        torch.randn(matmul_size, matmul_size, device=ranker.device, dtype=dtype) for _ in range(2)
    )

    def one() -> object:
        return torch.mm(left, right)[0, 0].item()  # waits for the product

    one()
    return float(np.median([_build_workload(one, 2 * matmul_size**3)() for _ in range(5)]))


if __name__ == "__main__":
    main()
