"""What a training run is told: everything that changes its result, and nothing that does not.

Knows plain values. Must not know models, data or Ray.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from as2ray.errors import ConfigError

SchedulerType = Literal["linear", "triangular", "constant"]
"""What follows the warm-up."""

RestartInterval = Literal["epoch"]
"""When schedule and moments begin anew."""

Precision = Literal["auto", "fp32", "bf16"]
"""Number format of training; fp16 would need its loss scaled, and serves for ranking alone."""

SELECTION_METRIC = "dev/AP"
"""Metric that chooses the best checkpoint and stops a run early."""

SelectBy = Literal["dev/AP", "epoch"]
"""Whose highest value chooses the checkpoint that a run is about."""


@dataclass(frozen=True)
class TrainingConfig:
    """One run of the training loop. The defaults fine-tune a small encoder on a small corpus."""

    epochs: int = 3
    """Passes over the corpus."""
    global_batch_size: int = 32
    """Pairs of a step over all workers: the global batch, however many workers share it."""
    global_batch_tokens: int | None = None
    """The global batch in tokens instead; turned into pairs by the corpus's mean length."""
    max_batch_tokens: int = 8_192
    """Most tokens of a packed batch; a larger share of a step is accumulated."""
    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    head_learning_rate: float | None = None
    """Peak of what stands after the encoder, where it is another."""
    weight_decay: float = 0.01
    """On matrices; biases and layer norms have none."""
    lr_scheduler_type: SchedulerType = "linear"
    """What follows the warm-up: down to 0 at the end; down and up again in triangles; level."""
    warmup_ratio: float = 0.1
    """Part of the run in which the rate grows from 0 to its peak."""
    restart_every: RestartInterval | None = None
    """`epoch`: begin schedule and AdamW's moments anew with every epoch, as FlexNeuART does."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    precision: Precision = "auto"
    """Number format of the matrix products; weights and their updates stay fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    fsdp: bool = False
    """Share parameters and optimiser state out over the workers (FSDP2) instead of copying."""
    eval_steps: int | None = None
    """Steps between validations; by default once an epoch."""
    select_by: SelectBy = "dev/AP"
    """Which checkpoint is the run's ranker: the one with the highest dev MAP, or, by `epoch`, the
    last. A small dev table chooses between late epochs nearly at random."""
    early_stopping_patience: int | None = None
    """Validations without a better dev measure before the run stops; by default it never does."""
    seed: int = 0
    """Of the order of pairs, dropout and a new head's weights."""

    def __post_init__(self) -> None:
        ranges = {
            "epochs": self.epochs >= 1,
            "batch": self.global_batch_size >= 1,
            "batch_tokens": self.global_batch_tokens is None or self.global_batch_tokens >= 1,
            "max_tokens": self.max_batch_tokens >= 1,
            "learning_rate": self.learning_rate > 0,
            "head_learning_rate": self.head_learning_rate is None or self.head_learning_rate > 0,
            "restart": self.restart_every is None
            or self.restart_every in get_args(RestartInterval),
            "weight_decay": self.weight_decay >= 0,
            "schedule": self.lr_scheduler_type in get_args(SchedulerType),
            "selection": self.select_by in get_args(SelectBy),
            "precision": self.precision in get_args(Precision),
            "seed": self.seed >= 0,
            "warmup": 0 <= self.warmup_ratio < 1,
            "triangular needs warmup": self.lr_scheduler_type != "triangular"
            or self.warmup_ratio > 0,
            "clip": self.max_grad_norm >= 0,
            "validate_every": self.eval_steps is None or self.eval_steps >= 1,
            "patience": self.early_stopping_patience is None or self.early_stopping_patience >= 1,
        }
        wrong = {name: getattr(self, name, None) for name, fine in ranges.items() if not fine}
        if wrong:
            raise ConfigError(
                f"training settings out of range: {wrong}"
                "; expected counts >= 1, learning rates > 0, 0 <= warmup < 1 (triangular: > 0), "
                f"clip, weight_decay and seed >= 0, a schedule of {get_args(SchedulerType)}, "
                f"a precision of {get_args(Precision)}, a selection of {get_args(SelectBy)}",
            )
