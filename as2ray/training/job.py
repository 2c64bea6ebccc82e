"""A training job: all that a process needs to train, as plain values that travel to any machine.

Knows paths of prepared tables and checkpoints. Must not know models: whoever hands a job on, as
Ray's controllers and trials do, need not load transformers; who carries it out calls `train.train`.
"""

from dataclasses import dataclass, field
from typing import Literal

from as2ray.losses import ConfigurableLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import TrackingConfig


@dataclass(frozen=True)
class ModelSpec:
    """Where a ranker to be trained comes from."""

    path: str
    """Folder or hub id of a pretrained encoder or of a ranker."""
    max_length: int = 128
    """Most tokens of a pair; the candidate is truncated."""
    num_layers: int | None = None
    """Keep the first layers only."""
    exit_layers: tuple[int, ...] | None = None
    """Make a cascade: layers run before each partial classifier, ascending."""
    pooling: str = "mean"
    """What its partial classifiers look at: the `mean` of all token states, or the `first`."""
    num_ranking_heads: int = 0
    """CERBERUS's heads after the last exit: a copy each of the layers above it."""
    score_averaging: Literal["probabilities", "logits"] = "probabilities"
    """How the heads become one score."""


@dataclass(frozen=True)
class TrainingJob:
    """One run of the training loop on prepared tables."""

    model: ModelSpec
    """What to start from."""
    train_tables: tuple[str, ...]
    """Folders of Parquet files, absolute; several are one corpus (a union)."""
    eval_tables: dict[str, str]
    """Folders of the tables whose MAP is followed; `dev` selects the best checkpoint."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """What changes the result."""
    loss: str | ConfigurableLoss = "cross_entropy"
    """Name of the loss, or one with settings: distillation is from `teachers`, a joint model's is
    on tables by passages."""
    teacher_logits: tuple[tuple[str, ...], ...] = ()
    """For each teacher its stored logits: a folder beside each of `train`, in their order."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What follows the run."""

    @property
    def is_joint(self) -> bool:
        """Whether it trains a joint model of passages and their sentences."""
        return isinstance(self.loss, TwoInOneLoss)

    @property
    def extract_answers(self) -> bool:
        """Whether that model finds short answers, too."""
        return isinstance(self.loss, TwoInOneLoss) and self.loss.answer_loss
