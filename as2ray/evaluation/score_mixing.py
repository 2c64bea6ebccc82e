"""Mixes the scores of a ranker and of BM25, with a weight that is chosen on dev."""

import numpy as np
import pyarrow as pa

from as2ray.evaluation.measures import evaluate
from as2ray.tables.schema import question_indices

BM25_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Weights of BM25 that dev chooses among."""


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
    rows: pa.Table, ranker_scores: np.ndarray, bm25_scores: np.ndarray, measure: str
) -> float:
    """Returns the weight of BM25 with the highest measure; the smallest of equals.

    Args:
        rows: The candidates of the dev questions that count.
        ranker_scores: Shape [rows].
        bm25_scores: Shape [rows].
        measure: Name of the measure.
    """

    def quality(weight: float) -> float:
        scores = mix_scores(rows, ranker_scores, bm25_scores, weight)
        return evaluate(rows, scores, [measure]).measures[measure]

    return max(BM25_WEIGHTS, key=lambda weight: (quality(weight), -weight))
