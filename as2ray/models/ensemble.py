"""Ensembles: a weighted mean of independent rankers' scores (CERBERUS, section 3.2).

Knows rankers. Must not know where the weights come from.

Members keep their own encoders and tokenizers: an ensemble starts from text, never from tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from as2ray.errors import CheckpointError, RecipeError
from as2ray.models.ranker import Ranker
from as2ray.pruning import Drop, Scored
from as2ray.text.packing import PackedBatch, Sequences

TOLERANCE = 1e-6
"""How far from 1 weights may sum."""


FOLLOWED = frozenset({"precision", "concurrent", "fused", "max_tokens"})
"""Settings of how it scores, which its members have when it gets them."""


class EnsembleRanker(Ranker):
    """Several rankers as one.

    Args:
        members: The rankers.
        weights: Of each, none below 0, 1 together; equal by default.
    """

    text_only = True

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in FOLLOWED:
            for member in getattr(self, "members", ()):
                setattr(member, name, value)

    def __init__(self, members: Sequence[Ranker], weights: Sequence[float] | None = None) -> None:
        weights = [1.0 / max(1, len(members))] * len(members) if weights is None else weights
        fine = len(weights) == len(members) > 0 and min(weights) >= 0
        if not (fine and abs(sum(weights) - 1.0) <= TOLERANCE):  # NaN is far from everything
            raise RecipeError(
                f"weights {list(weights)} of {len(members)} members",
                expected="a weight for each, none below 0, that sum to 1",
                mend="divide them by their sum",
            )
        super().__init__(members[0].tokenizer)
        self.members: Any = nn.ModuleList(members)
        self.weights = tuple(weights)
        self.encoders = [encoder for member in members for encoder in member.encoders]

    def forward(self, batch: PackedBatch) -> Tensor:
        """Not of an ensemble: a packed batch is tokens of one tokenizer."""
        raise _needs_text()

    def score(self, batches: Iterable[PackedBatch], rows: int) -> np.ndarray:
        """Not of an ensemble; see `score_pairs`."""
        raise _needs_text()

    def score_sequences(
        self, encoded: Sequences, question: np.ndarray, drop: Drop | None = None
    ) -> Scored:
        """Not of an ensemble; see `score_pairs`."""
        raise _needs_text()

    def score_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """The weighted mean of the members' scores, nothing dropped; float32, shape [pairs, 1]."""
        scores = [member.score_exits(questions, candidates)[:, -1] for member in self.members]
        return np.average(scores, axis=0, weights=self.weights).astype(np.float32)[:, None]

    def score_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question: np.ndarray,
        drop: Drop | None = None,
    ) -> Scored:
        """The weighted mean of the members' scores, nothing dropped; see `Ranker.score_pairs`."""
        self.refuse_drop(drop)
        return Scored(self.score_exits(questions, candidates)[:, 0])


def _needs_text() -> CheckpointError:
    return CheckpointError(
        "tokens for an ensemble",
        expected="text: every member has its own tokenizer",
        mend="call score_pairs, score_table or rank",
    )
