"""A training job: all that a process needs to train, as plain values that travel to any machine.

Knows paths of prepared tables and checkpoints. Must not know models: whoever hands a job on, as
Ray's controllers and trials do, need not load transformers; who carries it out calls `train.train`.
"""

from dataclasses import dataclass, field

from as2ray.models.average import Average
from as2ray.objectives import TwoInOne, WithSettings
from as2ray.training.config import Training
from as2ray.training.tracking import Tracking


@dataclass(frozen=True)
class Model:
    """Where a ranker to be trained comes from."""

    path: str
    """Folder or hub id of a pretrained encoder or of a ranker."""
    max_length: int = 128
    """Most tokens of a pair; the candidate is truncated."""
    layers: int | None = None
    """Keep the first layers only."""
    exits: tuple[int, ...] | None = None
    """Make a cascade: layers run before each partial classifier, ascending."""
    pooling: str = "mean"
    """What its partial classifiers look at: the `mean` of all token states, or the `first`."""
    heads: int = 0
    """CERBERUS's heads after the last exit: a copy each of the layers above it."""
    average: Average = "probabilities"
    """How the heads become one score."""


@dataclass(frozen=True)
class Job:
    """One run of the training loop on prepared tables."""

    model: Model
    """What to start from."""
    train: tuple[str, ...]
    """Folders of Parquet files, absolute; several are one corpus (a union)."""
    watched: dict[str, str]
    """Folders of the tables whose MAP is followed; `dev` selects the best checkpoint."""
    training: Training = field(default_factory=Training)
    """What changes the result."""
    objective: str | WithSettings = "cross_entropy"
    """Name of the loss, or one with settings: distillation is from `teachers`, a joint model's is
    on tables by passages."""
    teachers: tuple[tuple[str, ...], ...] = ()
    """For each teacher its stored logits: a folder beside each of `train`, in their order."""
    tracking: Tracking = field(default_factory=Tracking)
    """What follows the run."""

    @property
    def joint(self) -> bool:
        """Whether it trains a joint model of passages and their sentences."""
        return isinstance(self.objective, TwoInOne)

    @property
    def answers(self) -> bool:
        """Whether that model finds short answers, too."""
        return isinstance(self.objective, TwoInOne) and self.objective.answers
