"""What every ranker can do, whatever its network: score packed batches, rank candidates.

Knows text and torch. Must not know files, losses or any one ranker.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from as2ray.calibration import Calibration, Kind, abstention, check_both, check_precision, fit
from as2ray.errors import EvaluationError, RecipeError
from as2ray.models.encoder import Encoder
from as2ray.models.lanes import Found, Part, even, side_by_side
from as2ray.pruning import Drop, Scored
from as2ray.records import Ranked, question_numbers
from as2ray.text.packing import PackedBatch, Sequences, pack
from as2ray.text.tokens import PairTokenizer

SETTINGS = "as2ray"
"""Entry of `config.json` for what transformers has no word for: kind of ranker, lengths, exits."""

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

    network: PreTrainedModel
    encoders: Sequence[Encoder]
    """One; or one for each independent ranker, or the body and each head's."""
    exits: tuple[int, ...] = ()
    """Layers after which candidates may leave, ascending; none in a ranker of one piece."""
    text_only = False
    """Whether it scores text alone, by `score_pairs`, and no sequences of one tokenizer."""

    def __init__(self, tokenizer: PairTokenizer, max_tokens: int = 8_192) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.published_tokenizer: PreTrainedTokenizerBase | None = None
        self.max_tokens = max_tokens
        self.precision: Precision = "auto"
        self.concurrent = True
        """Whether a CPU may score several packed batches at a time."""
        self.fused = False
        """Whether scoring runs fused layers, faster than transformers' own and equal but for
        rounding; `load` sets it."""
        self.calibration: tuple[Calibration, ...] = ()
        """Of each stage, made on a development split; without it scores stay as they are."""
        self.threshold: float | None = None
        """Score below which a question's best answer is better not given, made with it."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits, shape [sequences, labels]."""

    @property
    def encoder(self) -> Encoder:
        """The encoder, the first where there are several."""
        return self.encoders[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def budget(self) -> int:
        """Most tokens of a packed batch when scoring: room for one sequence at least."""
        return max(self.max_tokens, self.tokenizer.max_length)

    @property
    def lanes(self) -> int:
        """How many packed batches are scored at a time: on a CPU as many as torch has threads."""
        cores = self.concurrent and self.device.type == "cpu"
        return torch.get_num_threads() if cores else 1

    def share(self, lengths: np.ndarray) -> int:
        """Token budget of batches in which sequences of these lengths keep all lanes busy."""
        return even(lengths, self.budget, self.lanes)

    def pack(self, encoded: Sequences) -> Iterator[PackedBatch]:
        """Sequences as batches to be scored; see `as2ray.text.packing.pack`."""
        return pack(encoded, self.share(encoded.lengths))

    def each(self, work: Callable[[Part], Found], parts: Iterable[Part]) -> Iterator[Found]:
        """What `work` says of each packed batch, or part of a pass, in order.

        Args:
            work: Called in inference mode and this ranker's precision, perhaps in another thread.
            parts: Taken as they are needed.
        """

        def one(part: Part) -> Found:
            with torch.inference_mode(), self.autocast():
                return work(part)

        return side_by_side(one, parts, self.lanes)

    def gradient_checkpointing(self, on: bool) -> None:
        """Whether the backward pass recomputes activations instead of keeping them."""
        for encoder in self.encoders:
            encoder.gradient_checkpointing = on

    def autocast(self) -> torch.autocast:
        """The context in which this ranker's precision holds."""
        dtype = resolve_precision(self.precision, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Without dropout, in this ranker's precision; training mode comes back afterwards."""
        was_training = self.training
        if was_training:
            self.eval()
        dtype = resolve_precision(self.precision, self.device)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.autocast())
                for encoder in self.encoders if self.fused else ():
                    stack.enter_context(encoder.resting(dtype))
                yield
        finally:
            if was_training:
                self.train()

    def probabilities(self, batch: PackedBatch) -> Tensor:
        """Probability of being an answer, nothing dropped, shape [sequences]."""
        return probability(self(batch))

    def two_logits(self, batch: PackedBatch) -> Tensor:
        """Logits of (not an answer, answer), nothing dropped, shape [sequences, 2]."""
        logits: Tensor = self(batch)
        return logits if logits.shape[-1] == 2 else functional.pad(logits, (1, 0))

    def logits(self, batches: Iterable[PackedBatch], rows: int) -> np.ndarray:
        """Logits of (not an answer, answer) by row number; float32, shape [rows, 2]."""
        with torch.inference_mode():
            return self._by_row(batches, (rows, 2), lambda batch: self.two_logits(batch).float())

    def settings(self) -> dict[str, Any]:
        """What its checkpoint says of it beside the network's configuration and lengths."""
        return {"ranker": "pointwise"}

    @torch.inference_mode()
    def score(self, batches: Iterable[PackedBatch], rows: int) -> np.ndarray:
        """Probability of being an answer, by row number, nothing dropped; float32, shape [rows].

        Args:
            batches: Packed batches; `of_sequence["row"]` says where each score belongs.
            rows: Number of rows; one that no batch holds is NaN.
        """
        return self._by_row(batches, (rows,), self.probabilities)

    def score_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question: np.ndarray,
        drop: Drop | None = None,
    ) -> Scored:
        """Scores as `rank` gives them, with candidates dropped on the way where the ranker does.

        Args:
            questions: Shape [pairs].
            candidates: Shape [pairs].
            question: Number of each pair's question, from 0: whose candidates compete, [pairs].
            drop: Drop ratio, of all stages or of each; an array [questions, stages - 1] gives
                each question its own. By default the checkpoint's.
        """
        return self.score_sequences(self.tokenizer.encode(questions, candidates), question, drop)

    @torch.inference_mode()
    def score_sequences(
        self, encoded: Sequences, question: np.ndarray, drop: Drop | None = None
    ) -> Scored:
        """`score_pairs` of pairs that are tokens already."""
        self.refuse_drop(drop)
        return Scored(self.score(self.pack(encoded), len(encoded)))

    def refuse_drop(self, drop: Drop | None) -> None:
        """Of a ranker of one stage: drop ratios mean nothing to it."""
        if drop is not None:
            raise RecipeError(
                f"drop ratios {drop} for a {type(self).__name__}",
                expected="a ranker of several stages: a cascade or a sequential ranker",
                mend="leave the drop ratios out",
            )

    def score_table(self, table: pa.Table, drop: Drop | None = None) -> Scored:
        """`score_pairs` of a candidates table.

        Args:
            table: With the columns `question_id`, `question` and `candidate`.
            drop: Other drop ratios than the checkpoint's, where the ranker has several stages.
        """
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        return self.score_pairs(*texts, question_numbers(table), drop)

    def _by_row(
        self,
        batches: Iterable[PackedBatch],
        shape: tuple[int, ...],
        scores_of: Callable[[PackedBatch], Tensor],
    ) -> np.ndarray:
        def scored(batch: PackedBatch) -> tuple[PackedBatch, np.ndarray]:
            return batch, scores_of(batch).cpu().numpy()

        scores = np.full(shape, np.nan, np.float32)
        with self.at_rest():
            for batch, found in self.each(scored, batches):
                scores[batch.of_sequence["row"]] = found
        return scores

    def rank_many(
        self, pairs: Iterable[tuple[str, Sequence[str]]], drop: Drop | None = None
    ) -> list[list[Ranked]]:
        """Rankings of several questions' candidates, packed together.

        Args:
            pairs: (question, candidates) of each question.
            drop: Other drop ratios than the checkpoint's; see `score_pairs`.

        Returns:
            For each question its candidates, best first.
        """
        pairs = [(question, listed(candidates)) for question, candidates in pairs]
        sizes = [len(candidates) for _, candidates in pairs]
        if np.ndim(drop) == 2 and len(np.asarray(drop)) == len(pairs):  # type: ignore[arg-type]
            drop = np.asarray(drop)[: int(np.max(np.flatnonzero(sizes), initial=-1)) + 1]
        questions = [q for q, candidates in pairs for _ in candidates]
        texts = [text for _, candidates in pairs for text in candidates]
        for text in [*(q for q, _ in pairs), *texts]:
            check_readable(text)
        scored = self.score_pairs(questions, texts, np.repeat(np.arange(len(pairs)), sizes), drop)
        return self.rankings([candidates for _, candidates in pairs], scored)

    def rankings(self, candidates: Sequence[Sequence[str]], scored: Scored) -> list[list[Ranked]]:
        """The candidates of each question, best first.

        Args:
            candidates: Of each question.
            scored: What this ranker said of all of them, question after question.
        """
        ends = np.cumsum([len(own) for own in candidates])
        return [self._ranked(own, scored, end - len(own)) for own, end in zip(candidates, ends)]

    def rank(
        self,
        question: str,
        candidates: Sequence[str],
        top_k: int | None = None,
        drop: Drop | None = None,
    ) -> list[Ranked]:
        """The candidates of one question, best first.

        Args:
            question: The question.
            candidates: Sentences, at most a few hundred.
            top_k: How many to return; all by default.
            drop: Other drop ratios than the checkpoint's, where the ranker has several stages.
        """
        check_top_k(top_k)
        return self.rank_many([(question, candidates)], drop)[0][:top_k]

    def calibrate(
        self, table: pa.Table, kind: Kind = "temperature", precision: float = 0.5
    ) -> None:
        """Fits what turns scores into probabilities, for each stage, and when to abstain.

        Args:
            table: A development split; every question counts, also those without an answer.
            kind: Which map.
            precision: Share of right ones among the answers given, at least.

        Raises:
            EvaluationError: Labels of one kind alone, or a precision outside (0, 1].
        """
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        label = table["label"].to_numpy()
        check_precision(precision)
        check_both(label)
        self.calibration = tuple(fit(of, label, kind) for of in self.score_exits(*texts).T)
        scored, question = self.score_table(table), question_numbers(table)
        order = np.lexsort((-scored.rank_by, question))
        first = order[np.flatnonzero(np.diff(question[order], prepend=-1))]
        best = self._calibrated(scored.score, scored.stage)[first]
        self.threshold = abstention(best, label[first], precision)

    def score_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What every stage says of every pair, nothing dropped; float32, shape [pairs, stages]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        return self.score(batches, len(questions))[:, None]

    def _calibrated(self, score: np.ndarray, stage: np.ndarray | None) -> np.ndarray:
        if not self.calibration:
            return score
        which = np.zeros(len(score), int) if stage is None else stage
        found = np.empty(len(score))
        for number, calibration in enumerate(self.calibration):
            found[which == number] = calibration(score[which == number])
        return found

    def _ranked(self, candidates: Sequence[str], scored: Scored, start: int) -> list[Ranked]:
        """The ranking of candidates whose scores stand at `start`."""
        rows = slice(start, start + len(candidates))
        score = scored.score[rows]
        if not np.isfinite(score).all():
            raise EvaluationError(
                f"{int(np.sum(~np.isfinite(score)))} of {len(score)} scores are not finite",
                expected="finite scores",
                mend="score in fp32, or train again with a lower learning rate",
            )
        order = np.argsort(-scored.rank_by[rows], kind="stable")
        score = self._calibrated(score, None if scored.stage is None else scored.stage[rows])
        layer = [None] * len(score)
        if scored.stage is not None:
            layer = [self.exits[stage] for stage in scored.stage[rows]]
        return [Ranked(int(i), float(score[i]), candidates[i], layer[i]) for i in order]


