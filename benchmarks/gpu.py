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

from as2ray import checkpoint
from as2ray.evaluation.cost import Shape, operations
from as2ray.evaluation.ratio import alternate
from as2ray.models.ranker import Ranker, probability, resolve_precision
from as2ray.packaged import minilm
from as2ray.records import question_numbers
from as2ray.savings import savings
from as2ray.text.packing import Sequences
from benchmarks.ranking import questions_of, squad_table
from benchmarks.report import Claim, arguments, finish

SHAPES = {
    "MiniLM": Shape(384, 1_536, 384, 6),
    "RoBERTa-base": Shape(),
    "RoBERTa-large": Shape(1_024, 4_096, 1_024, 24),
}
"""What is measured. All have the encoder's vocabulary and heads of 64, MiniLM of 32."""

ROUNDING = 0.02
"""Most by which bf16 may move a probability."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    shapes: tuple[str, ...]
    questions: int
    candidates: int
    tokens: int
    """Of a batch."""
    product: int
    """Rows and columns of the matrices whose product the device's rate is taken from."""
    repeats: int


FULL = Size(tuple(SHAPES), 64, 400, 131_072, 8_192, 5)
SMALL = Size(("MiniLM",), 2, 8, 512, 512, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv, _more)
    size = SMALL if args.small else FULL
    if args.device.type != "cuda" and not args.small:
        sys.exit("skipped: needs a CUDA GPU")
    rows = questions_of(squad_table(args.data, args.small), size.candidates, size.questions)
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, claims, results = question_numbers(rows), [], {}
    for name in size.shapes:
        with TemporaryDirectory(prefix="as2ray-gpu-") as folder:
            path = _written(SHAPES[name], args.encoder or minilm(), Path(folder))
            ranker = checkpoint.load(path, device=args.device, max_length=128)
            padded = _Padded(path, ranker, size.tokens)
        ranker.max_tokens = size.tokens
        encoded = ranker.tokenizer.encode(*texts)
        results[name] = _compared(ranker, padded, encoded, question, size)
        claims += _claims(name, results[name])
    if args.cascade:
        results["cascade"], claim = _saving(args, rows, size)
        claims.append(claim)
    finish("gpu", args, claims, results)


def _more(parser: argparse.ArgumentParser) -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--encoder", type=Path, help="BERT whose words are used; by default MiniLM")
    parser.add_argument("--cascade", type=Path, help="cascade checkpoint with its drop ratios")


