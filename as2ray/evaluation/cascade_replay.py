"""Replays a cascade over stored scores, to measure other exits and drop ratios.

All partial classifiers score all candidates once. Any choice of exits and drop ratios then takes
milliseconds, because the scores of a candidate do not depend on the dropped ones.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pydantic

from as2ray.cascade.cost import EncoderShape, measure_relative_cost, observed_drop_ratios
from as2ray.cascade.pruning import (
    DropRatios,
    Pruning,
    Rounding,
    StagedScores,
    expand_drop_ratios,
    log_odds,
    lower_scores,
    prune,
)
from as2ray.cascade.time_plan import NOT_SCORED, find_keep_ratio, num_affordable
from as2ray.evaluation.measures import validation_measures
from as2ray.tables.schema import question_indices


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class OperatingPoint:
    """A choice of exits and drop ratios with its quality and cost."""

    exit_layers: tuple[int, ...]
    """Layers before each partial classifier that is used."""
    drop_ratios: tuple[float, ...]
    """Drop ratio after each stage but the last."""
    measures: dict[str, float]
    """AP, RR, P@1 and nDCG@10 over all candidates, including dropped ones."""
    relative_flops: float
    """FLOPs divided by those of the whole encoder over all candidates."""
    relative_layers: float
    """Layers divided by those of the whole encoder, by the paper's formula."""
    last_exit_hit_rate: float
    """Share of the questions with a positive that have one at the last exit (section 4.3.2)."""

    @property
    def map(self) -> float:
        """MAP over all candidates."""
        return self.measures["AP"]


