"""Ensembles: the weighted mean of the scores of independent rankers (CERBERUS, section 3.2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from as2ray.errors import ConfigError
from as2ray.models.ranker import Ranker

WEIGHT_SUM_TOLERANCE = 1e-6
"""Maximum difference of the sum of the weights from 1."""

SHARED_SETTINGS = frozenset(
    {"dtype", "allow_parallel", "is_reproducible", "use_fused_layers", "max_batch_tokens"}
)
"""Attributes that are set on the members, too, when they are set on the ensemble."""


class EnsembleRanker(Ranker):
    """Several rankers as one. It scores text, because each member has its own tokenizer.

    Args:
        members: The rankers.
        weights: Weight of each member, not negative, with sum 1; by default equal.

    Raises:
        ConfigError: The weights do not fit the members.
    """

    def __init__(self, members: Sequence[Ranker], weights: Sequence[float] | None = None) -> None:
        weights = [1.0 / max(1, len(members))] * len(members) if weights is None else weights
        is_valid = len(weights) == len(members) > 0 and min(weights) >= 0
        # The comparison is False for NaN.
        if not (is_valid and abs(sum(weights) - 1.0) <= WEIGHT_SUM_TOLERANCE):
            raise ConfigError(
                f"weights {list(weights)} do not fit {len(members)} members: an ensemble needs one "
                "weight per member, not negative, with sum 1"
            )
        super().__init__(members[0].tokenizer)
        self.members: Any = nn.ModuleList(members)
        self.weights = tuple(weights)
        self.encoders = [encoder for member in members for encoder in member.encoders]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in SHARED_SETTINGS:
            for member in getattr(self, "members", ()):
                setattr(member, name, value)

    @property
    def dtype_name(self) -> str:
        """The formats of the members."""
        return ", ".join(dict.fromkeys(member.dtype_name for member in self.members))

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without calibration."""
        return {"ranker": "ensemble", "weights": self.weights}

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Returns the weighted mean of the members' last stages; float32, shape [pairs, 1]."""
        scores = [member.predict_exits(questions, candidates)[:, -1] for member in self.members]
        return np.average(scores, axis=0, weights=self.weights).astype(np.float32)[:, None]
