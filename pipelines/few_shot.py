"""Few-shot training: numbers of questions, samples and epochs, and two remedies.

Mokrii et al. train 32 epochs on 32 questions and fewer epochs on more questions, but print neither
the numbers nor the formula; FlexNeuART draws its samples independently. Their few-shot training
made some rankers worse ("a little bit is worse than none"). There are two remedies, each with a
weight a that is chosen on dev; `interpolation_weights` may fix the second one:

    bm25_mixing           s = (1 - a) z(ranker) + a z(BM25), z within each question
    weight_interpolation  w = (1 - a) tuned + a start (Wortsman et al. 2022), encoder and head alike
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.errors import CheckpointError
from as2ray.evaluation.measures import evaluate
from as2ray.models.ranker import Ranker
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.schema import question_indices

Remedy = Literal["bm25_mixing", "weight_interpolation"]
"""A remedy against few-shot training that makes a ranker worse."""

BM25_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Weights of BM25 that dev chooses among."""

START_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the start that dev chooses among; each costs a pass over dev."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FewShotConfig:
    """Numbers of questions, samples and epochs of few-shot training, and its remedies."""

    num_questions: Annotated[tuple[PositiveInt | None, ...], Field(min_length=1)] = (
        32,
        128,
        512,
        None,
    )
    """Numbers of labeled questions; `null` stands for all of them."""
    num_samples: PositiveInt = 3
    """Samples of each number of questions, except of all."""
    nested_samples: bool = False
    """Whether a larger sample contains the smaller sample with the same index."""
    epochs: PositiveInt = 32
    """Epochs on `reference_questions` questions, and the maximum."""
    reference_questions: PositiveInt = 32
    """Number of questions that are trained on for `epochs` epochs."""
    epoch_decay: NonNegativeFloat = 0.5
    """How fast epochs fall: epochs * (reference_questions / questions) ** epoch_decay."""
    min_epochs: PositiveInt = 1
    """Minimum number of epochs."""
    remedies: tuple[Remedy, ...] = ("bm25_mixing", "weight_interpolation")
    """Remedies that are applied to every few-shot ranker."""
    interpolation_weights: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)
    ] = START_WEIGHTS
    """Weights of the start that dev chooses among. A single weight is applied whatever dev says, to
    keep abilities that dev does not measure."""
    published_results: dict[str, float] = field(default_factory=dict)
    """Results that the paper prints, by system."""

    def epochs_of(self, questions: int) -> int:
        """Returns the number of epochs on a sample of this number of questions."""
        scale = (self.reference_questions / questions) ** self.epoch_decay
        return max(self.min_epochs, min(self.epochs, round(float(self.epochs * scale))))


def mix_scores(
    rows: pa.Table, ranker_scores: np.ndarray, bm25_scores: np.ndarray, bm25_weight: float
) -> np.ndarray:
    """Mixes scores that are standardized within each question, shape [rows].

    Args:
        rows: The candidates.
        ranker_scores: Shape [rows].
        bm25_scores: Shape [rows].
        bm25_weight: Weight of BM25, 0 to 1.
    """
    question_index = question_indices(rows)
    ranker, bm25 = (_standardize(s, question_index) for s in (ranker_scores, bm25_scores))
    return (1.0 - bm25_weight) * ranker + bm25_weight * bm25


def _standardize(scores: np.ndarray, question_index: np.ndarray) -> np.ndarray:
    """Returns scores with mean 0 and standard deviation 1 within each question."""
    size = np.bincount(question_index)
    centered = scores - (np.bincount(question_index, scores) / size)[question_index]
    deviation = np.sqrt(np.bincount(question_index, centered**2) / size)[question_index]
    return np.asarray(centered / np.maximum(deviation, 1e-12))


def best_bm25_weight(
    rows: pa.Table,
    ranker_scores: np.ndarray,
    bm25_scores: np.ndarray,
    measure: str,
    question_filter: QuestionFilter,
) -> float:
    """Returns the weight of BM25 with the highest measure on dev; the smallest of equals."""

    def quality(weight: float) -> float:
        scores = mix_scores(rows, ranker_scores, bm25_scores, weight)
        return evaluate(rows, scores, [measure], question_filter=question_filter).measures[measure]

    return max(BM25_WEIGHTS, key=lambda weight: (quality(weight), -weight))


def interpolate_weights(
    tuned: Ranker, start_weights: Mapping[str, torch.Tensor], start_weight: float
) -> None:
    """Moves the weights of a ranker towards those that it started from.

    Args:
        tuned: The ranker; it is changed.
        start_weights: Weights that it started from, with the same names.
        start_weight: Weight of the start, 0 to 1.

    Raises:
        CheckpointError: The names of the weights differ.
    """
    weights = tuned.state_dict()
    if weights.keys() != start_weights.keys():
        raise CheckpointError(
            "the ranker and its start are of different kinds: "
            f"{sorted(weights.keys() ^ start_weights.keys())[:4]} are in one of them only",
            fix="start from a ranker, not from an encoder",
        )
    interpolated = {
        name: torch.lerp(w, start_weights[name].to(w), start_weight) if w.is_floating_point() else w
        for name, w in weights.items()
    }
    tuned.load_state_dict(interpolated)


def interpolate_on_dev(
    tuned: Ranker,
    start: Ranker,
    rows: pa.Table,
    measure: str,
    question_filter: QuestionFilter,
    start_weights: Sequence[float],
) -> float:
    """Interpolates a ranker with its start, with the best weight on dev.

    Args:
        tuned: The ranker; it is changed.
        start: The ranker that it started from.
        rows: The dev table.
        measure: Name of the measure.
        question_filter: Questions to evaluate.
        start_weights: Weights of the start to try; the smallest of equals is taken.

    Returns:
        The chosen weight of the start.
    """
    tuned_state, start_state = (
        {name: w.clone() for name, w in ranker.state_dict().items()} for ranker in (tuned, start)
    )
    quality = {}
    for weight in start_weights:
        tuned.load_state_dict(tuned_state)
        interpolate_weights(tuned, start_state, weight)
        scores = tuned.predict_table(rows).sort_keys
        result = evaluate(rows, scores, [measure], question_filter=question_filter)
        quality[weight] = result.measures[measure]
    best = max(start_weights, key=lambda weight: (quality[weight], -weight))
    tuned.load_state_dict(tuned_state)
    interpolate_weights(tuned, start_state, best)
    return best
