"""Ranks within a time budget: as many candidates pass each exit as there is time for.

An encoder without exits has no point at which it could stop, so a budget could only be kept by
passing fewer candidates. With exits, all candidates pass the first layers as far as there is time,
and the best of them the next ones. Work is done in slices of a few milliseconds, between which the
clock is looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from as2ray.cascade.pruning import Pruning, StagedScores
from as2ray.cascade.time_plan import NOT_SCORED, find_keep_ratio, num_affordable
from as2ray.models.encoder.packed_attention import SequenceLayout

SLICE_S: Final = (0.004, 0.05)
"""Bounds of the expected duration of a slice of work: a twentieth of the time that is left."""

OVERHEAD_MS: Final = 1.0
"""Milliseconds of a budget that are left for what is done around the scoring."""

NEW_WEIGHT: Final = 0.3
"""Weight of a new measurement in the mean of the speed."""


@dataclass
class LayerSpeed:
    """Measured speed of a ranker on this machine; each ranking with a budget updates it."""

    start_s_per_token: float | None = None
    """Tokenizing and embedding, and the layers of the first stage; None if not measured."""
    layer_s_per_token: float | None = None
    """One layer of a later stage; None if not measured."""

    def stage_s_per_token(self, stage_layers: Sequence[int]) -> list[float]:
        """Returns the expected seconds of each stage for a token.

        Args:
            stage_layers: Number of layers of each stage.
        """
        start = self.start_s_per_token or 0.0
        # Later stages may not have been reached for long: they are no slower than the first.
        layer = min(self.layer_s_per_token or np.inf, start / stage_layers[0])
        return [start, *(layer * num_layers for num_layers in stage_layers[1:])]

    def update(self, stage_index: int, num_layers: int, s_per_token: float) -> None:
        """Takes a measurement of a stage into the mean."""
        name = "layer_s_per_token" if stage_index else "start_s_per_token"
        value = s_per_token / num_layers if stage_index else s_per_token
        mean = getattr(self, name)
        setattr(self, name, value if mean is None else mean + NEW_WEIGHT * (value - mean))


class TimedPass:
    """A pass of one question's candidates through the stages of a ranker, until a deadline.

    Args:
        ranker: A pointwise ranker, which has one stage, or a cascade.
        question: The question.
        candidates: Its candidates; the first ones are scored if there is no time for all.
        pruning: What the ranker drops in any case.
        ends_at: Deadline, as `perf_counter` counts.
        time_share: Returns the share of the time until the deadline that this pass may take, from 0
            to 1; it is asked each time that the clock is looked at.
        selects_by_bm25: Whether the ranker's stage before the first layer may drop candidates.
    """

    def __init__(
        self,
        ranker: Any,
        question: str,
        candidates: Sequence[str],
        pruning: Pruning | None,
        ends_at: float,
        time_share: Callable[[], float] = lambda: 1.0,
        selects_by_bm25: bool = True,
    ) -> None:
        self.ranker, self.question, self.candidates = ranker, question, candidates
        self.pruning, self.speed = pruning, ranker.speed
        self.deadline = self.ends_at = ends_at
        """The pass ends before the deadline if others need the time."""
        self.selects_by_bm25 = selects_by_bm25
        self.time_share = time_share
        exits = ranker.exit_layers or (len(ranker.encoder),)
        self.stage_layers = [end - start for start, end in zip((0, *exits), exits)]
        self.scores = np.zeros(len(candidates), np.float32)
        self.stage_index = np.full(len(candidates), NOT_SCORED)
        self.lengths = np.zeros(len(candidates), np.int64)
        self.states: dict[int, Tensor] = {}
        """Packed states of each candidate after its last stage, if another one follows."""

    @torch.inference_mode()
    def run(self) -> StagedScores:
        """Scores as many candidates with as many stages as there is time for."""
        rows = np.arange(len(self.candidates))
        selection = None
        if self.selects_by_bm25:
            selection = self.ranker.select_by_bm25(self.question, self.candidates)
        if selection is not None:
            rows = np.flatnonzero(selection.enters)
            self.scores[~selection.enters] = selection.scores[~selection.enters]
        with self.ranker.scoring():
            for stage in range(len(self.stage_layers)):
                if stage and len(rows):
                    rows = self._drop(stage, rows)
                rows = self._run_stage(stage, rows)
        return StagedScores(self.scores, self.stage_index)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pairs that were scored."""
        return int(self.lengths.sum())

    def _time_left_s(self) -> float:
        now = perf_counter()
        # Once others wait, the pass never takes longer than they leave it.
        self.ends_at = min(self.ends_at, now + (self.deadline - now) * self.time_share())
        return self.ends_at - now

    def _drop(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Returns the rows that enter a stage, best first."""
        if self.pruning is not None:
            questions = np.zeros(len(rows), np.int64)
            rows = rows[self.pruning.survivor_mask(stage - 1, questions, self.scores[rows])]
        rows = rows[np.argsort(-self.scores[rows], kind="stable")]
        later_s = self._expected_s(rows, stage)
        keep_ratio = find_keep_ratio(len(rows), later_s, self._time_left_s())
        return rows[: max(1, int(len(rows) * keep_ratio))]

    def _run_stage(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Scores the first of these rows, in slices; returns those that were scored."""
        num_done = 0
        while num_done < len(rows):
            time_left_s, size = self._time_left_s(), 1
            if time_left_s <= 0:
                break
            # One is scored in any case: the speed may not be known, or was measured at a bad time.
            if self.speed.start_s_per_token is not None:
                stage_s = self._expected_s(rows[num_done:], stage)
                size = num_affordable(num_done, stage_s, time_left_s)
                if not size and (stage or num_done):
                    break
                size = max(1, size)
                slice_s = np.clip(time_left_s / 20, *SLICE_S)
                size = min(size, max(1, int(slice_s / stage_s[0])))
            self._run_slice(stage, rows[num_done : num_done + size])
            num_done += size
        return rows[:num_done]

    def _expected_s(self, rows: np.ndarray, stage: int) -> np.ndarray:
        """Returns the expected seconds of a stage and each later one for one of these rows."""
        lengths = self.lengths[rows][self.lengths[rows] > 0]
        if not len(lengths):
            lengths = self.lengths[self.lengths > 0]
        length = lengths.mean() if len(lengths) else self.ranker.tokenizer.max_length / 2
        return np.asarray(
            length * np.array(self.speed.stage_s_per_token(self.stage_layers)[stage:])
        )

    def _run_slice(self, stage: int, rows: np.ndarray) -> None:
        [duration_s] = self.ranker.map_batches(partial(self._score_timed, stage), [rows])
        self.stage_index[rows] = stage
        s_per_token = duration_s / int(self.lengths[rows].sum())
        self.speed.update(stage, self.stage_layers[stage], s_per_token)

    def _score_timed(self, stage: int, rows: np.ndarray) -> float:
        """Returns the seconds that it took, without what went before the slice."""
        started_at = perf_counter()
        self._score(stage, rows)
        return perf_counter() - started_at

    def _score(self, stage: int, rows: np.ndarray) -> None:
        """Runs a stage over some candidates, and stores their scores and states."""
        ranker = self.ranker
        if stage == 0:
            texts = [self.candidates[row] for row in rows]
            sequences = ranker.tokenizer.encode([self.question] * len(rows), texts)
            self.lengths[rows] = sequences.lengths
            batch = sequences.pack(np.arange(len(rows)), {})
        rows = rows[np.argsort(-self.lengths[rows], kind="stable")]  # as in the batch
        if not ranker.exit_layers:
            self.scores[rows] = ranker.predict_batch(batch).float().cpu().numpy()
            return
        if stage == 0:
            hidden, layout = ranker.encoder.embed(batch)
        else:
            hidden = torch.cat([self.states.pop(row) for row in rows.tolist()])
            layout = SequenceLayout.from_lengths(self.lengths[rows], ranker.device)
        start_layer = ranker.exit_layers[stage - 1] if stage else 0
        hidden, logits = ranker.run_exit(stage, hidden, layout, start_layer)
        self.scores[rows] = ranker.network.heads[stage].score(logits).float().cpu().numpy()
        if stage < len(self.stage_layers) - 1:
            self.states |= zip(rows.tolist(), hidden.split(self.lengths[rows].tolist()))
