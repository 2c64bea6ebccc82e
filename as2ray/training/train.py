"""Carrying out a training job: from its paths to a ranker, a stream and the loop.

Knows jobs, checkpoints and the loop. Must not know Ray.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from as2ray import checkpoint
from as2ray.models.ranker import Ranker
from as2ray.objectives import Listwise, Margin, TwoInOne, objective
from as2ray.text.files import PairFiles
from as2ray.text.list_stream import ListStream
from as2ray.text.passage_stream import PassageStream
from as2ray.text.stream import Stream
from as2ray.training import parallel
from as2ray.training.job import Job
from as2ray.training.loop import Epochs, Loop, Progress
from as2ray.training.run import LocalRun, Run
from as2ray.training.validation import Watched, WatchedPassages


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
    """Trains in this process alone, without Ray; the folder of the ranker that was selected."""
    run = LocalRun(folder, job.training.selection)
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


def _kind(job: Job) -> Callable[..., Stream]:
    """What a row of the run's data is."""
    task = objective(job.objective)
    if isinstance(task, Listwise | Margin):
        return partial(ListStream, candidates=task.candidates)
    return PassageStream if job.joint else Stream
