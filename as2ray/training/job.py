"""A training job: all that a process needs to train, as plain values that travel to any machine.

Knows paths of prepared tables and checkpoints. Must not know Ray.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from as2ray import checkpoint
from as2ray.models.cerberus import Average
from as2ray.models.ranker import Ranker
from as2ray.objectives import Margin, TwoInOne, WithSettings, objective
from as2ray.text.files import PairFiles
from as2ray.text.paired_stream import PairedStream
from as2ray.text.passage_stream import PassageStream
from as2ray.text.stream import Stream
from as2ray.training import parallel
from as2ray.training.config import Training
from as2ray.training.loop import SELECTION, Epochs, Loop, Progress
from as2ray.training.run import LocalRun, Run
from as2ray.training.tracking import Tracking
from as2ray.training.validation import Watched, WatchedPassages


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


def train(
    job: Job, folder: str | Path, run: Run, data: Callable[[Stream], Epochs] = lambda stream: stream
) -> Progress:
    """Trains in this process, which may be one of several of a process group.

    Args:
        job: What to do.
        folder: Where trackers write.
        run: Where to report and resume.
        data: Puts another source of the same packed batches in place of the stream.
    """
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    )
    model = job.model
    started = checkpoint.start(
        **asdict(model), joint=job.joint, answers=job.answers, seed=job.training.seed
    )
    ranker = started.to(device)
    watched = {name: _watched(job, path, ranker) for name, path in job.watched.items()}
    loop = Loop(
        ranker,
        objective(job.objective),
        data(_stream(job, ranker)),
        job.training,
        run,
        watched,
        folder,
        job.tracking,
    )
    return loop.fit()


def train_here(job: Job, folder: str | Path) -> Path:
    """Trains in this process alone, without Ray; the best ranker's folder."""
    run = LocalRun(folder, SELECTION)
    train(job, folder, run)
    best = run.best()
    assert best is not None  # the last step of a run is always validated
    return best / "ranker"


def _watched(job: Job, path: str, ranker: Ranker) -> Watched | WatchedPassages:
    table, max_tokens = PairFiles.find(path).table(), job.training.max_tokens
    if isinstance(job.objective, TwoInOne):
        return WatchedPassages.pack(table, ranker, max_tokens, job.objective)
    return Watched.pack(table, ranker, max_tokens)


def _stream(job: Job, ranker: Ranker) -> Stream:
    training = job.training
    stream = _kind(job)(
        PairFiles.find(job.train),
        ranker.tokenizer,
        training.batch,
        training.max_tokens,
        training.seed,
        parallel.rank(),
        parallel.ranks(),
        teachers=tuple(PairFiles.find(stored) for stored in job.teachers),
    )
    if training.batch_tokens is None:
        return stream
    return replace(stream, batch=max(1, round(training.batch_tokens / stream.mean_length())))


def _kind(job: Job) -> type[Stream]:
    """What a row of the run's data is."""
    if job.joint:
        return PassageStream
    return PairedStream if isinstance(objective(job.objective), Margin) else Stream
