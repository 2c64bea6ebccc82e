"""Ranks within a time budget: as many candidates pass each exit as there is time for.

An encoder without exits has no point at which it could stop, so a budget could only be kept by
passing fewer candidates. With exits, all candidates pass the first layers as far as there is time,
and the best of them the next ones. Work is done in slices of a few milliseconds, between which the
clock is looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, takewhile
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from as2ray.cascade.pruning import Pruning, StagedScores, lower_scores
from as2ray.cascade.time_plan import NOT_SCORED, find_keep_ratio, num_affordable
from as2ray.models.encoder.packed_attention import SequenceLayout

SLICE_S: Final = (0.004, 0.05)
"""Bounds of the expected duration of a slice of work: a twentieth of the time that is left."""

MIN_WORK_SHARE: Final = 0.75
"""Share of a slice's duration that its tokens take at least, if half of the time that is left is
enough for such a slice: short ones would mostly be what each slice takes."""

OVERHEAD_MS: Final = 1.0
"""Milliseconds of a budget that are left for what is done around the scoring."""

NEW_WEIGHT: Final = 0.3
"""Weight of a new measurement in the mean of the speed."""

PROBE_SIZES: Final = (2, 16)
"""Candidates of the slices that measure the speed."""

BM25_PROBE_SIZE: Final = 200
"""Candidates that measure the speed of BM25."""

PROBE_ROUNDS: Final = 5
PROBE_S: Final = 0.5
"""Each slice is measured at most so often, and once more only before so many seconds have passed;
the least disturbed measurement counts."""


@dataclass
class SliceSpeed:
    """Measured duration of a slice of work: a part that each slice takes, and one of each token."""

    fixed_s: float
    s_per_token: float

    @classmethod
    def fit(cls, num_tokens: np.ndarray, durations_s: np.ndarray) -> "SliceSpeed":
        """Returns the speed that two slices show, a small one and a large one."""
        small, large = np.argsort(num_tokens)
        more_tokens = num_tokens[large] - num_tokens[small]
        longer_s = durations_s[large] - durations_s[small]
        s_per_token = longer_s / more_tokens if more_tokens > 0 else 0.0
        fixed_s = durations_s[large] - num_tokens[large] * s_per_token
        if not (s_per_token > 0 and fixed_s >= 0):  # disturbed, or slices of the same size
            return cls(0.0, float(durations_s[large] / num_tokens[large]))
        return cls(float(fixed_s), float(s_per_token))

    def update(self, num_tokens: int, duration_s: float) -> None:
        """Takes a measurement into the mean of the speed; its two parts keep their proportion."""
        ratio = duration_s / (self.fixed_s + num_tokens * self.s_per_token)
        factor = 1 + NEW_WEIGHT * (ratio - 1)
        self.fixed_s, self.s_per_token = factor * self.fixed_s, factor * self.s_per_token


@dataclass
class RankerSpeed:
    """Measured speed of a ranker on this machine; each ranking with a budget updates it."""

    start: SliceSpeed
    """Tokenizing and embedding, and the layers of the first stage."""
    layer: SliceSpeed
    """One layer of a later stage."""
    keep_ratios: np.ndarray
    """Share of the candidates that each exit but the last has passed with enough time, shape
    [stages - 1]; at first 1."""
    bm25_s: float = 0.0
    """Seconds of the stage before the first layer for a candidate."""

    def fixed_s(self, stage_layers: Sequence[int]) -> np.ndarray:
        """Returns what a slice of each stage takes whatever its size, in seconds, shape [stages].

        Args:
            stage_layers: Number of layers of each stage.
        """
        # Later stages may not have been reached for long: they are no slower than the first.
        layer_s = min(self.layer.fixed_s, self.start.fixed_s / stage_layers[0])
        return np.array([self.start.fixed_s, *(layer_s * np.array(stage_layers[1:]))])

    def s_per_token(self, stage_layers: Sequence[int]) -> np.ndarray:
        """Returns what a token takes in each stage, in seconds, shape [stages]; see `fixed_s`."""
        layer_s = min(self.layer.s_per_token, self.start.s_per_token / stage_layers[0])
        return np.array([self.start.s_per_token, *(layer_s * np.array(stage_layers[1:]))])


def measure_speed(ranker: Any, question: str, candidates: Sequence[str]) -> RankerSpeed:
    """Measures how fast a ranker scores, which also builds its fused layers and kernels.

    Args:
        ranker: A pointwise ranker or a cascade.
        question: Any question.
        candidates: Candidates, at least one, of the length that is expected.
    """
    texts = list(islice(cycle(candidates), max(PROBE_SIZES)))
    passes = [
        TimedPass(ranker, question, texts[:size], None, np.inf, selects_by_bm25=False)
        for size in PROBE_SIZES
    ]
    passes[-1].time_stages()  # prepares the network
    ends_at = perf_counter() + PROBE_S
    rounds = takewhile(lambda _: perf_counter() < ends_at, range(PROBE_ROUNDS))
    stage_s = np.min([[part.time_stages() for part in passes] for _ in rounds], axis=0)
    num_tokens = np.array([timed_pass.num_tokens for timed_pass in passes])
    num_first, *num_later = passes[0].stage_layers
    start = SliceSpeed.fit(num_tokens, stage_s[:, 0])
    if num_later:
        layer = SliceSpeed.fit(num_tokens, stage_s[:, 1:].sum(1) / sum(num_later))
    else:
        layer = SliceSpeed(start.fixed_s / num_first, start.s_per_token / num_first)
    texts = list(islice(cycle(candidates), BM25_PROBE_SIZE))
    ranker.select_by_bm25(question, texts)  # loads its libraries
    started_at = perf_counter()
    ranker.select_by_bm25(question, texts)
    bm25_s = (perf_counter() - started_at) / len(texts)
    return RankerSpeed(start, layer, np.ones(len(num_later)), bm25_s)


class TimedPass:
    """A pass of one question's candidates through the stages of a ranker, until a deadline.

    Args:
        ranker: A pointwise ranker, which has one stage, or a cascade.
        question: The question.
        candidates: Its candidates; the first ones are scored if there is no time for all.
        pruning: What the ranker drops in any case.
        ends_at: Deadline, as `perf_counter` counts.
        limit_time: Returns how many of the seconds until the deadline this pass may take; it is
            asked each time that the clock is looked at.
        selects_by_bm25: Whether the ranker's stage before the first layer may drop candidates.
    """

    def __init__(
        self,
        ranker: Any,
        question: str,
        candidates: Sequence[str],
        pruning: Pruning | None,
        ends_at: float,
        limit_time: Callable[[float], float] = lambda left_s: left_s,
        selects_by_bm25: bool = True,
    ) -> None:
        self.ranker, self.question, self.candidates = ranker, question, candidates
        self.pruning = pruning
        self.deadline = self.ends_at = ends_at
        """The pass ends before the deadline if others need the time."""
        self.selects_by_bm25 = selects_by_bm25
        self.limit_time = limit_time
        exits = ranker.exit_layers or (len(ranker.encoder),)
        self.stage_layers = [end - start for start, end in zip((0, *exits), exits)]
        self.scores = np.zeros(len(candidates), np.float32)
        self.stage_index = np.full(len(candidates), NOT_SCORED)
        self.lengths = np.zeros(len(candidates), np.int64)
        self.bm25_gaps: np.ndarray | None = None
        self.states: dict[int, Tensor] = {}
        """Packed states of each candidate after its last stage, if another one follows."""

    @torch.inference_mode()
    def run(self) -> StagedScores:
        """Scores as many candidates with as many stages as there is time for."""
        rows = np.arange(len(self.candidates))
        if len(rows) and self.ranker.speed is None:
            self.ranker.speed = measure_speed(self.ranker, self.question, self.candidates)
        selection = None
        # Without twice the time that BM25 takes, no candidate leaves by it.
        bm25_s = self.ranker.speed.bm25_s * len(rows) if len(rows) else 0.0
        if self.selects_by_bm25 and bm25_s < self._time_left_s() / 2:
            selection = self.ranker.select_by_bm25(self.question, self.candidates)
        if selection is not None:
            rows, self.bm25_gaps = np.flatnonzero(selection.enters), selection.gaps
        with self.ranker.scoring():
            for stage in range(len(self.stage_layers)):
                if stage and len(rows):
                    rows = self._drop(stage, rows)
                rows = self._run_stage(stage, rows)
        if selection is not None and (self.stage_index[selection.enters] != NOT_SCORED).all():
            self.scores[~selection.enters] = selection.scores[~selection.enters]
        has_bm25 = np.full(len(self.scores), selection is not None)
        return StagedScores(self.scores, self.stage_index, has_bm25=has_bm25)

    @torch.inference_mode()
    def time_stages(self) -> list[float]:
        """Runs each stage over all candidates in one slice, and returns its duration in seconds."""
        rows = np.arange(len(self.candidates))
        with self.ranker.scoring():
            return [self._run_slice(stage, rows) for stage in range(len(self.stage_layers))]

    @property
    def num_tokens(self) -> int:
        """Tokens of the pairs that were scored."""
        return int(self.lengths.sum())

    def _time_left_s(self) -> float:
        now = perf_counter()
        # Once others wait, the pass never takes longer than they leave it.
        self.ends_at = min(self.ends_at, now + self.limit_time(self.deadline - now))
        return self.ends_at - now

    def _drop(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Returns the rows that enter a stage, best first."""
        if self.pruning is not None:
            questions = np.zeros(len(rows), np.int64)
            passes = self.pruning.survivor_mask(stage - 1, questions, self.scores[rows])
            ratios = self.ranker.speed.keep_ratios
            ratios[stage - 1] += NEW_WEIGHT * (passes.mean() - ratios[stage - 1])
            rows = rows[passes]
        rows = rows[np.argsort(-self.scores[rows], kind="stable")]
        time_left_s = self._time_left_s() - self._fixed_s(stage).sum()
        keep_ratio = find_keep_ratio(len(rows), self._expected_s(rows, stage), time_left_s)
        return rows[: max(1, int(len(rows) * keep_ratio))]

    def _run_stage(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Scores the first of these rows, in slices; returns those that were scored."""
        num_done = 0
        while num_done < len(rows):
            time_left_s = self._time_left_s()
            if time_left_s <= 0:
                break
            fixed_s, stage_s = self._fixed_s(stage), self._expected_s(rows[num_done:], stage)
            ratios = self.ranker.speed.keep_ratios[stage:]
            size = num_affordable(num_done, stage_s, time_left_s - fixed_s.sum(), ratios)
            if not size and (stage or num_done):
                break
            # A slice between which the clock is looked at; one is scored in any case.
            slice_s = np.clip(time_left_s / 20, *SLICE_S) - fixed_s[0]
            min_s = fixed_s[0] * MIN_WORK_SHARE / (1 - MIN_WORK_SHARE)
            slice_s = max(slice_s, min(min_s, time_left_s / 2 - fixed_s[0]))
            size = max(1, min(size, int(slice_s / stage_s[0])))
            slice_rows = rows[num_done : num_done + size]
            speed = self.ranker.speed.layer if stage else self.ranker.speed.start
            num_layers = self.stage_layers[stage] if stage else 1
            duration_s = self._run_slice(stage, slice_rows)
            speed.update(int(self.lengths[slice_rows].sum()), duration_s / num_layers)
            num_done += size
        return rows[:num_done]

    def _fixed_s(self, stage: int) -> np.ndarray:
        """Returns the expected seconds of a slice of a stage and each later one without tokens."""
        return np.asarray(self.ranker.speed.fixed_s(self.stage_layers)[stage:])

    def _expected_s(self, rows: np.ndarray, stage: int) -> np.ndarray:
        """Returns the expected seconds of a stage and each later one for one of these rows."""
        lengths = self.lengths[rows][self.lengths[rows] > 0]
        if not len(lengths):
            lengths = self.lengths[self.lengths > 0]
        length = lengths.mean() if len(lengths) else self.ranker.tokenizer.max_length / 2
        return np.asarray(length * self.ranker.speed.s_per_token(self.stage_layers)[stage:])

    def _run_slice(self, stage: int, rows: np.ndarray) -> float:
        """Scores rows, and returns the seconds that it took."""
        [duration_s] = self.ranker.map_batches(partial(self._score_timed, stage), [rows])
        self.stage_index[rows] = stage
        return float(duration_s)

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
        if self.bm25_gaps is not None:
            lower_by = ranker.bm25_weights[stage] * self.bm25_gaps[rows]
            self.scores[rows] = lower_scores(self.scores[rows], lower_by)
        if stage < len(self.stage_layers) - 1:
            self.states |= zip(rows.tolist(), hidden.split(self.lengths[rows].tolist()))
