"""Training jobs as plain values, which can be sent to any machine.

The module loads neither transformers nor Ray, so that processes that only pass a job on, such as
Ray's controllers and trials, start quickly. `run_job.run_job` runs a job.
"""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as validated_dataclass

from as2ray.errors import raise_config_errors
from as2ray.losses import ConfigurableLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import RunDescription, TrackingConfig

Pooling = Literal["mean_of_rest", "mean", "first"]
"""What a new cascade's partial classifiers may read; see `ModelSpec.pooling`."""


@raise_config_errors
@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ModelSpec:
    """Pretrained model to start from, and what kind of ranker to make of it."""

    path: str
    """Folder or hub id of a pretrained encoder or of a ranker; `ID@REVISION` pins a hub id."""
    max_length: PositiveInt = 128
    """Maximum number of tokens of a pair; the candidate is truncated."""
    max_question_length: PositiveInt | None = None
    """Maximum number of tokens of a question; by default that of the model, or 64."""
    max_candidate_length: PositiveInt | None = None
    """Maximum number of tokens of a candidate; by default all that the question leaves."""
    single_separator: bool | None = None
    """Put one separator between question and candidate, of RoBERTa too, whose pairs have two.
    By default as the model has them."""
    head: Literal["own", "linear"] = "own"
    """Head of a new pointwise ranker: that of the encoder's family, with two labels, or `linear`:
    one linear layer on the first token, without a pooler and with one label."""
    num_layers: PositiveInt | None = None
    """Keep only the first layers of the encoder."""
    exit_layers: tuple[PositiveInt, ...] | None = None
    """Make a cascade: number of layers below each partial classifier, ascending."""
    pooling: Pooling = "mean_of_rest"
    """Input of a cascade's partial classifiers: the mean of all token states but the first, as in
    the paper, of all, or the first."""
    num_ranking_heads: NonNegativeInt = 0
    """CERBERUS's heads after the last exit; each is a copy of the layers above it."""
    score_averaging: Literal["probabilities", "logits"] = "probabilities"
    """What is averaged over the ranking heads to give one score."""


@dataclass(frozen=True)
class TrainingJob:
    """One training run on prepared tables."""

    model: ModelSpec
    train_tables: tuple[str, ...]
    """Absolute paths of folders of Parquet files; several folders are read as one corpus."""
    eval_tables: dict[str, str]
    """Folder of each evaluation table by name; `dev` selects the best checkpoint, if one is."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: str | ConfigurableLoss = "cross_entropy"
    """Name of a loss, or a loss with settings. `DistillationLoss` needs `teacher_logits`;
    `TwoInOneLoss` needs tables by passages."""
    train_weights: tuple[float, ...] = ()
    """Weight of the pairs of each training table in the cross entropy; by default 1."""
    teacher_logits: tuple[tuple[str, ...], ...] = ()
    """For each teacher, the folders of its stored logits, in the order of `train_tables`."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run: RunDescription = field(default_factory=RunDescription)
    """What trackers show of the run; `params` are the settings of this job."""

    @property
    def is_joint(self) -> bool:
        """Whether it trains a joint model of passages and their sentences."""
        return isinstance(self.loss, TwoInOneLoss)

    @property
    def extract_answers(self) -> bool:
        """Whether the joint model also extracts short answers."""
        return isinstance(self.loss, TwoInOneLoss) and self.loss.answer_loss


@dataclass(frozen=True)
class EncoderJob:
    """What a sentence encoder is trained from."""

    encoder: str
    """Folder, hub id or packaged name of the encoder to start from."""
    tables: tuple[str, ...]
    """Folders of candidates tables, whose positives are the answers to their questions."""
    training: TrainingConfig
