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

from as2ray.evaluation.cost import Shape, layer_cost, operations
from as2ray.evaluation.measures import mean_average_precision
from as2ray.pruning import Drop, Scored, drop_ratios, prune
from as2ray.records import question_numbers


@dataclass(frozen=True)
class Point:
    """One choice of exits and drop ratios, and what it comes to."""

    exits: tuple[int, ...]
    """Layers run before each partial classifier that is used."""
    drop: tuple[float, ...]
    """Drop ratio after each but the last."""
    quality: float
    """MAP over the full lists."""
    cost: float
    """Operations as a part of the whole encoder's over every candidate."""
    layers: float
    """Layers likewise, by the paper's formula."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Point":
        """The point whose `asdict` went through JSON."""
        lists = {"exits": tuple(values["exits"]), "drop": tuple(values["drop"])}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class Replay:
    """Stored scores of a cascade over a candidates table."""

    table: pa.Table
    """Candidates; every question counts, so filter before."""
    exits: tuple[int, ...]
    """Layers run before each partial classifier."""
    scores: np.ndarray
    """Of each exit, nothing dropped, shape [rows, exits]."""
    tokens: np.ndarray
    """Of each pair's sequence, shape [rows]."""
    shape: Shape
    """Of the encoder."""
    sequential: bool = False
    """Whether the exits are independent rankers, each starting from the embeddings."""

    @cached_property
    def question(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""
        return question_numbers(self.table)

    @cached_property
    def _labels(self) -> tuple[np.ndarray, np.ndarray]:
        return self.table["question_id"].to_numpy(), self.table["label"].to_numpy()

    @cached_property
    def _everything(self) -> float:
        return operations(self.shape, [self.shape.layers], [self._lengths], sequential=True)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.tokens.astype(np.float64)

    def scored(self, used: Sequence[int], drop: Drop) -> Scored:
        """What the cascade would say of every row.

        Args:
            used: Numbers of the exits that are used, from 0, ascending; the last ranks.
            drop: Drop ratio after each of them but the last.
        """
        questions = int(self.question.max(initial=-1)) + 1
        ratios = drop_ratios(drop, len(used), questions)
        return Scored(*prune(_Stored(self.scores[:, list(used)], self.question), ratios))

    def point(self, used: Sequence[int], drop: Drop) -> Point:
        """Quality and cost of a choice; see `scored`."""
        found = self.scored(used, drop)
        stage = np.asarray(found.stage)
        exits = tuple(self.exits[number] for number in used)
        left = [self._lengths[stage >= number] for number in range(len(used))]
        ratios = drop_ratios(drop, len(used))
        # CERBERUS's heads stand after the last exit: an earlier one that ranks does without them.
        last = used[-1] == len(self.exits) - 1
        shape = self.shape if last else replace(self.shape, heads=0)
        return Point(
            exits,
            tuple(ratios.tolist()),
            mean_average_precision(*self._labels, found.rank_by),
            operations(shape, exits, left, self.sequential) / self._everything,
            layer_cost(
                exits,
                ratios,
                shape.layers,
                self.sequential,
                shape.heads * shape.head_layers,
            ),
        )


@dataclass(frozen=True)
class _Stored:
    """Stages whose scores are known."""

    scores: np.ndarray
    question: np.ndarray

    def __len__(self) -> int:
        return int(self.scores.shape[1])

    def score(self, stage: int, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.scores[rows, stage]
        return found


def pareto(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both quality and cost, cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.quality)):
        if not front or point.quality > front[-1].quality:
            front.append(point)
    return front


def cheapest(points: Iterable[Point], at_least: float) -> Point:
    """The cheapest point of a quality of at least `at_least`; the best one where there is none."""
    points = list(points)
    fine = [point for point in points if point.quality >= at_least]
    return min(fine, key=lambda p: (p.cost, -p.quality)) if fine else max(points, key=_quality)


def _quality(point: Point) -> tuple[float, float]:
    return point.quality, -point.cost
