"""A cascade replayed over stored scores: what other drop ratios and exits would rank and cost.

Knows scores of all exits, lengths and counted cost. Must not know models or Ray.

Every partial classifier's score of every candidate is taken once; any choice of exits and drop
ratios then takes milliseconds, for the network would have given the survivors the same scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.cascade.cost import EncoderShape, count_flops, relative_layers
from as2ray.cascade.pruning import DropRatios, StagedScores, expand_drop_ratios, prune
from as2ray.evaluation.measures import mean_average_precision
from as2ray.tables.schema import question_indices


@dataclass(frozen=True)
class OperatingPoint:
    """One choice of exits and drop ratios, and what it comes to."""

    exit_layers: tuple[int, ...]
    """Layers run before each partial classifier that is used."""
    drop_ratios: tuple[float, ...]
    """Drop ratio after each but the last."""
    map: float
    """MAP over the full lists."""
    relative_flops: float
    """Operations as a part of the whole encoder's over every candidate."""
    relative_layers: float
    """Layers likewise, by the paper's formula."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "OperatingPoint":
        """The point whose `asdict` went through JSON."""
        lists = {"exits": tuple(values["exits"]), "drop": tuple(values["drop"])}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class CascadeReplay:
    """Stored scores of a cascade over a candidates table."""

    table: pa.Table
    """Candidates; every question counts, so filter before."""
    exit_layers: tuple[int, ...]
    """Layers run before each partial classifier."""
    scores: np.ndarray
    """Of each exit, nothing dropped, shape [rows, exits]."""
    num_tokens: np.ndarray
    """Of each pair's sequence, shape [rows]."""
    shape: EncoderShape
    """Of the encoder."""
    sequential: bool = False
    """Whether the exits are independent rankers, each starting from the embeddings."""

    @cached_property
    def question_index(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""
        return question_indices(self.table)

    @cached_property
    def _question_labels(self) -> tuple[np.ndarray, np.ndarray]:
        return self.table["question_id"].to_numpy(), self.table["label"].to_numpy()

    @cached_property
    def _full_flops(self) -> float:
        return count_flops(self.shape, [self.shape.num_layers], [self._lengths], sequential=True)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.num_tokens.astype(np.float64)

    def rank(self, exit_indices: Sequence[int], drop_ratios: DropRatios) -> StagedScores:
        """What the cascade would say of every row.

        Args:
            used: Numbers of the exits that are used, from 0, ascending; the last ranks.
            drop: Drop ratio after each of them but the last.
        """
        questions = int(self.question_index.max(initial=-1)) + 1
        ratios = expand_drop_ratios(drop_ratios, len(exit_indices), questions)
        return StagedScores(
            *prune(_StoredScores(self.scores[:, list(exit_indices)], self.question_index), ratios)
        )

    def evaluate(self, exit_indices: Sequence[int], drop_ratios: DropRatios) -> OperatingPoint:
        """Quality and cost of a choice; see `scored`."""
        found = self.rank(exit_indices, drop_ratios)
        stage = np.asarray(found.stage_index)
        exits = tuple(self.exit_layers[number] for number in exit_indices)
        left = [self._lengths[stage >= number] for number in range(len(exit_indices))]
        ratios = expand_drop_ratios(drop_ratios, len(exit_indices))
        # CERBERUS's heads stand after the last exit: an earlier one that ranks does without them.
        last = exit_indices[-1] == len(self.exit_layers) - 1
        shape = self.shape if last else replace(self.shape, heads=0)
        return OperatingPoint(
            exits,
            tuple(ratios.tolist()),
            mean_average_precision(*self._question_labels, found.sort_keys),
            count_flops(shape, exits, left, self.sequential) / self._full_flops,
            relative_layers(
                exits,
                ratios,
                shape.num_layers,
                self.sequential,
                shape.num_ranking_heads * shape.layers_per_head,
            ),
        )


@dataclass(frozen=True)
class _StoredScores:
    """Stages whose scores are known."""

    scores: np.ndarray
    question_index: np.ndarray

    def __len__(self) -> int:
        return int(self.scores.shape[1])

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.scores[rows, stage_index]
        return found


def pareto_front(points: Iterable[OperatingPoint]) -> list[OperatingPoint]:
    """The points that no other beats in both quality and cost, cheapest first."""
    front: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (p.relative_flops, -p.map)):
        if not front or point.map > front[-1].map:
            front.append(point)
    return front


def cheapest_point(points: Iterable[OperatingPoint], min_map: float) -> OperatingPoint:
    """The cheapest point of a quality of at least `at_least`; the best one where there is none."""
    points = list(points)
    fine = [point for point in points if point.map >= min_map]
    return (
        min(fine, key=lambda p: (p.relative_flops, -p.map))
        if fine
        else max(points, key=_quality_key)
    )


def _quality_key(point: OperatingPoint) -> tuple[float, float]:
    return point.map, -point.relative_flops
