"""What every ranker can do, whatever its network: score packed batches, rank candidates.

Knows text and torch. Must not know files, losses or any one ranker.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from as2ray.errors import EvaluationError, RecipeError
from as2ray.models.encoder import Encoder
from as2ray.records import Ranked
from as2ray.text.packing import PackedBatch
from as2ray.text.stream import pack_pairs
from as2ray.text.tokens import PairTokenizer

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""Number format of the matrix products."""


def resolve_precision(precision: Precision, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype that `precision` means on a device.

    `auto` is bf16 where the hardware multiplies it natively (AVX512-BF16 or AMX on a CPU, Ampere
    or later on a GPU), and fp32 elsewhere.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision in dtypes:
        return dtypes[precision]
    if precision != "auto":
        raise RecipeError(
            f"precision {precision!r}", expected="auto, fp32, bf16 or fp16", mend="choose one"
        )
    if torch.device(device).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


class Ranker(nn.Module, ABC):
    """A network with its tokenizer: scores pairs, ranks candidates.

    Args:
        tokenizer: How pairs become tokens.
        max_tokens: Most tokens of a packed batch when scoring.
    """

    encoder: Encoder

    def __init__(self, tokenizer: PairTokenizer, max_tokens: int = 8_192) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.published_tokenizer: PreTrainedTokenizerBase | None = None
        self.max_tokens = max_tokens
        self.precision: Precision = "auto"

    @abstractmethod
    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits, shape [sequences, labels]."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def gradient_checkpointing(self, on: bool) -> None:
        """Whether the backward pass recomputes activations instead of keeping them."""
        self.encoder.gradient_checkpointing = on

    def autocast(self) -> torch.autocast:
        """The context in which this ranker's precision holds."""
        dtype = resolve_precision(self.precision, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    @torch.inference_mode()
    def score(self, batches: Iterable[PackedBatch], rows: int) -> np.ndarray:
        """Probability of being an answer, by row number; float32, shape [rows].

        Args:
            batches: Packed batches; `of_sequence["row"]` says where each score belongs.
            rows: Number of rows; one that no batch holds is NaN.
        """
        scores = np.full(rows, np.nan, np.float32)
        was_training = self.training
        self.eval()
        with self.autocast():
            for batch in batches:
                scores[batch.of_sequence["row"]] = probability(self(batch)).cpu().numpy()
        self.train(was_training)
        return scores

    def rank_many(self, pairs: Iterable[tuple[str, Sequence[str]]]) -> list[list[Ranked]]:
        """Rankings of several questions' candidates, packed together.

        Args:
            pairs: (question, candidates) of each question.

        Returns:
            For each question its candidates, best first.
        """
        pairs = [(question, list(candidates)) for question, candidates in pairs]
        questions = [q for q, candidates in pairs for _ in candidates]
        texts = [text for _, candidates in pairs for text in candidates]
        for text in [*(q for q, _ in pairs), *texts]:
            if not _is_readable(text):
                raise EvaluationError(
                    f"an empty or non-text question or candidate: {text!r:.200}",
                    expected="non-empty strings of whole Unicode characters",
                    mend="leave it out",
                )
        batches = pack_pairs(self.tokenizer, questions, texts, self.max_tokens)
        scores = self.score(batches, len(texts))
        ends = np.cumsum([len(candidates) for _, candidates in pairs])
        return [
            _ranked(candidates, scores[end - len(candidates) : end])
            for (_, candidates), end in zip(pairs, ends)
        ]

    def rank(
        self, question: str, candidates: Sequence[str], top_k: int | None = None
    ) -> list[Ranked]:
        """The candidates of one question, best first.

        Args:
            question: The question.
            candidates: Sentences, at most a few hundred.
            top_k: How many to return; all by default.
        """
        if top_k is not None and top_k < 1:
            raise RecipeError(f"top_k={top_k}", expected="a number above 0", mend="leave it out")
        return self.rank_many([(question, candidates)])[0][:top_k]


def _is_readable(text: object) -> bool:
    """Whether a tokenizer can read it: half a surrogate pair, as JSON can bring, it cannot."""
    if not isinstance(text, str) or not text.strip():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def probability(logits: Tensor) -> Tensor:
    """Probability of the positive class, shape [sequences], from logits [sequences, 1 or 2]."""
    logits = logits.float()
    return logits.softmax(-1)[:, 1] if logits.shape[-1] == 2 else logits[:, 0].sigmoid()


def _ranked(candidates: Sequence[str], scores: np.ndarray) -> list[Ranked]:
    if not all(map(math.isfinite, scores)):
        raise EvaluationError(
            f"{int(np.sum(~np.isfinite(scores)))} of {len(scores)} scores are not finite",
            expected="finite scores",
            mend="score in fp32, or train again with a lower learning rate",
        )
    order = np.argsort(-scores, kind="stable")
    return [Ranked(int(i), float(scores[i]), candidates[i]) for i in order]