@dataclass(frozen=True)
class CascadeReplay:
    """Stored scores of a cascade over a candidates table."""

    table: pa.Table
    """Candidates; all questions count, so filter the table first."""
    exit_layers: tuple[int, ...]
    """Layers before each partial classifier."""
    scores: np.ndarray
    """Scores of all exits without dropping, shape [rows, exits]."""
    num_tokens: np.ndarray
    """Number of tokens of each pair, shape [rows]."""
    shape: EncoderShape
    """Sizes of the encoder."""
    sequential: bool = False
    """Whether the exits are independent rankers, which each start from the embeddings."""
    rounding: Rounding = "floor"
    """How many candidates a drop ratio drops; see `num_kept`."""

    @cached_property
    def question_index(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""
        return question_indices(self.table)

    @cached_property
    def num_questions(self) -> int:
        """Number of questions."""
        return int(self.question_index.max(initial=-1)) + 1

    @cached_property
    def last_exit_places(self) -> np.ndarray:
        """Place of each row in its question by the last exit's scores, shape [rows]."""
        return compute_places(self.question_index, self.scores[:, -1])

    def take(self, rows: slice) -> "CascadeReplay":
        """Returns the scores of some rows, of whole questions."""
        parts = {name: getattr(self, name)[rows] for name in ("table", "scores", "num_tokens")}
        return dataclasses.replace(self, **parts)

    def with_bm25(self, weights: Mapping[int, float] = MappingProxyType({})) -> "CascadeReplay":
        """Returns these scores after a stage without layers, that of `list_probabilities`.

        Args:
            weights: Weight of BM25 in the scores of an exit, by its layer; see
                `MultiStageRanker.bm25_weights`.
        """
        from as2ray.text.bm25 import list_probabilities

        probabilities = np.empty(len(self.scores), np.float32)
        questions = self.table["question"].to_pylist()
        candidates = self.table["candidate"].to_pylist()
        gaps = np.empty(len(self.scores))
        for question in range(self.num_questions):
            rows = np.flatnonzero(self.question_index == question)
            texts = [candidates[row] for row in rows]
            probabilities[rows] = list_probabilities(questions[rows[0]], texts)
            values = log_odds(probabilities[rows])
            gaps[rows] = values.max() - values
        scores = self.scores.copy()
        for index, layer in enumerate(self.exit_layers):
            if weight := weights.get(layer):
                scores[:, index] = lower_scores(scores[:, index], weight * gaps)
        return dataclasses.replace(
            self,
            exit_layers=(0, *self.exit_layers),
            scores=np.column_stack([probabilities, scores]),
        )

    def rank(self, exit_indices: Sequence[int], drop_ratios: DropRatios) -> StagedScores:
        """Computes the scores that the cascade would give all rows.

        Args:
            exit_indices: Indices of the exits that are used, from 0, ascending.
            drop_ratios: Drop ratio after each of them but the last.

        Raises:
            ConfigError: Invalid drop ratios.
        """
        ratios = expand_drop_ratios(drop_ratios, len(exit_indices), self.num_questions)
        return self._prune(exit_indices, Pruning.by_rank(ratios, self.rounding))

    def rank_by_margins(
        self, exit_indices: Sequence[int], margins: Sequence[float] | np.ndarray, top_k: int = 1
    ) -> StagedScores:
        """Computes the scores that the cascade would give all rows if it drops by margins.

        Args:
            exit_indices: As in `rank`.
            margins: Margin after each of them but the last, in log-odds; infinity drops nothing.
            top_k: See `Pruning`.
        """
        shape = (self.num_questions, len(exit_indices) - 1)
        pruning = Pruning(np.zeros(shape), np.broadcast_to(margins, shape), top_k)
        return self._prune(exit_indices, pruning)

    def rank_within(
        self,
        exit_indices: Sequence[int],
        budget_s: float,
        layer_s_per_token: float,
        pruning: Pruning | None = None,
    ) -> StagedScores:
        """Computes the scores that the cascade would give all rows within a time budget.

        The plan is that of `TimedPass`, for a machine whose speed is known and does not change.
        BM25's stage takes no time.

        Args:
            exit_indices: As in `rank`.
            budget_s: Seconds for a question.
            layer_s_per_token: Seconds of one layer for a token.
            pruning: What drops candidates of a question however much time is left.
        """
        scores = np.zeros(len(self.num_tokens), np.float32)
        stage_index = np.full(len(self.num_tokens), NOT_SCORED)
        exit_layers = [self.exit_layers[index] for index in exit_indices]
        token_s = layer_s_per_token * np.diff(exit_layers, prepend=0)
        first_stage = int(exit_layers[0] == 0)  # the first one with layers
        for question in range(self.num_questions):
            all_rows, time_left_s = np.flatnonzero(self.question_index == question), budget_s
            rows = all_rows
            for stage, exit_index in enumerate(exit_indices):
                if stage and len(rows) and pruning is not None:
                    zeros = np.zeros(len(rows), int)
                    rows = rows[pruning.survivor_mask(stage - 1, zeros, scores[rows])]
                num_entered = len(rows)
                later_s = self.num_tokens[rows].mean() * token_s[stage:] if len(rows) else token_s
                if stage == first_stage:
                    rows = rows[: num_affordable(0, later_s, time_left_s)]
                elif stage > first_stage and len(rows):
                    rows = rows[np.argsort(-scores[rows], kind="stable")]
                    keep_ratio = find_keep_ratio(len(rows), later_s, time_left_s)
                    rows = rows[: max(1, int(len(rows) * keep_ratio))]
                costs_s = self.num_tokens[rows] * token_s[stage]
                rows = rows[np.cumsum(costs_s) <= time_left_s]
                time_left_s -= float(costs_s[: len(rows)].sum())
                if stage == first_stage and len(rows) < num_entered:  # BM25 then ranks none
                    scores[all_rows], stage_index[all_rows] = 0.0, NOT_SCORED
                scores[rows], stage_index[rows] = self.scores[rows, exit_index], stage
        return StagedScores(scores, stage_index)

    def _prune(self, exit_indices: Sequence[int], pruning: Pruning) -> StagedScores:
        scorer = _StoredScores(self.scores[:, list(exit_indices)], self.question_index)
        return StagedScores(*prune(scorer, pruning))

    def evaluate(self, exit_indices: Sequence[int], drop_ratios: DropRatios) -> OperatingPoint:
        """Measures the quality and cost of a choice.

        Args:
            exit_indices: As in `rank`.
            drop_ratios: As in `rank`.

        Raises:
            ConfigError: Invalid drop ratios.
        """
        ratios = expand_drop_ratios(drop_ratios, len(exit_indices))
        return self.measure(exit_indices, self.rank(exit_indices, ratios), ratios)

    def measure(
        self,
        exit_indices: Sequence[int],
        staged: StagedScores,
        ratios: np.ndarray | None = None,
    ) -> OperatingPoint:
        """Measures the quality and cost of what was dropped.

        Args:
            exit_indices: As in `rank`.
            staged: Scores of the cascade for all rows.
            ratios: Drop ratio after each exit but the last; by default what was dropped.
        """
        assert staged.stage_index is not None
        if ratios is None:
            ratios = observed_drop_ratios(staged.stage_index, len(exit_indices))
        exit_layers = tuple(self.exit_layers[index] for index in exit_indices)
        shape = self.shape
        # CERBERUS's heads come after the last exit; a cascade that ends earlier runs none.
        if exit_indices[-1] != len(self.exit_layers) - 1:
            shape = dataclasses.replace(shape, num_ranking_heads=0)
        layers, flops = measure_relative_cost(
            shape, exit_layers, ratios, self.num_tokens, staged.stage_index, self.sequential
        )
        question_ids, labels = self.table["question_id"].to_numpy(), self.table["label"].to_numpy()
        measures = validation_measures(question_ids, labels, staged.sort_keys)
        is_last = staged.stage_index == len(exit_indices) - 1
        groups = (self.question_index[rows] for rows in ((labels > 0) & is_last, labels > 0))
        num_hits, num_questions = (len(np.unique(group)) for group in groups)
        return OperatingPoint(
            exit_layers,
            tuple(ratios.tolist()),
            measures,
            flops,
            layers,
            last_exit_hit_rate=num_hits / max(1, num_questions),
        )


@dataclass(frozen=True)
class _StoredScores:
    """Stages that read stored scores."""

    scores: np.ndarray
    question_index: np.ndarray

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.scores[rows, stage_index])


def compute_places(question_index: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns the place of each row in its question, from 1; of equal scores the first row's.

    Args:
        question_index: Number of each row's question, shape [rows].
        scores: Shape [rows].
    """
    order = np.lexsort((-scores, question_index))
    sizes = np.bincount(question_index)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    return ranks


def pareto_front(
    points: Iterable[OperatingPoint], measure: str = "AP", cost: str = "relative_flops"
) -> list[OperatingPoint]:
    """Returns the points that no other point beats in both quality and cost, cheapest first.

    Args:
        points: Choices of exits and drop ratios.
        measure: Name of the measure of quality.
        cost: `relative_flops` or `relative_layers`.
    """
    front: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (getattr(p, cost), -p.measures[measure])):
        if not front or point.measures[measure] > front[-1].measures[measure]:
            front.append(point)
    return front


def cheapest_point(points: Iterable[OperatingPoint], min_map: float) -> OperatingPoint:
    """Returns the cheapest point with at least `min_map`, or the best point if there is none."""
    points = list(points)
    good_points = [point for point in points if point.map >= min_map]
    if good_points:
        return min(good_points, key=lambda point: (point.relative_flops, -point.map))
    return max(points, key=lambda point: (point.map, -point.relative_flops))
