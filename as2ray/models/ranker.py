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

from as2ray.cascade.pruning import DropRatios, StagedScores
from as2ray.errors import ConfigError, EvaluationError
from as2ray.models.calibration import (
    Calibration,
    CalibrationMethod,
    abstention_threshold,
    check_min_precision,
    fit_calibration,
)
from as2ray.models.encoder.cpu_parallel import Item, Result, balanced_budget, parallel_map
from as2ray.models.encoder.encoder import Encoder
from as2ray.outputs import RankedCandidate
from as2ray.tables.schema import question_indices
from as2ray.tables.score_checks import check_binary_labels
from as2ray.text.packing import PackedBatch, TokenSequences, pack_sequences
from as2ray.text.tokenization import PairTokenizer

CONFIG_KEY = "as2ray"
"""Entry of `config.json` for what transformers has no word for: kind of ranker, lengths, exits."""

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
"""Number format of the matrix products."""


def resolve_dtype(dtype: Dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype that `precision` means on a device.

    `auto` is bf16 where the hardware multiplies it natively (AVX512-BF16 or AMX on a CPU, Ampere
    or later on a GPU), and fp32 elsewhere.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype in dtypes:
        return dtypes[dtype]
    if dtype != "auto":
        raise ConfigError(
            f"precision {dtype!r}; expected auto, fp32, bf16 or fp16",
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
    exit_layers: tuple[int, ...] = ()
    """Layers after which candidates may leave, ascending; none in a ranker of one piece."""
    text_only = False
    """Whether it scores text alone, by `score_pairs`, and no sequences of one tokenizer."""

    def __init__(self, tokenizer: PairTokenizer, max_batch_tokens: int = 8_192) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.hf_tokenizer: PreTrainedTokenizerBase | None = None
        self.max_batch_tokens = max_batch_tokens
        self.dtype: Dtype = "auto"
        self.allow_parallel = True
        """Whether a CPU may score several packed batches at a time."""
        self.use_fused_layers = False
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
    def token_budget(self) -> int:
        """Most tokens of a packed batch when scoring: room for one sequence at least."""
        return max(self.max_batch_tokens, self.tokenizer.max_length)

    @property
    def num_threads(self) -> int:
        """How many packed batches are scored at a time: on a CPU as many as torch has threads."""
        cores = self.allow_parallel and self.device.type == "cpu"
        return torch.get_num_threads() if cores else 1

    def balanced_budget(self, lengths: np.ndarray) -> int:
        """Token budget of batches in which sequences of these lengths keep all lanes busy."""
        return balanced_budget(lengths, self.token_budget, self.num_threads)

    def pack(self, encoded: TokenSequences) -> Iterator[PackedBatch]:
        """Sequences as batches to be scored; see `as2ray.text.packing.pack`."""
        return pack_sequences(encoded, self.balanced_budget(encoded.lengths))

    def map_batches(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[Result]:
        """What `work` says of each packed batch, or part of a pass, in order.

        Args:
            work: Called in inference mode and this ranker's precision, perhaps in another thread.
            parts: Taken as they are needed.
        """

        def one(part: Item) -> Result:
            with torch.inference_mode(), self.autocast():
                return function(part)

        return parallel_map(one, items, self.num_threads)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass recomputes activations instead of keeping them."""
        for encoder in self.encoders:
            encoder.gradient_checkpointing = enabled

    def autocast(self) -> torch.autocast:
        """The context in which this ranker's precision holds."""
        dtype = resolve_dtype(self.dtype, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Without dropout, in this ranker's precision; training mode comes back afterwards."""
        was_training = self.training
        if was_training:
            self.eval()
        dtype = resolve_dtype(self.dtype, self.device)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.autocast())
                for encoder in self.encoders if self.use_fused_layers else ():
                    stack.enter_context(encoder.fused_inference(dtype))
                yield
        finally:
            if was_training:
                self.train()

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Probability of being an answer, nothing dropped, shape [sequences]."""
        return positive_probability(self(batch))

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Logits of (not an answer, answer), nothing dropped, shape [sequences, 2]."""
        logits: Tensor = self(batch)
        return logits if logits.shape[-1] == 2 else functional.pad(logits, (1, 0))

    def predict_logits(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Logits of (not an answer, answer) by row number; float32, shape [rows, 2]."""
        with torch.inference_mode():
            return self._predict_by_row(
                batches, (num_rows, 2), lambda batch: self.binary_logits(batch).float()
            )

    def checkpoint_settings(self) -> dict[str, Any]:
        """What its checkpoint says of it beside the network's configuration and lengths."""
        return {"ranker": "pointwise"}

    @torch.inference_mode()
    def predict_scores(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Probability of being an answer, by row number, nothing dropped; float32, shape [rows].

        Args:
            batches: Packed batches; `of_sequence["row"]` says where each score belongs.
            rows: Number of rows; one that no batch holds is NaN.
        """
        return self._predict_by_row(batches, (num_rows,), self.predict_batch)

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Scores as `rank` gives them, with candidates dropped on the way where the ranker does.

        Args:
            questions: Shape [pairs].
            candidates: Shape [pairs].
            question: Number of each pair's question, from 0: whose candidates compete, [pairs].
            drop: Drop ratio, of all stages or of each; an array [questions, stages - 1] gives
                each question its own. By default the checkpoint's.
        """
        return self.predict_sequences(
            self.tokenizer.encode(questions, candidates), question_index, drop_ratios
        )

    @torch.inference_mode()
    def predict_sequences(
        self,
        encoded: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """`score_pairs` of pairs that are tokens already."""
        self.check_no_drop_ratios(drop_ratios)
        return StagedScores(self.predict_scores(self.pack(encoded), len(encoded)))

    def check_no_drop_ratios(self, drop_ratios: DropRatios | None) -> None:
        """Of a ranker of one stage: drop ratios mean nothing to it."""
        if drop_ratios is not None:
            raise ConfigError(
                f"drop ratios {drop_ratios} for a {type(self).__name__}"
                "; expected a ranker of several stages: a cascade or a sequential ranker",
                fix="leave the drop ratios out",
            )

    def predict_table(self, table: pa.Table, drop_ratios: DropRatios | None = None) -> StagedScores:
        """`score_pairs` of a candidates table.

        Args:
            table: With the columns `question_id`, `question` and `candidate`.
            drop: Other drop ratios than the checkpoint's, where the ranker has several stages.
        """
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        return self.predict_pairs(*texts, question_indices(table), drop_ratios)

    def _predict_by_row(
        self,
        batches: Iterable[PackedBatch],
        shape: tuple[int, ...],
        predict: Callable[[PackedBatch], Tensor],
    ) -> np.ndarray:
        def scored(batch: PackedBatch) -> tuple[PackedBatch, np.ndarray]:
            return batch, predict(batch).cpu().numpy()

        scores = np.full(shape, np.nan, np.float32)
        with self.scoring():
            for batch, found in self.map_batches(scored, batches):
                scores[batch.sequence_data["row"]] = found
        return scores

    def rank_many(
        self,
        questions_with_candidates: Iterable[tuple[str, Sequence[str]]],
        drop_ratios: DropRatios | None = None,
    ) -> list[list[RankedCandidate]]:
        """Rankings of several questions' candidates, packed together.

        Args:
            pairs: (question, candidates) of each question.
            drop: Other drop ratios than the checkpoint's; see `score_pairs`.

        Returns:
            For each question its candidates, best first.
        """
        questions_with_candidates = [
            (question, as_candidate_list(candidates))
            for question, candidates in questions_with_candidates
        ]
        sizes = [len(candidates) for _, candidates in questions_with_candidates]
        if np.ndim(drop_ratios) == 2 and len(np.asarray(drop_ratios)) == len(
            questions_with_candidates
        ):  # type: ignore[arg-type]
            drop_ratios = np.asarray(drop_ratios)[
                : int(np.max(np.flatnonzero(sizes), initial=-1)) + 1
            ]
        questions = [q for q, candidates in questions_with_candidates for _ in candidates]
        texts = [text for _, candidates in questions_with_candidates for text in candidates]
        for text in [*(q for q, _ in questions_with_candidates), *texts]:
            check_text(text)
        scored = self.predict_pairs(
            questions,
            texts,
            np.repeat(np.arange(len(questions_with_candidates)), sizes),
            drop_ratios,
        )
        return self.build_rankings(
            [candidates for _, candidates in questions_with_candidates], scored
        )

    def build_rankings(
        self, candidates: Sequence[Sequence[str]], staged_scores: StagedScores
    ) -> list[list[RankedCandidate]]:
        """The candidates of each question, best first.

        Args:
            candidates: Of each question.
            scored: What this ranker said of all of them, question after question.
        """
        ends = np.cumsum([len(own) for own in candidates])
        return [
            self._build_ranking(own, staged_scores, end - len(own))
            for own, end in zip(candidates, ends)
        ]

    def rank(
        self,
        question: str,
        candidates: Sequence[str],
        top_k: int | None = None,
        drop_ratios: DropRatios | None = None,
    ) -> list[RankedCandidate]:
        """The candidates of one question, best first.

        Args:
            question: The question.
            candidates: Sentences, at most a few hundred.
            top_k: How many to return; all by default.
            drop: Other drop ratios than the checkpoint's, where the ranker has several stages.
        """
        check_top_k(top_k)
        return self.rank_many([(question, candidates)], drop_ratios)[0][:top_k]

    def calibrate(
        self, table: pa.Table, method: CalibrationMethod = "temperature", min_precision: float = 0.5
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
        check_min_precision(min_precision)
        check_binary_labels(label)
        self.calibration = tuple(
            fit_calibration(of, label, method) for of in self.predict_exits(*texts).T
        )
        scored, question = self.predict_table(table), question_indices(table)
        order = np.lexsort((-scored.sort_keys, question))
        first = order[np.flatnonzero(np.diff(question[order], prepend=-1))]
        best = self._apply_calibration(scored.scores, scored.stage_index)[first]
        self.threshold = abstention_threshold(best, label[first], min_precision)

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What every stage says of every pair, nothing dropped; float32, shape [pairs, stages]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        return self.predict_scores(batches, len(questions))[:, None]

    def _apply_calibration(self, scores: np.ndarray, stage_index: np.ndarray | None) -> np.ndarray:
        if not self.calibration:
            return scores
        which = np.zeros(len(scores), int) if stage_index is None else stage_index
        found = np.empty(len(scores))
        for number, calibration in enumerate(self.calibration):
            found[which == number] = calibration(scores[which == number])
        return found

    def _build_ranking(
        self, candidates: Sequence[str], staged_scores: StagedScores, start: int
    ) -> list[RankedCandidate]:
        """The ranking of candidates whose scores stand at `start`."""
        rows = slice(start, start + len(candidates))
        score = staged_scores.scores[rows]
        if not np.isfinite(score).all():
            raise EvaluationError(
                f"{int(np.sum(~np.isfinite(score)))} of {len(score)} scores are not finite"
                "; expected finite scores",
                fix="score in fp32, or train again with a lower learning rate",
            )
        order = np.argsort(-staged_scores.sort_keys[rows], kind="stable")
        score = self._apply_calibration(
            score, None if staged_scores.stage_index is None else staged_scores.stage_index[rows]
        )
        layer = [None] * len(score)
        if staged_scores.stage_index is not None:
            layer = [self.exit_layers[stage] for stage in staged_scores.stage_index[rows]]
        return [RankedCandidate(int(i), float(score[i]), candidates[i], layer[i]) for i in order]


def as_candidate_list(candidates: Sequence[str]) -> list[str]:
    """Refuses one text, whose characters would be ranked."""
    if isinstance(candidates, str):
        raise EvaluationError(
            f"one text as candidates: {candidates!r:.200}; expected a list of sentences",
            fix="put it into a list, or split it into its sentences",
        )
    return list(candidates)


def check_top_k(top_k: int | None) -> None:
    """Refuses to return none of a ranking, or all but the last."""
    if top_k is not None and top_k < 1:
        raise ConfigError(
            f"top_k={top_k}; expected a number above 0",
        )


def check_text(text: object) -> None:
    """Refuses what no tokenizer can read: half a surrogate pair, as JSON can bring, is such."""
    fine = isinstance(text, str) and bool(text.strip())
    try:
        str(text).encode()
    except UnicodeEncodeError:
        fine = False
    if not fine:
        raise EvaluationError(
            f"an empty or non-text question or candidate: {text!r:.200}"
            "; expected non-empty strings of whole Unicode characters",
        )


def fp32_head(states: Tensor) -> torch.autocast:
    """The context in which a head turns states into logits, in fp32 whatever the precision.

    A head is a hundredth of the work, and of bf16's 8 bits many candidates have equal scores.
    """
    return torch.autocast(states.device.type, enabled=False)


def positive_probability(logits: Tensor) -> Tensor:
    """Probability of the positive class, shape [...], from logits [..., 1 or 2]."""
    logits = logits.float()
    return logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0].sigmoid()