def listed(candidates: Sequence[str]) -> list[str]:
    """Refuses one text, whose characters would be ranked."""
    if isinstance(candidates, str):
        raise EvaluationError(
            f"one text as candidates: {candidates!r:.200}",
            expected="a list of sentences",
            mend="put it into a list, or split it into its sentences",
        )
    return list(candidates)


def check_top_k(top_k: int | None) -> None:
    """Refuses to return none of a ranking, or all but the last."""
    if top_k is not None and top_k < 1:
        raise RecipeError(f"top_k={top_k}", expected="a number above 0", mend="leave it out")


def check_readable(text: object) -> None:
    """Refuses what no tokenizer can read: half a surrogate pair, as JSON can bring, is such."""
    fine = isinstance(text, str) and bool(text.strip())
    try:
        str(text).encode()
    except UnicodeEncodeError:
        fine = False
    if not fine:
        raise EvaluationError(
            f"an empty or non-text question or candidate: {text!r:.200}",
            expected="non-empty strings of whole Unicode characters",
            mend="leave it out",
        )


def unrounded(states: Tensor) -> torch.autocast:
    """The context in which a head turns states into logits, in fp32 whatever the precision.

    A head is a hundredth of the work, and of bf16's 8 bits many candidates have equal scores.
    """
    return torch.autocast(states.device.type, enabled=False)


def probability(logits: Tensor) -> Tensor:
    """Probability of the positive class, shape [...], from logits [..., 1 or 2]."""
    logits = logits.float()
    return logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0].sigmoid()
