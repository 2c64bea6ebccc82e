"""How a finished ranker becomes a cascade, as plain values; loads neither torch nor Ray."""

from dataclasses import replace
from typing import Annotated

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass

from as2ray.cascade.margins import Risk
from as2ray.errors import raise_config_errors

HIGH_CONFIDENCE = 0.9
"""Confidence of a bound by Learn then Test."""

AT_LEAST = 0.99
"""Default of `CascadeConfig.at_least`."""

MAX_LOSS = 0.02
"""Default of `CascadeConfig.max_loss`."""


@raise_config_errors
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CascadeConfig:
    """How the exits of a finished ranker are fitted, and what they may lose."""

    exit_layers: tuple[PositiveInt, ...] | None = None
    """Number of layers below each exit that may be used; by default every layer."""
    drop_ratios: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = None
    """Drop ratio after each exit but the last, or one for all, instead of margins with a bound."""
    max_loss: Annotated[float, Field(gt=0, lt=1)] = MAX_LOSS
    """Bound on the mean of 1 - 1 / (place that the cascade gives to the ranker's first). With
    `keep_top` it does not count."""
    use_labels: bool = False
    """Bound the loss of reciprocal rank against the labels instead. BM25 then has a part in the
    scores of the last exit, too, whose weight is fitted to the labels."""
    keep_top: PositiveInt | None = None
    """Bound the probability that one of the ranker's first candidates is dropped: so many."""
    at_least: Annotated[float, Field(gt=0, lt=1)] = AT_LEAST
    """With `keep_top`: probability that none of them is dropped."""
    high_confidence: bool = False
    """Let the mean loss stay below the bound with a probability of 90 % over the choice of the
    questions; otherwise the expected loss does. It needs more questions."""
    use_bm25: bool = True
    """Let candidates leave before the first layer whose BM25, counted over the question's
    candidates, lies too far below the best; the margin is one of those that the bound chooses. BM25
    also has a part in the scores of the exits, of the last one with `use_labels`. With
    `drop_ratios` it has none."""
    int8: bool = False
    """Fit the ranges of activations that int8 needs. Where the ranker's dtype is then int8, exits
    and margins are fitted to its scores in int8."""
    joint: bool = False
    """Then train the encoder and all exits together, to give the ranker's logits. The exits become
    better, and the last one is no longer the ranker itself; it takes minutes instead of seconds."""
    joint_epochs: PositiveInt = 3
    """Epochs of the joint training."""
    joint_learning_rate: PositiveFloat = 5e-5
    """Peak learning rate of the encoder in the joint training; the classifiers have ten times."""
    label_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the labels in the joint training; the rest is that of the ranker's logits. By
    default 0.5 if the table has labels of both kinds, and 0 otherwise."""
    epochs: PositiveInt = 20
    """Epochs of the exits' classifiers on the frozen encoder."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    max_train_pairs: PositiveInt = 20_000
    """Maximum number of pairs that train the exits' classifiers, and that order the margins."""
    seed: NonNegativeInt = 0
    """Seed of the classifiers' weights and of the division of the questions."""

    @model_validator(mode="after")
    def _check_bound(self) -> "CascadeConfig":
        if self.keep_top is None and self.at_least != AT_LEAST:
            raise ValueError(f"at_least={self.at_least:g} needs keep_top")
        bounds = [n for n in ("keep_top", "use_labels", "high_confidence") if getattr(self, n)]
        if self.max_loss != MAX_LOSS:
            bounds.append(f"max_loss={self.max_loss:g}")
        if self.drop_ratios is not None and bounds:
            raise ValueError(f"drop ratios have no bound, so leave out {', '.join(bounds)}")
        for name in ("label_weight", "joint_epochs", "joint_learning_rate"):
            value = getattr(self, name)
            if not self.joint and value != getattr(type(self), name):
                raise ValueError(f"{name}={value:g} needs joint")
        return self

    @property
    def risk(self) -> Risk:
        """What is bounded."""
        if self.keep_top is not None:
            return "top_k"
        return "reciprocal_rank" if self.use_labels else "first_place"

    @property
    def bound(self) -> tuple[float, float | None]:
        """The bound on the loss, and its confidence."""
        max_loss = self.max_loss if self.keep_top is None else 1.0 - self.at_least
        return max_loss, HIGH_CONFIDENCE if self.high_confidence else None

    def without_bound(self) -> "CascadeConfig":
        """Returns the settings that train the exits, which do not depend on the bound."""
        return replace(
            self,
            max_loss=0.5 if self.drop_ratios is None else MAX_LOSS,
            use_labels=False,
            keep_top=None,
            at_least=AT_LEAST,
            high_confidence=False,
            use_bm25=True,
        )
