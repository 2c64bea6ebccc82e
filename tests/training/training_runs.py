"""Runs of the training loop on the tiny corpus, for this process or a spawned one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import tiny
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.data.packed_dataset import MicroBatch, Stream
from as2ray.losses import LOSSES
from as2ray.tables.parquet import ParquetTable
from as2ray.training import parallel
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import SELECTION_METRIC, TrainingConfig
from as2ray.training.tracking import TrackingConfig, read_metrics
from as2ray.training.trainer import Trainer
from as2ray.training.validation import EvalSet

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEV = tiny.candidates(12, seed=1)


class Interrupted(Exception):
    """What a test ends a run with."""


@dataclass
class Breaking:
    """A stream that ends in an exception before a step of an epoch."""

    stream: Stream
    at: tuple[int, int]

    @property
    def steps(self) -> int:
        return self.stream.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for micro in self.stream.epoch(epoch, start):
            if (epoch, micro.step) == self.at:
                raise Interrupted
            yield micro
        if (epoch, self.steps) == self.at:
            raise Interrupted


def loop_of(
    model: Path,
    corpus: Path,
    folder: Path,
    *,
    objective=LOSSES["cross_entropy"],
    exits: tuple[int, ...] | None = None,
    stop_before: tuple[int, int] | None = None,
    dev: pa.Table = DEV,
    every: int = 1,
    **training: object,
) -> Trainer:
    """A loop over all pairs of `corpus`; in fp32 and with a high rate unless told otherwise."""
    told = TrainingConfig(**{"precision": "fp32", "learning_rate": 3e-3, **training})
    ranker = init_ranker(model, max_length=40, exit_layers=exits, seed=told.seed)
    data = Stream(
        ParquetTable.open(corpus),
        ranker.tokenizer,
        told.global_batch_size,
        told.max_batch_tokens,
        told.seed,
        parallel.get_rank(),
        parallel.get_world_size(),
    )
    return Trainer(
        ranker,
        objective,
        data if stop_before is None else Breaking(data, stop_before),
        told,
        LocalCheckpointStore(folder, SELECTION_METRIC),
        {"dev": EvalSet.from_table(dev, ranker, 400)},
        folder,
        TrackingConfig(log_every_steps=every, tensorboard=False),
    )


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same weights but for rounding, which AdamW enlarges where a gradient is almost 0."""
    assert one.keys() == other.keys()
    for name in one:
        if "key.bias" not in name:  # changes no score, and follows rounding alone
            apart = (one[name] - other[name]).abs()
            assert apart.mean() < 1e-6, name
            assert apart.max() < 2e-4, name


def told(folder: Path, *names: str) -> list[dict[str, float]]:
    """The reports that hold all of `names`, cut down to them and the step."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: x[k] for k in ("step", *names)} for x in lines if all(n in x for n in names)]
