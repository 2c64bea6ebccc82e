"""Hyperparameters of a training run: every setting that changes its result."""

from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass

from as2ray.errors import raise_config_errors

SELECTION_METRIC = "dev/AP"
"""Metric that selects the best checkpoint and that early stopping follows."""


@raise_config_errors
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainingConfig:
    """Hyperparameters of one training run. The defaults suit a small encoder and corpus."""

    epochs: PositiveInt = 3
    """Passes over the training tables."""
    max_steps: PositiveInt | None = None
    """Length of the run in optimizer steps, instead of `epochs`."""
    global_batch_size: PositiveInt = 32
    """Examples per optimizer step, over all workers."""
    global_batch_tokens: PositiveInt | None = None
    """Batch size in tokens instead; converted to examples by the mean length of the corpus."""
    max_batch_tokens: PositiveInt = 8_192
    """Maximum number of tokens of a packed batch; a larger step accumulates gradients."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate of AdamW."""
    head_learning_rate: PositiveFloat | None = None
    """Peak learning rate of the weights outside the encoder; by default `learning_rate`."""
    weight_decay: NonNegativeFloat = 0.01
    """Applied to matrices only, not to biases and layer norms."""
    lr_scheduler_type: Literal["linear", "triangular", "constant"] = "linear"
    """Learning rate after the warm-up: linear decay to 0, repeated triangles, or constant."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the run in which the learning rate grows from 0 to its peak."""
    warmup_steps: NonNegativeInt | None = None
    """Number of optimizer steps of the warm-up, instead of `warmup_ratio`. A shorter run ends
    before its peak."""
    restart_every: Literal["epoch"] | None = None
    """`epoch` restarts the schedule and AdamW's moments with every epoch, as FlexNeuART does."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Norm to which gradients are clipped; 0 disables clipping."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of matrix products; weights and their updates stay in fp32. There is no fp16,
    which would need loss scaling."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    fsdp: bool = False
    """Shard parameters and optimizer state over the workers (FSDP2) instead of copying them."""
    eval_steps: PositiveInt | None = None
    """Steps between evaluations; by default one evaluation per epoch."""
    select_by: Literal["dev/AP", "dev/RR", "dev/P@1", "dev/nDCG@10", "epoch"] = "dev/AP"
    """Which checkpoint becomes the ranker: the one with the highest measure on dev, which early
    stopping follows too, or the last. A small dev table chooses between late epochs nearly at
    random."""
    early_stopping_patience: PositiveInt | None = None
    """Evaluations without improvement before the run stops; by default it never does."""
    num_data_shards: PositiveInt = 1
    """Shards of the data, of which every worker reads some: about as many as workers at most. The
    number changes the order of examples; the number of workers does not."""
    seed: NonNegativeInt = 0
    """Seed of the order of examples, of dropout and of new heads."""

    @model_validator(mode="after")
    def _check_triangular(self) -> "TrainingConfig":
        if self.lr_scheduler_type == "triangular" and self.warmup_share(1) == 0:
            raise ValueError("lr_scheduler_type=triangular needs a warm-up")
        return self

    @property
    def selection_metric(self) -> str:
        """The metric that early stopping follows."""
        return SELECTION_METRIC if self.select_by == "epoch" else self.select_by

    @property
    def needs_dev(self) -> bool:
        """Whether a dev table selects the checkpoint or stops the run."""
        return self.select_by != "epoch" or self.early_stopping_patience is not None

    def warmup_share(self, num_steps: int) -> float:
        """Returns the share of a run of `num_steps` steps that is the warm-up; it may exceed 1."""
        if self.warmup_steps is None:
            return self.warmup_ratio
        return self.warmup_steps / max(1, num_steps)


TABLE_TRAINING = TrainingConfig(learning_rate=5e-5)
"""Defaults of `as2ray train`, whose default encoder is small."""
