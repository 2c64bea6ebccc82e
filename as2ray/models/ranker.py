"""The interface of all rankers: scores pairs of texts, ranks the candidates of questions."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from itertools import chain, repeat
from numbers import Real
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from as2ray.cascade.pruning import DropRatios, Pruning, StagedScores, log_odds
from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.errors import ConfigError, EvaluationError, validate_arguments
from as2ray.models.bm25_stage import BM25Selection
from as2ray.models.calibration import (
    UNCHANGED,
    Calibration,
    CalibrationMethod,
    CalibrationResult,
    MinPrecision,
    cross_fit,
    fit_calibration,
)
from as2ray.models.encoder.cpu_parallel import (
    REPRODUCIBLE_THREADS,
    Item,
    Result,
    balanced_budget,
    parallel_map,
)
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.encoder.int8 import ActivationRanges
from as2ray.models.precision import Dtype, dtype_name, resolve_dtype
from as2ray.models.time_budget import OVERHEAD_MS, RankerSpeed, TimedPass, measure_speed
from as2ray.outputs import RankedCandidate, Ranking, output_names
from as2ray.tables.reliability import measure_abstention, measure_reliability
from as2ray.tables.schema import check_is_table, question_indices
from as2ray.tables.score_checks import check_binary_labels
from as2ray.text.input_checks import check_text, check_top_k
from as2ray.text.tokenization import PairTokenizer

Activation = Literal["sigmoid", "identity"]
"""What the score of a candidate is in a ranking: a probability, or its logit."""

CONFIG_KEY = "as2ray"
"""Entry of `config.json` for settings that transformers does not have: kind of ranker, exits."""

GPU_THREADS = 2
"""Threads that start the operations of packed batches on a GPU."""

NUM_FOLDS = 5
"""Parts of the questions on which a calibration is tried that was fitted on the others."""


BEFORE_BATCH: ContextVar[Callable[[], None] | None] = ContextVar("before_batch", default=None)
"""Called in the thread that scores before each packed batch, or part of a pass: a service lets
smaller requests go first, or raises an error to stop."""


class Ranker(nn.Module, ABC):
    """A network with its tokenizer that scores pairs and ranks candidates.

    This class scores text. `PackedRanker` scores token sequences, too.

    Args:
        tokenizer: Turns pairs into tokens.
        max_batch_tokens: Maximum number of tokens of a packed batch in scoring.
    """

    network: PreTrainedModel
    encoders: Sequence[Encoder]
    """One encoder; or one of each independent ranker, or the body's and those of its heads."""
    exit_layers: tuple[int, ...] = ()
    """Number of layers below each exit, ascending; empty if the ranker has one stage."""
    keeps_budget = False
    """Whether it can rank within a time budget."""

    def __init__(self, tokenizer: PairTokenizer, max_batch_tokens: int = 8_192) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.hf_tokenizer: PreTrainedTokenizerBase | None = None
        self.max_batch_tokens = max_batch_tokens
        self.dtype: Dtype = "auto"
        self.allow_parallel = True
        """Whether a CPU may score several packed batches at the same time."""
        self.is_reproducible = False
        """Whether a CPU's scores are the same with any number of threads: batches then follow from
        the pairs alone, and one core computes each."""
        self.use_fused_layers = False
        """Whether scoring runs fused layers, which are faster than those of transformers and equal
        to them except for rounding; `load` enables them."""
        self.activation: Activation = "sigmoid"
        """What `rank` shows of a candidate without calibration; all other methods give
        probabilities."""
        self.activation_ranges: tuple[ActivationRanges, ...] = ()
        """Ranges of the products' inputs of each encoder, which int8 needs. Empty if they were not
        fitted."""
        self.calibration: tuple[Calibration, ...] = ()
        self.plain_calibration: tuple[Calibration, ...] = ()
        """Instead of `calibration`, of scores in which BM25 has no part; empty if both are one."""
        """Calibration of each stage; without one, scores are returned as they are."""
        self.speeds: dict[int, RankerSpeed] = {}
        """Measured speed with each number of threads, by which rankings with a budget are
        planned."""
        self.threshold: float | None = None
        """Calibrated score below which a question should get no answer."""

    @abstractmethod
    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Returns the scores of every stage without dropping; float32, shape [pairs, stages]."""

    @abstractmethod
    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""

    def __repr__(self) -> str:
        num_weights = sum(weights.numel() for weights in self.parameters())
        exits = f", exits after layers {list(self.exit_layers)}" if self.exit_layers else ""
        return (
            f"{type(self).__name__}({num_weights / 1e6:.1f}M weights{exits}, "
            f"at most {self.tokenizer.max_length} tokens, {self.device})"
        )

    @property
    def encoder(self) -> Encoder:
        """The first encoder."""
        return self.encoders[0]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of a packed batch in scoring; the longest pair always fits."""
        return max(self.max_batch_tokens, self.tokenizer.max_length)

    @property
    def num_threads(self) -> int:
        """Number of packed batches that are scored at the same time: torch's threads on a CPU."""
        use_cores = self.allow_parallel and self.device.type == "cpu"
        return torch.get_num_threads() if use_cores else 1

    @property
    def speed(self) -> RankerSpeed | None:
        """Measured speed with the present number of threads; None before the first measurement.

        A number of threads that was not measured starts with the speed of another one.
        """
        if self.num_threads not in self.speeds and self.speeds:
            self.speeds[self.num_threads] = deepcopy(next(iter(self.speeds.values())))
        return self.speeds.get(self.num_threads)

    @speed.setter
    def speed(self, speed: RankerSpeed) -> None:
        self.speeds[self.num_threads] = speed

    def balanced_budget(self, lengths: np.ndarray) -> int:
        """Returns the token budget that divides sequences evenly among the threads.

        Args:
            lengths: Number of tokens of each sequence, shape [sequences].
        """
        num_threads = REPRODUCIBLE_THREADS if self._one_core_each else self.num_threads
        return balanced_budget(lengths, self.token_budget, num_threads)

    @property
    def _one_core_each(self) -> bool:
        return self.is_reproducible and self.device.type == "cpu"

    def map_batches(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[Result]:
        """Yields the result of a function for each packed batch, or part of a pass, in order.

        Args:
            function: Called in inference mode and with this ranker's dtype, possibly in another
                thread.
            items: Its arguments, taken as they are needed.
        """

        def run(item: Item) -> Result:
            with torch.inference_mode(), self.autocast():
                return function(item)

        before_batch = BEFORE_BATCH.get()
        if before_batch is not None:
            items = (item for item in items if before_batch() is None)
        # On a GPU one thread prepares a batch while another waits for the scores of the last.
        num_threads = GPU_THREADS if self.device.type == "cuda" else self.num_threads
        return parallel_map(run, items, num_threads, self._one_core_each)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Sets whether the backward pass recomputes activations instead of storing them."""
        for encoder in self.encoders:
            encoder.gradient_checkpointing = enabled

    @property
    def resolved_dtype(self) -> torch.dtype:
        """The format that `dtype` means for this ranker.

        Raises:
            ConfigError: It is int8, and the hardware or the ranges are not there.
        """
        has_ranges = self.use_fused_layers and bool(self.activation_ranges)
        return resolve_dtype(self.dtype, self.device, has_ranges)

    @property
    def dtype_name(self) -> str:
        """The name of `resolved_dtype`: what `auto` has picked."""
        return dtype_name(self.resolved_dtype)

    def autocast(self) -> torch.autocast:
        """Returns the autocast context of this ranker's dtype."""
        dtype = self.resolved_dtype
        is_enabled = dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, dtype if is_enabled else None, is_enabled)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Disables dropout and sets this ranker's dtype; restores the training mode at the end."""
        was_training = self.training
        if was_training:
            self.eval()
        dtype = self.resolved_dtype
        ranges = self.activation_ranges if dtype == torch.int8 else repeat(None)
        try:
            with self.autocast(), ExitStack() as stack:
                for encoder, encoder_ranges in zip(self.encoders, ranges):
                    if self.use_fused_layers:
                        stack.enter_context(encoder.fused_inference(dtype, encoder_ranges))
                yield
        finally:
            if was_training:
                self.train()

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Scores pairs as `rank` does; a ranker with several stages drops candidates in between.

        Args:
            questions: Question of each pair, shape [pairs].
            candidates: Candidate of each pair, shape [pairs].
            question_index: Index of each pair's question, from 0, shape [pairs]; candidates of the
                same question compete.
            drop_ratios: Drop ratio of all stages or of each; an array [questions, stages - 1] sets
                them for each question. By default the checkpoint's.

        Raises:
            ConfigError: Drop ratios for a ranker of one stage, or drop ratios out of their range.
        """
        self.check_no_drop_ratios(drop_ratios)
        return StagedScores(self.predict_exits(questions, candidates)[:, 0])

    def resolve_pruning(
        self, drop_ratios: DropRatios | Pruning | None, num_questions: int
    ) -> Pruning | None:
        """Returns what is dropped of each question; None for a ranker of one stage.

        Raises:
            ConfigError: Drop ratios that do not fit the ranker.
        """
        self.check_no_drop_ratios(drop_ratios)
        return None

    def select_by_bm25(self, question: str, candidates: Sequence[str]) -> BM25Selection | None:
        """Returns which candidates of a question enter the first layer; None if all do."""
        return None

    def check_no_drop_ratios(self, drop_ratios: DropRatios | Pruning | None) -> None:
        """Raises an error if drop ratios are given to a ranker of one stage."""
        if drop_ratios is not None:
            name = type(self).__name__
            raise ConfigError(f"drop ratios {drop_ratios} need several stages, but {name} has one")

    def predict_table(self, table: pa.Table, drop_ratios: DropRatios | None = None) -> StagedScores:
        """Scores a candidates table as `predict_pairs` does.

        Args:
            table: A table with the columns `question_id`, `question` and `candidate`.
            drop_ratios: See `predict_pairs`.

        Raises:
            ConfigError: It is no such table.
        """
        check_is_table(table, ("question_id", "question", "candidate"))
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        return self.predict_pairs(*texts, question_indices(table), drop_ratios)

    def predict_stage_scores(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> np.ndarray:
        """Returns the scores that each stage gives in a ranking; float32, shape [pairs, stages].

        Args:
            questions: The question of each pair.
            candidates: The candidate of each pair.
            question_index: Number of each pair's question.
        """
        return self.predict_exits(questions, candidates)

    def rank_many(
        self,
        questions_with_candidates: Iterable[tuple[str, Sequence[str]]],
        drop_ratios: DropRatios | None = None,
    ) -> list[list[RankedCandidate]]:
        """Ranks the candidates of several questions, packed together.

        Args:
            questions_with_candidates: Each question with its candidates.
            drop_ratios: See `predict_pairs`.

        Returns:
            The candidates of each question, best first.

        Raises:
            ConfigError: There is nothing to iterate over, an item is no pair, but a dict, or a
                question alone, as of a dict (pass its `items()`), or the drop ratios do not fit
                the ranker.
            EvaluationError: A text is empty or not valid Unicode, or candidates are no list, but a
                string, a dict or a data frame.
        """
        questions, candidates = [], []
        if not isinstance(questions_with_candidates, Iterable):
            kind = type(questions_with_candidates).__name__
            raise ConfigError(f"expected pairs of a question and its candidates, not {kind}")
        for pair in questions_with_candidates:
            is_pair = isinstance(pair, Sized) and len(pair) == 2
            if isinstance(pair, str | Mapping) or not is_pair:
                kind = " a question alone:" if isinstance(pair, str) else ""
                problem = f"expected a question and its candidates, not{kind} {pair!r:.200}"
                raise ConfigError(problem, fix="pass pairs; of a dict, its items()")
            question, texts = pair
            questions.append(question)
            candidates.append(as_candidate_list(texts))
        sizes = [len(texts) for texts in candidates]
        repeated_questions = list(chain.from_iterable(map(repeat, questions, sizes)))
        all_candidates = [text for texts in candidates for text in texts]
        for text in [*questions, *all_candidates]:
            check_text(text)
        if np.ndim(drop_ratios) == 2 and len(np.asarray(drop_ratios)) == len(questions):  # type: ignore[arg-type]
            # `predict_pairs` does not see questions without candidates at the end.
            num_questions = int(np.max(np.flatnonzero(sizes), initial=-1)) + 1
            drop_ratios = np.asarray(drop_ratios)[:num_questions]
        question_index = np.repeat(np.arange(len(questions)), sizes)
        staged_scores = self.predict_pairs(
            repeated_questions, all_candidates, question_index, drop_ratios
        )
        return self.build_rankings(candidates, staged_scores)

    def build_rankings(
        self, candidates: Sequence[Sequence[str]], staged_scores: StagedScores
    ) -> list[list[RankedCandidate]]:
        """Sorts the candidates of each question, best first, and calibrates their scores.

        Args:
            candidates: The candidates of each question.
            staged_scores: This ranker's scores of all candidates, question by question.
        """
        ends = np.cumsum([len(texts) for texts in candidates])
        return [
            self._build_ranking(texts, staged_scores, end - len(texts))
            for texts, end in zip(candidates, ends)
        ]

    def rank(
        self,
        question: str,
        candidates: Sequence[str],
        top_k: int | None = None,
        drop_ratios: DropRatios | None = None,
        budget_ms: float | None = None,
    ) -> Ranking:
        """Ranks the candidates of one question, best first.

        With a budget, as many candidates pass each exit as there is time for: first all that are
        given, in their order, then the best ones. Those for which there was no time keep their
        order below the others, with the exit layer 0.

        Args:
            question: The question.
            candidates: Sentences, at most a few hundred.
            top_k: Number of candidates to return; by default all.
            drop_ratios: Drop ratio after every stage but the last, as one number or one per stage.
                By default the checkpoint's. A ranker of one stage takes none.
            budget_ms: Milliseconds from the call in which the ranking should be made. The first
                ranking with a budget prepares the network before they start.

        Raises:
            ConfigError: `top_k` is below 1 or no integer, the budget is no number above 0 or is
                infinite, the ranker cannot keep one, or the drop ratios do not fit it.
            EvaluationError: See `rank_many`.
        """
        check_top_k(top_k)
        if budget_ms is not None:
            started_at = perf_counter()
            if isinstance(budget_ms, np.generic):
                budget_ms = budget_ms.item()  # numpy warns of a comparison with a larger format
            is_number = isinstance(budget_ms, Real) and not isinstance(budget_ms, bool)
            if not (is_number and 0 < budget_ms <= sys.float_info.max):
                problem = f"budget_ms={budget_ms!r}, but it must be a number above 0, and finite"
                raise ConfigError(problem)
            texts = as_candidate_list(candidates)
            for text in (question, *texts):
                check_text(text)
            self.check_keeps_budget()
            pruning = self.resolve_pruning(drop_ratios, 1)
            if texts and self.speed is None:
                self.speed = measure_speed(self, question, texts)
                started_at = perf_counter()
            ends_at = started_at + (budget_ms - OVERHEAD_MS) / 1e3
            selects_by_bm25 = drop_ratios is None
            timed_pass = TimedPass(
                self, question, texts, pruning, ends_at, selects_by_bm25=selects_by_bm25
            )
            staged_scores = timed_pass.run()
            ranking = Ranking(self.build_rankings([texts], staged_scores)[0][:top_k])
            duration_ms = 1e3 * (perf_counter() - started_at)
            ranking.budget_exceeded_ms = max(0.0, duration_ms - budget_ms)
            return ranking
        return Ranking(self.rank_many([(question, candidates)], drop_ratios)[0][:top_k])

    @validate_arguments
    def calibrate(
        self,
        table: pa.Table,
        method: CalibrationMethod = "temperature",
        min_precision: MinPrecision = 0.5,
        *,
        high_confidence: bool = False,
    ) -> CalibrationResult:
        """Fits the calibration of each stage and the threshold for abstaining.

        A stage whose expected calibration error grows on questions that are held out keeps its
        scores. Where no threshold is precise enough, none is stored.

        Args:
            table: A development split; questions without an answer count, too.
            method: Kind of calibration.
            min_precision: Minimum share of correct answers among those above the threshold.
            high_confidence: Whether new questions reach it with a probability of 90 %; see
                `measure_abstention`.

        Raises:
            EvaluationError: All labels are equal, or they are those of one question.
            ConfigError: An unknown method, a precision outside (0, 1], or a table without labels.
        """
        check_is_table(table, ("question_id", "question", "candidate", "label"))
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        labels = table["label"].to_numpy()
        check_binary_labels(labels)
        question_index = question_indices(table)
        num_questions = int(question_index.max()) + 1  # rows of a question need not be adjacent
        if num_questions == 1:
            problem = "the labels are those of one question, so that none can be held out"
            raise EvaluationError(problem, fix="give a table with more questions")
        folds = np.random.default_rng(0).permutation(num_questions) % NUM_FOLDS
        before, after, calibrations = [], [], []
        for scores in self.predict_stage_scores(*texts, question_index).T:
            held_out = cross_fit(scores, labels, folds[question_index], method)
            before.append(measure_reliability(scores, labels))
            after.append(measure_reliability(held_out, labels))
            is_better = after[-1].ece <= before[-1].ece
            calibrations.append(fit_calibration(scores, labels, method) if is_better else UNCHANGED)
        self.calibration, self.plain_calibration = tuple(calibrations), ()
        staged_scores = self.predict_table(table)
        order = np.lexsort((-staged_scores.sort_keys, question_index))
        top_rows = order[np.flatnonzero(np.diff(question_index[order], prepend=-1))]
        scores = self._apply_calibration(staged_scores)
        abstention = measure_abstention(
            scores[top_rows], labels[top_rows], min_precision, high_confidence=high_confidence
        )
        self.threshold = abstention.threshold
        names = output_names(self.exit_layers, len(before))
        return CalibrationResult(
            tuple(before), tuple(after), abstention, tuple(names), num_questions
        )

    def check_keeps_budget(self) -> None:
        """Raises an error if this ranker cannot keep a time budget."""
        if not self.keeps_budget:
            raise ConfigError(
                f"{type(self).__name__} cannot keep a time budget",
                fix="choose a cascade, or a pointwise ranker",
            )

    def _apply_calibration(self, staged_scores: StagedScores) -> np.ndarray:
        scores, stages = staged_scores.scores, staged_scores.stage_index
        if not self.calibration:
            return scores
        stages = np.zeros(len(scores), int) if stages is None else stages
        calibrated = np.array(scores, np.float64)  # some have no stage: they were not scored
        is_plain = np.zeros(len(scores), bool)
        if self.plain_calibration:
            is_plain = ~is_plain if staged_scores.has_bm25 is None else ~staged_scores.has_bm25
        for group, of_stages in ((~is_plain, self.calibration), (is_plain, self.plain_calibration)):
            for stage, calibration in enumerate(of_stages):
                rows = group & (stages == stage)
                calibrated[rows] = calibration(scores[rows])
        return calibrated

    def _build_ranking(
        self, candidates: Sequence[str], staged_scores: StagedScores, start: int
    ) -> list[RankedCandidate]:
        """Ranks candidates whose scores begin at row `start`."""
        part = staged_scores.select(slice(start, start + len(candidates)))
        if not np.isfinite(part.scores).all():
            num_wrong = int(np.sum(~np.isfinite(part.scores)))
            raise EvaluationError(
                f"{num_wrong} of {len(candidates)} scores are not finite",
                fix="score in fp32, or train again with a lower learning rate",
            )
        order = np.argsort(-part.sort_keys, kind="stable")
        scores = self._apply_calibration(part)
        is_logit = self.activation == "identity" and not self.calibration
        if is_logit:
            scores = log_odds(part.scores) if part.logits is None else part.logits
        layer_of_stage = dict(enumerate(self.exit_layers)) | {NOT_SCORED: 0}
        stages = part.stage_index
        layers = [None] * len(scores) if stages is None else [*map(layer_of_stage.get, stages)]
        return [
            RankedCandidate(int(i), float(scores[i]), candidates[i], layers[i], is_logit)
            for i in order
        ]


def as_candidate_list(candidates: Sequence[str]) -> list[str]:
    """Returns candidates as a list.

    Raises:
        EvaluationError: It is no list: one text, whose characters would be ranked; a dict or a data
            frame, whose keys or columns would be; a set, which has no order for the indices of
            answers; or nothing to iterate over.
    """
    if isinstance(candidates, str | bytes):
        raise EvaluationError(
            f"candidates must be a list of sentences, not one text: {candidates!r:.200}",
            fix="put the text into a list, or split it into its sentences",
        )
    has_items = isinstance(candidates, Iterable) and getattr(candidates, "ndim", 1) == 1
    if isinstance(candidates, Mapping | set | frozenset) or not has_items:
        kind = type(candidates).__name__
        raise EvaluationError(
            f"candidates must be a list of sentences, not of the type {kind}",
            fix="pass the texts alone, such as one column of a data frame",
        )
    # Columns, such as those of `load_table`, have items of their own types.
    if isinstance(candidates, pa.Array | pa.ChunkedArray):
        return list(candidates.to_pylist())
    return list(candidates.tolist() if isinstance(candidates, np.ndarray) else candidates)


def positive_probability(logits: Tensor) -> Tensor:
    """Returns the probability of the positive class, shape [...], of logits [..., 1 or 2]."""
    logits = logits.float()
    return logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0].sigmoid()
