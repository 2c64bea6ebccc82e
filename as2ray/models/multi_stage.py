"""Rankers of several stages; each scores the candidates that the stage before has kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from as2ray.cascade.margins import Margins
from as2ray.cascade.pruning import (
    DropRatios,
    Pruning,
    Rounding,
    StagedScores,
    StageScorer,
    expand_drop_ratios,
    lower_scores,
    prune,
)
from as2ray.errors import ConfigError
from as2ray.models.bm25_stage import (
    BM25Scorer,
    BM25Selection,
    check_bm25_weights,
    enter_all,
    select_by_bm25,
)
from as2ray.models.encoder.cpu_parallel import parallel_map
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.ranker import CONFIG_KEY, GPU_THREADS, positive_probability
from as2ray.text.packing import PackedBatch, TokenSequences

GPU_PASS_FACTOR = 8
"""How many times as many tokens as on a CPU a pass has on a GPU."""


@dataclass
class StagePass(ABC):
    """A pass of whole questions through the stages of a ranker, which `prune` runs."""

    ranker: Any
    sequences: TokenSequences
    """Tokenized pairs."""
    rows: np.ndarray
    """Indices of the sequences in this pass, longest first, shape [n]."""
    question_index: np.ndarray
    """Index of the question of each, shape [n]."""

    @abstractmethod
    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Scores the remaining candidates with one stage; see `StageScorer.score`."""


