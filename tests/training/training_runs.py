"""Runs of the training loop on the tiny corpus, for this process or a spawned one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import tiny
import torch

from as2ray.checkpoint import start
from as2ray.objectives import OBJECTIVES
from as2ray.text.files import PairFiles
from as2ray.text.stream import MicroBatch, Stream
from as2ray.training import parallel
from as2ray.training.config import SELECTION, Training
from as2ray.training.loop import Loop
from as2ray.training.run import LocalRun
from as2ray.training.tracking import Tracking, read
from as2ray.training.validation import Watched

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
    objective=OBJECTIVES["cross_entropy"],
    exits: tuple[int, ...] | None = None,
    stop_before: tuple[int, int] | None = None,
    dev: pa.Table = DEV,
    every: int = 1,
    **training: object,
) -> Loop:
    """A loop over all pairs of `corpus`; in fp32 and with a high rate unless told otherwise."""
    told = Training(**{"precision": "fp32", "learning_rate": 3e-3, **training})
    ranker = start(model, max_length=40, exits=exits, seed=told.seed)
    data = Stream(
        PairFiles.find(corpus),
        ranker.tokenizer,
        told.batch,
        told.max_tokens,
        told.seed,
        parallel.rank(),
        parallel.ranks(),
    )
    return Loop(
        ranker,
        objective,
        data if stop_before is None else Breaking(data, stop_before),
        told,
        LocalRun(folder, SELECTION),
        {"dev": Watched.pack(dev, ranker, 400)},
        folder,
        Tracking(every=every, tensorboard=False),
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
    lines = read(folder / "metrics.jsonl")
    return [{k: x[k] for k in ("step", *names)} for x in lines if all(n in x for n in names)]