def _written(shape: Shape, encoder: Path, folder: Path) -> Path:
    """A checkpoint of random weights in the encoder's words."""
    config = AutoConfig.from_pretrained(encoder)
    config.update(
        {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": 12 if shape.hidden == 384 else shape.hidden // 64,
            "num_labels": 1,
        }
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


class _Padded:
    """The same network as transformers runs it.

    Args:
        path: Its checkpoint.
        ranker: Ours of the same checkpoint, for device, precision and padding.
        tokens: Of a batch, padding counted.
    """

    def __init__(self, path: Path, ranker: Ranker, tokens: int) -> None:
        self.device, self.tokens = ranker.device, tokens
        self.network = (
            AutoModelForSequenceClassification.from_pretrained(
                path,
                attn_implementation="sdpa",
                dtype=resolve_precision(ranker.precision, self.device),
            )
            .to(self.device)
            .eval()
        )

    @torch.inference_mode()
    def scores(self, encoded: Sequences) -> np.ndarray:
        """Probabilities in the order of the sequences, shape [sequences]."""
        found = np.empty(len(encoded), np.float32)
        for which, batch in self._batches(encoded):
            found[which] = probability(self.network(**batch).logits).cpu().numpy()
        return found

    def _batches(self, encoded: Sequences) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        order = np.argsort(-encoded.lengths, kind="stable")
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        begun = 0
        while begun < len(order):
            longest = int(encoded.lengths[order[begun]])
            which = order[begun : begun + max(1, self.tokens // longest)]
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


def _compared(
    ranker: Ranker, padded: _Padded, encoded: Sequences, question: np.ndarray, size: Size
) -> dict[str, Any]:
    """Rates, memory and the largest difference of a score."""

    def packed() -> np.ndarray:
        return ranker.score_sequences(encoded, question).score

    memory = {"packed": _peak(packed), "padded": _peak(lambda: padded.scores(encoded))}
    moved = float(np.max(np.abs(packed() - padded.scores(encoded))))
    (ratio,) = alternate(
        _rate(packed, len(encoded)),
        [_rate(lambda: padded.scores(encoded), len(encoded))],
        size.repeats,
    )
    shape = Shape.of(ranker.network.config)
    lengths = [encoded.lengths.astype(np.float64)]
    each = operations(shape, [shape.layers], lengths, sequential=True) / len(encoded)
    product = _product(size.product, ranker)
    return {
        "pairs a second": ratio.as_json(),
        "operations a pair": each,
        "product": product,
        "part of the product": float(np.median(ratio.ours)) * each / product,
        "peak memory, MB": memory,
        "largest difference": moved,
    }


def _claims(name: str, found: dict[str, Any]) -> list[Claim]:
    rates, ratio = found["pairs a second"], found["pairs a second"]["ratio"]
    each, memory = found["operations a pair"], found["peak memory, MB"]
    used = (float(np.median(rates[side])) * each / 1e12 for side in ("ours", "theirs"))
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
    told = f"{np.median(rates['ours']):,.0f} pairs/s, {spread} x padded SDPA"
    moved = found["largest difference"]
    return [
        Claim(f"{name}, packed", told, None),
        Claim(
            f"{name}: TFLOP/s packed, padded; of one large product",
            f"{', '.join(f'{rate:.2f}' for rate in used)}; {found['product'] / 1e12:.2f} "
            f"({found['part of the product']:.0%})",
            None,
        ),
        Claim(
            f"{name}: peak memory in MB, packed and padded",
            ", ".join("not told" if of is None else f"{of:,.0f}" for of in memory.values()),
            None,
        ),
        Claim(f"{name}: scores differ by <= {ROUNDING}", f"{moved:.4f}", moved <= ROUNDING),
    ]


def _saving(args: argparse.Namespace, rows: pa.Table, size: Size) -> tuple[dict[str, Any], Claim]:
    """What the cascade saves by the clock, from tokens to scores, and by the count."""
    ranker = checkpoint.load(args.cascade, device=args.device)
    ranker.max_tokens = size.tokens
    encoded = ranker.tokenizer.encode(rows["question"].to_pylist(), rows["candidate"].to_pylist())
    question = question_numbers(rows)

    def dropping() -> object:
        return ranker.score_sequences(encoded, question)

    def whole() -> object:
        return ranker.score(ranker.pack(encoded), len(encoded))

    (ratio,) = alternate(_rate(dropping, 1), [_rate(whole, 1)], size.repeats)
    taken, counted = 1 / ratio.median, savings(ranker, rows, repeats=1).operations
    told = f"{taken:.2f} of the time, {counted:.2f} of the operations"
    claim = "cascade's saving is what was counted, within 10 %"
    found = {"time": ratio.as_json(), "operations": counted}
    return found, Claim(claim, told, abs(taken / counted - 1) <= 0.1)


def _rate(work: Callable[[], object], units: int) -> Callable[[], float]:
    """Units a second; the work ends with its scores on the CPU."""

    def side() -> float:
        began = time.perf_counter()
        work()
        return units / (time.perf_counter() - began)

    return side


def _peak(work: Callable[[], object]) -> float | None:
    """Most memory of the GPU that the work takes, its weights counted, in MB."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 1024**2


def _product(size: int, ranker: Ranker) -> float:
    """Operations a second of one large product in the ranker's precision."""
    dtype = resolve_precision(ranker.precision, ranker.device)
    left, right = (torch.randn(size, size, device=ranker.device, dtype=dtype) for _ in range(2))

    def one() -> object:
        return torch.mm(left, right)[0, 0].item()  # waits for the product

    one()
    return float(np.median([_rate(one, 2 * size**3)() for _ in range(5)]))


if __name__ == "__main__":
    main()