class MultiStageRanker(PackedRanker):
    """A ranker whose `config.json` has `exit_layers` and `drop_ratios` in its entry `as2ray`.

    It may also have `rounding` (see `num_kept`; by default `floor`), `margins`, `bm25_margin` and
    `bm25_weights`.
    """

    stage_pass: type[StagePass]
    """Class of the passes through the stages."""
    max_pass_tokens = 65_536
    """Token budget of the questions that go through the stages together; a larger question goes
    alone. A GPU takes `GPU_PASS_FACTOR` times as many, and `GPU_THREADS` passes side by side,
    because it waits for the CPU after each stage."""

    @property
    def num_pass_threads(self) -> int:
        """Passes that run side by side: on a GPU one waits for scores while another computes."""
        return GPU_THREADS if self.device.type == "cuda" else 1

    @abstractmethod
    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Returns logits of stages without dropping, shape [sequences, requested stages, labels].

        Args:
            batch: Packed pairs.
            exit_indices: Indices of the requested stages, ascending; by default all.
        """

    @property
    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = getattr(self.network.config, CONFIG_KEY)
        return settings

    @property
    def drop_ratios(self) -> list[float]:
        """Drop ratio after each stage but the last; setting it removes the margins."""
        return list(self._settings["drop_ratios"])

    @drop_ratios.setter
    def drop_ratios(self, drop_ratios: DropRatios) -> None:
        expanded = self._expand_drop_ratios(drop_ratios)
        self._settings.update(drop_ratios=expanded.tolist(), margins=None)
        self._settings.update(bm25_margin=None, bm25_weights=None)

    @property
    def rounding(self) -> Rounding:
        """How many candidates a drop ratio drops; see `num_kept`."""
        rounding: Rounding = self._settings.get("rounding", "floor")
        return rounding

    @rounding.setter
    def rounding(self, rounding: Rounding) -> None:
        self._settings["rounding"] = rounding

    @property
    def margins(self) -> Margins | None:
        """Margins after each stage but the last, with their bound; None if ranks decide."""
        settings = self._settings.get("margins")
        return settings and Margins.from_settings(settings)

    @margins.setter
    def margins(self, margins: Margins) -> None:
        margins.check_stages(len(self.exit_layers))
        self.drop_ratios = 0.0
        self._settings["margins"] = asdict(margins)

    @property
    def bm25_margin(self) -> float | None:
        """How far BM25 of a candidate may lie below the best of its question's candidates.

        As with `margins`, the best is the `top_k`-th of them. Candidates farther below leave before
        the first layer. In log-odds of `list_probabilities`; None if all candidates enter it.
        Setting `margins` or `drop_ratios` removes it.
        """
        margin: float | None = self._settings.get("bm25_margin")
        return margin

    @bm25_margin.setter
    def bm25_margin(self, margin: float | None) -> None:
        self._settings["bm25_margin"] = margin

    @property
    def bm25_weights(self) -> tuple[float, ...]:
        """Weight of BM25 in the log-odds of each exit.

        An exit's log-odds are lowered by the weight times what BM25 of the candidate lies below the
        best of its question's candidates, as log-odds of `list_probabilities`. Setting `margins` or
        `drop_ratios` makes all weights 0.
        """
        weights = self._settings.get("bm25_weights")
        num_missing = len(self.exit_layers) - len(weights or ())
        return (*(weights or ()), *(0.0,) * num_missing)

    @bm25_weights.setter
    def bm25_weights(self, weights: Sequence[float]) -> None:
        check_bm25_weights(weights, len(self.exit_layers))
        self._settings["bm25_weights"] = list(weights)

    @property
    def uses_bm25(self) -> bool:
        """Whether BM25 drops candidates, or has a part in the scores that do."""
        return self.bm25_margin is not None or any(self.bm25_weights)

    def select_by_bm25(self, question: str, candidates: Sequence[str]) -> BM25Selection | None:
        """Returns what BM25 says of a question's candidates; None if it has no part in ranking."""
        if not self.uses_bm25:
            return None
        top_k = 1 if self.margins is None else self.margins.top_k
        margin = np.inf if self.bm25_margin is None else self.bm25_margin
        return select_by_bm25(question, candidates, margin, top_k)

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
        bm25_gaps: np.ndarray | None = None,
    ) -> StagedScores:
        """Scores pairs; see `Ranker.predict_pairs`. With drop ratios, BM25 has no part in it."""
        if bm25_gaps is not None or not self.uses_bm25 or drop_ratios is not None:
            return super().predict_pairs(
                questions, candidates, question_index, drop_ratios, bm25_gaps
            )
        selection = self._select_rows(questions, candidates, question_index)
        enters = selection.enters
        entered = super().predict_pairs(
            list(compress(questions, enters)),
            list(compress(candidates, enters)),
            question_index[enters],
            bm25_gaps=selection.gaps[enters],
        )
        return selection.complete(entered)

    def predict_stage_scores(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> np.ndarray:
        """See `Ranker.predict_stage_scores`; BM25 has its part in them."""
        scores = self.predict_exits(questions, candidates)
        if any(self.bm25_weights):
            gaps = self._select_rows(questions, candidates, question_index).gaps
            for stage, weight in enumerate(self.bm25_weights):
                if weight:
                    scores[:, stage] = lower_scores(scores[:, stage], weight * gaps)
        return scores

    def _select_rows(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> BM25Selection:
        """Returns what BM25 says of the candidates of several questions, in the order of rows."""
        selection = enter_all(len(candidates))
        order = np.argsort(question_index, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(question_index[order])) + 1):
            texts = [candidates[row] for row in rows]
            part = self.select_by_bm25(questions[rows[0]], texts) if texts else None
            if part is not None:
                selection.enters[rows], selection.scores[rows] = part.enters, part.scores
                selection.gaps[rows], selection.has_bm25[rows] = part.gaps, part.has_bm25
        return selection

    def resolve_pruning(
        self, drop_ratios: DropRatios | Pruning | None, num_questions: int
    ) -> Pruning:
        """Returns what is dropped of each question.

        Args:
            drop_ratios: Drop ratios, which replace the checkpoint's ratios and margins; by default
                the checkpoint's.
            num_questions: Number of questions.

        Raises:
            ConfigError: Invalid drop ratios, or some above 0 where the only exit is the last.
        """
        if isinstance(drop_ratios, Pruning):
            return drop_ratios
        margins = self.margins if drop_ratios is None else None
        ratios = self._expand_drop_ratios(
            self.drop_ratios if drop_ratios is None else drop_ratios, num_questions
        )
        if margins is None:
            return Pruning.by_rank(ratios, self.rounding)
        values = np.broadcast_to(margins.values, ratios.shape)
        return Pruning(ratios, values, margins.top_k, self.rounding)

    def _expand_drop_ratios(
        self, drop_ratios: DropRatios, num_questions: int | None = None
    ) -> np.ndarray:
        ratios = expand_drop_ratios(drop_ratios, len(self.exit_layers), num_questions)
        if len(self.exit_layers) == 1 and np.any(np.asarray(drop_ratios, np.float64) > 0):
            uses = "; its margin of BM25 drops candidates" if self.bm25_margin is not None else ""
            raise ConfigError(
                f"drop ratios {drop_ratios} would drop nothing: the only exit of this "
                f"{type(self).__name__} is its last layer{uses}",
                fix="leave them out, or give 0 to drop nothing",
            )
        return ratios

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return dict(self._settings)

    def predict_stages(
        self, batch: PackedBatch, exit_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Returns scores of stages without dropping, shape [sequences, requested stages]."""
        return positive_probability(self(batch, exit_indices))

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Returns the score of the last stage without dropping, shape [sequences]."""
        return self.predict_stages(batch, [len(self.exit_layers) - 1])[:, 0]

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Returns logits of the last stage's score, shape [sequences, 2].

        The last stage may have several heads, whose scores are averaged.
        """
        # A probability that rounds to 0 or 1 has no finite logit.
        eps = torch.finfo(torch.float32).eps
        probabilities = self.predict_batch(batch).clamp(eps, 1.0 - eps)
        return torch.stack([(-probabilities).log1p(), probabilities.log()], 1)

    @torch.inference_mode()
    def predict_sequences(
        self,
        sequences: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | Pruning | None = None,
        bm25_gaps: np.ndarray | None = None,
    ) -> StagedScores:
        """Scores tokenized pairs, dropping candidates in between; see `Ranker.predict_pairs`.

        `bm25_gaps` are those of `BM25Selection`; without them BM25 has no part in the scores. Where
        nothing can be dropped, only the last stage scores, as `predict_scores` does.
        """
        pruning = self.resolve_pruning(drop_ratios, int(question_index.max(initial=-1)) + 1)
        if pruning.drops_nothing:
            scores = self.predict_scores(self.pack(sequences), len(sequences))
            if bm25_gaps is not None and self.bm25_weights[-1]:
                scores = lower_scores(scores, self.bm25_weights[-1] * bm25_gaps)
            return StagedScores(scores, np.full(len(sequences), len(self.exit_layers) - 1))
        scores = np.full(len(sequences), np.nan, np.float32)
        stage_index = np.zeros(len(sequences), np.int64)
        max_tokens = self.max_pass_tokens * (GPU_PASS_FACTOR if self.device.type == "cuda" else 1)
        # Each pass has a copy of this thread's context, which a thread of the pool does not see.
        passes = (
            (copy_context(), rows)
            for rows in _split_into_passes(sequences.lengths, question_index, max_tokens)
        )

        def run_pass(context_and_rows: tuple[Context, np.ndarray]) -> tuple[np.ndarray, Any]:
            context, rows = context_and_rows
            with torch.inference_mode(), self.autocast():
                return context.run(
                    self._prune_pass, rows, sequences, question_index, pruning, bm25_gaps
                )

        with self.scoring():
            for rows, part in parallel_map(run_pass, passes, self.num_pass_threads):
                scores[rows], stage_index[rows] = part.scores, part.stage_index
        return StagedScores(scores, stage_index)

    def _prune_pass(
        self,
        rows: np.ndarray,
        sequences: TokenSequences,
        question_index: np.ndarray,
        pruning: Pruning,
        bm25_gaps: np.ndarray | None,
    ) -> tuple[np.ndarray, StagedScores]:
        """Scores the rows of one pass; returns them in the order of the scores."""
        rows = rows[np.argsort(-sequences.lengths[rows], kind="stable")]
        questions, pass_question_index = np.unique(question_index[rows], return_inverse=True)
        remaining, remaining_rows = sequences, rows
        if self.shares_prefixes and sequences.prefixes is not None:
            remaining = self.share_prefixes(sequences.take(rows))
            order = np.argsort(-remaining.lengths, kind="stable")
            rows, pass_question_index = rows[order], pass_question_index[order]
            remaining_rows = order
        stage_pass = self.stage_pass(self, remaining, remaining_rows, pass_question_index)
        scorer: StageScorer = stage_pass
        if bm25_gaps is not None:
            scorer = BM25Scorer(stage_pass, bm25_gaps[rows], self.bm25_weights)
        return rows, StagedScores(*prune(scorer, pruning.select(questions)))


def _split_into_passes(
    lengths: np.ndarray, question_index: np.ndarray, max_pass_tokens: int
) -> Iterator[np.ndarray]:
    """Yields the rows of whole questions with at most `max_pass_tokens` tokens.

    A question with more tokens is yielded alone.
    """
    if not len(question_index):
        return
    order = np.argsort(question_index, kind="stable")
    num_tokens = np.cumsum(lengths[order])
    ends = np.append(np.flatnonzero(np.diff(question_index[order])) + 1, len(order))
    start = 0
    for end, next_end in zip(ends, [*ends[1:], None]):
        tokens_before = num_tokens[start - 1] if start else 0
        if next_end is None or num_tokens[next_end - 1] - tokens_before > max_pass_tokens:
            yield order[start:end]
            start = end
