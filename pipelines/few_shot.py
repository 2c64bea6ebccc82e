"""The few-shot protocol: how many questions, which, for how many epochs; and the remedies.

Knows plain values, scores and checkpoints. Must not know stages or any one pipeline.

Mokrii et al. train 32 epochs on 32 questions and fewer on more, and print neither the sizes nor the
formula; FlexNeuART draws its samples independently. Their few-shot training made some rankers worse
than they were ("a little bit is worse than none"). Two remedies, each with a part chosen on dev;
the second's may be fixed (`steps`), to keep what dev does not measure:

    bm25     s = (1 - a) z(ranker) + a z(BM25), z within each question
    weights  w = (1 - a) tuned + a start (Wortsman et al. 2022), encoder and head alike
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from as2ray.errors import CheckpointError, ConfigError
from as2ray.evaluation.measures import evaluate
from as2ray.models.ranker import Ranker
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.schema import question_indices

Remedy = Literal["bm25", "weights"]
"""What is done against it."""

PARTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Values of a that dev chooses among, for BM25's part."""

STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The same for the start's part: each costs a pass over dev."""


@dataclass(frozen=True)
class Protocol:
    """Sizes, samples and epochs."""

    num_questions: tuple[int | None, ...] = (32, 128, 512, None)
    """Numbers of annotated questions; none is all of them."""
    num_samples: int = 3
    """Of each size but all."""
    nested_samples: bool = False
    """Whether a larger sample of the same number holds the smaller one."""
    epochs: int = 32
    """On the smallest sample of the paper."""
    reference_questions: int = 32
    """Its questions."""
    epoch_decay: float = 0.5
    """How fast epochs fall: epochs (at / questions) ** power."""
    min_epochs: int = 1
    """Epochs on however many questions."""
    remedies: tuple[Remedy, ...] = ("bm25", "weights")
    """Tried on every ranker that few-shot training has tuned."""
    interpolation_weights: tuple[float, ...] = STEPS
    """The parts of the start that dev chooses among; one alone is taken whatever dev says, to keep
    what dev does not measure."""
    published_results: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the paper prints, by system."""

    def __post_init__(self) -> None:
        sizes = [size for size in self.num_questions if size is not None]
        counts = [self.num_samples, self.epochs, self.reference_questions, self.min_epochs, *sizes]
        if min(counts) < 1 or not self.num_questions or self.epoch_decay < 0:
            raise ConfigError(
                f"sizes {self.num_questions}, samples {self.num_samples}, epochs {self.epochs} at {self.reference_questions}, "
                f"power {self.epoch_decay}, least {self.min_epochs}"
                "; expected counts of at least 1 and a power of 0 or more",
            )
        if not self.interpolation_weights or not all(
            0 <= part <= 1 for part in self.interpolation_weights
        ):
            raise ConfigError(
                f"steps {self.interpolation_weights}"
                "; expected parts of the start, each from 0 to 1, at least one",
            )

    def epochs_of(self, questions: int) -> int:
        """Epochs over a sample of so many questions."""
        fallen = round(
            float(self.epochs * (self.reference_questions / questions) ** self.epoch_decay)
        )
        return max(self.min_epochs, min(self.epochs, fallen))


def mixed(rows: pa.Table, ranker: np.ndarray, keywords: np.ndarray, part: float) -> np.ndarray:
    """Scores of both, each brought to mean 0 and deviation 1 within its question, shape [rows].

    Args:
        rows: The candidates.
        ranker: Scores, shape [rows].
        keywords: BM25, shape [rows].
        part: BM25's.
    """
    question = question_indices(rows)
    return (1.0 - part) * _standard(ranker, question) + part * _standard(keywords, question)


def _standard(scores: np.ndarray, question: np.ndarray) -> np.ndarray:
    size = np.bincount(question)
    centred = scores - (np.bincount(question, scores) / size)[question]
    deviation = np.sqrt(np.bincount(question, centred**2) / size)[question]
    return np.asarray(centred / np.maximum(deviation, 1e-12))


def best_part(
    rows: pa.Table,
    ranker: np.ndarray,
    keywords: np.ndarray,
    measure: str,
    question_filter: QuestionFilter,
) -> float:
    """The part of BM25 that dev likes best; of equals the smallest."""

    def worth(part: float) -> float:
        scores = mixed(rows, ranker, keywords, part)
        return evaluate(rows, scores, [measure], question_filter=question_filter).measures[measure]

    return max(PARTS, key=lambda part: (worth(part), -part))


def between(tuned: Ranker, start: Mapping[str, torch.Tensor], part: float) -> None:
    """Moves a ranker's weights towards those it started from.

    Args:
        tuned: The ranker.
        start: Weights of the other, by the same names.
        part: Of the start, 0 to 1.
    """
    own = tuned.state_dict()
    if own.keys() != start.keys():
        raise CheckpointError(
            f"{len(own)} weights and {len(start)}: {sorted(own.keys() ^ start.keys())[:4]}"
            "; expected two rankers of one kind",
            fix="start from a ranker, not from a bare encoder",
        )
    moved = {
        name: torch.lerp(w, start[name].to(w), part) if w.is_floating_point() else w
        for name, w in own.items()
    }
    tuned.load_state_dict(moved)


def best_step(
    tuned: Ranker,
    start: Ranker,
    rows: pa.Table,
    measure: str,
    question_filter: QuestionFilter,
    parts: Sequence[float],
) -> float:
    """Leaves a ranker where dev likes it best on the way back to its start; the start's part."""
    ends = [{n: w.clone() for n, w in r.state_dict().items()} for r in (tuned, start)]
    found = {}
    for part in parts:
        tuned.load_state_dict(ends[0])
        between(tuned, ends[1], part)
        scores = tuned.predict_table(rows).sort_keys
        found[part] = evaluate(rows, scores, [measure], question_filter=question_filter).measures[
            measure
        ]
    best = max(parts, key=lambda part: (found[part], -part))
    tuned.load_state_dict(ends[0])
    between(tuned, ends[1], best)
    return best
