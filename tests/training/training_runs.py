"""Trainers on the tiny corpus, for this process or a spawned one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import tiny
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.data.packed_dataset import MicroBatch, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.losses import LOSSES
from as2ray.losses.base import Loss, StepContext
from as2ray.tables.parquet import ParquetTable
from as2ray.training import parallel
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import RunDescription, TrackingConfig, read_metrics
from as2ray.training.trainer import Trainer
from as2ray.training.validation import EvalSet

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEV = tiny.candidates(12, seed=1)


class StopTrainingError(Exception):
    """Raised by tests to interrupt a run."""


@dataclass
class FunctionLoss(Loss):
    """A loss from a function of logits and targets."""

    function: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]

    def compute(self, output, targets, context: StepContext) -> torch.Tensor:
        return self.function(output, targets)


@dataclass
class InterruptedSource:
    """A source of packed batches that raises before a step of an epoch."""

    dataset: PackedDataset
    stop_before: tuple[int, int]

    @property
    def steps(self) -> int:
        return self.dataset.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for micro_batch in self.dataset.epoch(epoch, start):
            if (epoch, micro_batch.step) == self.stop_before:
                raise StopTrainingError
            yield micro_batch
        if (epoch, self.steps) == self.stop_before:
            raise StopTrainingError


def create_trainer(
    model: Path,
    corpus: Path,
    folder: Path,
    *,
    loss: Loss = LOSSES["cross_entropy"],
    exit_layers: tuple[int, ...] | None = None,
    stop_before: tuple[int, int] | None = None,
    dev: pa.Table = DEV,
    log_every_steps: int = 1,
    save_every_steps: int | None = None,
    tracking: TrackingConfig | None = None,
    run: RunDescription | None = None,
    **training: object,
) -> Trainer:
    """A trainer over all pairs of `corpus`; by default in fp32 and with a high learning rate.

    With `save_every_steps` it saves resume states; by default a test ends before one is due.
    """
    config = TrainingConfig(**{"precision": "fp32", "learning_rate": 3e-3, **training})
    ranker = init_ranker(model, max_length=40, exit_layers=exit_layers, seed=config.seed)
    dataset = PackedDataset(
        PairReader(ParquetTable.open(corpus), ranker.tokenizer),
        config.global_batch_size,
        config.max_batch_tokens,
        config.seed,
        parallel.get_rank(),
        parallel.get_world_size(),
    )
    return Trainer(
        ranker,
        loss,
        dataset if stop_before is None else InterruptedSource(dataset, stop_before),
        config,
        LocalCheckpointStore(folder, 1e-9 if save_every_steps else 600.0, save_every_steps or 1),
        {"dev": EvalSet.from_table(dev, ranker, 400)},
        folder,
        replace(tracking or TrackingConfig(tensorboard=False), log_every_steps=log_every_steps),
        run,
    )


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same weights but for rounding, which AdamW enlarges where a gradient is almost 0."""
    assert one.keys() == other.keys()
    for name in one:
        if "key.bias" not in name:  # changes no score, and follows rounding alone
            apart = (one[name] - other[name]).abs()
            assert apart.mean() < 1e-6, name
            assert apart.max() < 2e-4, name


def read_losses(folder: Path) -> list[float]:
    """The loss of each line that has one."""
    return [line["train/loss"] for line in read_logged(folder, "train/loss")]


def read_logged(folder: Path, *names: str) -> list[dict[str, float]]:
    """The logged lines that hold all of `names`, reduced to them and the step."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: x[k] for k in ("step", *names)} for x in lines if all(n in x for n in names)]
