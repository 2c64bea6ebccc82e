"""Ensembles: a weighted mean of independent rankers' scores (CERBERUS, section 3.2).

Knows rankers. Must not know where the weights come from.

Members keep their own encoders and tokenizers: an ensemble starts from text, never from tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from as2ray.cascade.pruning import DropRatios, StagedScores
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.ranker import Ranker
from as2ray.text.packing import PackedBatch, TokenSequences

WEIGHT_SUM_TOLERANCE = 1e-6
"""How far from 1 weights may sum."""


SHARED_SETTINGS = frozenset({"precision", "concurrent", "fused", "max_tokens"})
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
        if name in SHARED_SETTINGS:
            for member in getattr(self, "members", ()):
                setattr(member, name, value)

    def __init__(self, members: Sequence[Ranker], weights: Sequence[float] | None = None) -> None:
        weights = [1.0 / max(1, len(members))] * len(members) if weights is None else weights
        fine = len(weights) == len(members) > 0 and min(weights) >= 0
        if not (
            fine and abs(sum(weights) - 1.0) <= WEIGHT_SUM_TOLERANCE
        ):  # NaN is far from everything
            raise ConfigError(
                f"weights {list(weights)} of {len(members)} members"
                "; expected a weight for each, none below 0, that sum to 1",
                fix="divide them by their sum",
            )
        super().__init__(members[0].tokenizer)
        self.members: Any = nn.ModuleList(members)
        self.weights = tuple(weights)
        self.encoders = [encoder for member in members for encoder in member.encoders]

    def forward(self, batch: PackedBatch) -> Tensor:
        """Not of an ensemble: a packed batch is tokens of one tokenizer."""
        raise _text_required_error()

    def predict_scores(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Not of an ensemble; see `score_pairs`."""
        raise _text_required_error()

    def predict_sequences(
        self,
        encoded: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Not of an ensemble; see `score_pairs`."""
        raise _text_required_error()

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """The weighted mean of the members' scores, nothing dropped; float32, shape [pairs, 1]."""
        scores = [member.score_exits(questions, candidates)[:, -1] for member in self.members]
        return np.average(scores, axis=0, weights=self.weights).astype(np.float32)[:, None]

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """The weighted mean of the members' scores, nothing dropped; see `Ranker.score_pairs`."""
        self.check_no_drop_ratios(drop_ratios)
        return StagedScores(self.predict_exits(questions, candidates)[:, 0])


def _text_required_error() -> CheckpointError:
    return CheckpointError(
        "tokens for an ensemble; expected text: every member has its own tokenizer",
        fix="call score_pairs, score_table or rank",
    )
