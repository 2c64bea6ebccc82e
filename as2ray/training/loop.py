"""The training loop: packed batches in, a trained ranker out, whatever the objective.

Knows torch, packed batches and a `Run` to report to. Must not know corpora, objectives' insides
or Ray: it runs the same in a notebook, on a bare GPU machine and in a worker of Ray Train.
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from as2ray.checkpoint import save, weights_of
from as2ray.errors import RecipeError, TrainingError
from as2ray.models.ranker import Ranker
from as2ray.objectives import Moment, Objective
from as2ray.text.stream import MicroBatch
from as2ray.training import parallel
from as2ray.training.config import SELECTION, Training
from as2ray.training.run import Run
from as2ray.training.schedule import optimiser, rate
from as2ray.training.tracking import Tracker, Tracking, tell, trackers
from as2ray.training.validation import Watched, WatchedPassages, validate

_NOT_WRITTEN = (OSError, SafetensorError, RuntimeError)
"""What a full disk causes: of files, of safetensors, of torch's own format."""


class Epochs(Protocol):
    """Where packed batches come from: `text.stream.Stream`, or Ray Data in its place."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterable[MicroBatch]:
        """This worker's packed batches from step `start` of an epoch on."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all that is needed, beside weights and moments, to go on."""

    epoch: int = 0
    """Epoch in work, from 0."""
    step: int = 0
    """Steps done in it."""
    steps: int = 0
    """Steps done in all."""
    best: float = -1.0
    """Highest selection metric so far."""
    waited: int = 0
    """Validations since."""
    stopped: bool = False
    """Whether patience ran out."""


class Loop:
    """A run of training.

    Args:
        ranker: What to train; on its device already.
        objective: What to do at each step.
        data: Packed batches by epoch.
        training: What changes the result.
        run: Where to report and resume.
        watched: Tables whose MAP is followed; `dev` selects the best checkpoint.
        folder: Where trackers write.
        tracking: What follows the run.
    """

    def __init__(
        self,
        ranker: Ranker,
        objective: Objective,
        data: Epochs,
        training: Training,
        run: Run,
        watched: Mapping[str, Watched | WatchedPassages],
        folder: str | Path,
        tracking: Tracking | None = None,
    ) -> None:
        if "dev" not in watched:
            raise RecipeError(
                f"tables to watch: {sorted(watched)}",
                expected=f"one named 'dev': {SELECTION} selects the best checkpoint",
                mend="name the development split 'dev'",
            )
        asks = "exits" in objective.at(Moment(exits=max(1, len(ranker.exits)))).asked
        if (asks and not ranker.exits) or (len(ranker.exits) > 1 and not asks):
            raise RecipeError(
                f"objective {objective} for a ranker with exits {ranker.exits}",
                expected="an objective of exits for a cascade, another for any other ranker",
                mend="name an objective such as 'uniform_exit', or leave the model's exits out",
            )
        self.ranker, self.objective, self.data = ranker, objective, data
        self.training, self.run, self.watched = training, run, watched
        ranker.precision = training.precision
        ranker.gradient_checkpointing(training.gradient_checkpointing)
        self.model: nn.Module = parallel.spread(ranker, training.sharded)
        self.optimiser = optimiser(self.model, training, ranker.network.base_model_prefix)
        peaks = [group["lr"] for group in self.optimiser.param_groups]
        self.shares = [peak / training.learning_rate for peak in peaks]
        self.progress = self._resume()
        self.since = _Since.now(ranker.device)
        self.tracking = tracking or Tracking()
        self.trackers: list[Tracker] = []
        if parallel.rank() == 0:
            self.trackers = trackers(self.tracking, Path(folder), self.progress.steps)

    def fit(self) -> Progress:
        """Trains until the last epoch or until patience runs out."""
        try:
            while self.progress.epoch < self.training.epochs and not self.progress.stopped:
                self._epoch()
        finally:
            for tracker in self.trackers:
                tracker.close()
        return self.progress

    def _epoch(self) -> None:
        """The rest of the epoch in work."""
        self.model.train()
        data = self.data.epoch(self.progress.epoch, self.progress.step)
        for _, micros in groupby(data, key=lambda micro: micro.step):
            step = list(micros)
            tokens = sum(micro.batch.tokens for micro in step)
            self.since = self.since.then(self._step(step), tokens)
            due = self._validation_is_due()
            if due or self.since.steps >= self.tracking.every:
                self._tell_step(self.since)
                self.since = _Since.now(self.ranker.device)
            if due:
                self._validate()
                self.model.train()
                self.since = _Since.now(self.ranker.device)  # speed is training's alone
                if self.progress.stopped:
                    return
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, step=0)

    def _step(self, micros: list[MicroBatch]) -> Tensor:
        """One update of the weights; this worker's share of the mean loss of the step."""
        progress = self.progress
        task = self.objective.at(self._moment())
        # Dropout follows from where the run is, so a resumed run drops what it would have.
        torch.manual_seed(_seed(self.training.seed, progress.steps, parallel.rank()))
        loss = torch.zeros((), device=self.ranker.device)
        for micro, last in self._in_step(micros):
            with parallel.synchronising(self.model, last), self.ranker.autocast():
                logits = self.model(micro.batch, **task.asked)
                part = task.loss(logits, self._targets(micro)) / micro.pairs
                part = part * 0.0 if micro.empty else part
                # Workers' gradients are averaged; the loss is a mean over all workers' pairs.
                (part * parallel.ranks()).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        if self.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        height = self._rate()
        for group, share in zip(self.optimiser.param_groups, self.shares):
            group["lr"] = height * share
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.progress = replace(progress, step=progress.step + 1, steps=progress.steps + 1)
        return loss

    def _rate(self) -> float:
        """The encoder's learning rate in the step in work; an epoch begins anew if asked."""
        done, steps = self.progress.steps, self._total_steps()
        if self.training.restart == "epoch":
            done, steps = self.progress.step, self.data.steps
            if done == 0:
                self.optimiser.state.clear()
        return rate(self.training, (done + 1) / (steps + 1))

    def _moment(self) -> Moment:
        exits = len(self.ranker.exits)
        return Moment(self.progress.steps, self._total_steps(), self.training.seed, exits)

    def _in_step(self, micros: list[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """The passes of a step, and whether each is the last."""
        if self.training.sharded:
            # Workers that hold shares of the weights must all run equally often.
            passes = parallel.largest(len(micros), self.ranker.device)
            micros = micros + [micros[-1].emptied()] * (passes - len(micros))
        for number, micro in enumerate(micros):
            yield micro, number == len(micros) - 1

    def _targets(self, micro: MicroBatch) -> dict[str, Tensor]:
        told = {**micro.batch.of_sequence, **micro.batch.of_mark}
        return {n: torch.from_numpy(values).to(self.ranker.device) for n, values in told.items()}

    def _total_steps(self) -> int:
        return self.data.steps * self.training.epochs

    def _validation_is_due(self) -> bool:
        every = self.training.validate_every or self.data.steps
        steps = self.progress.steps
        return steps % every == 0 or steps == self._total_steps()

    def _tell_step(self, since: "_Since") -> None:
        tokens = torch.tensor(float(since.tokens), device=self.ranker.device)
        seconds = time.perf_counter() - since.began
        loss = float(parallel.total(since.loss)) / since.steps
        if not math.isfinite(loss):
            raise TrainingError(
                f"a loss of {loss} after {self.progress.steps:,} steps, at learning rate "
                f"{self.optimiser.param_groups[0]['lr']:.2g}",
                expected="a finite loss",
                mend="lower learning_rate, lengthen warmup, or set precision to fp32",
            )
        metrics = {
            "loss": loss,
            "learning_rate": self.optimiser.param_groups[0]["lr"],
            "tokens_per_second": float(parallel.total(tokens)) / seconds,
        }
        tell(self.trackers, self.progress.steps, metrics)

    def _validate(self) -> None:
        """Measures, keeps the best, writes a checkpoint, reports."""
        metrics = validate(self.ranker, self.watched)
        better = metrics[SELECTION] > self.progress.best
        waited = 0 if better else self.progress.waited + 1
        patience = self.training.patience
        self.progress = replace(
            self.progress,
            best=max(metrics[SELECTION], self.progress.best),
            waited=waited,
            stopped=patience is not None and waited >= patience,
        )
        metrics["epoch"] = self.progress.steps / self.data.steps
        tell(self.trackers, self.progress.steps, metrics)
        self._keep(metrics)

    def _keep(self, metrics: Mapping[str, float]) -> None:
        """Reports with a checkpoint, which rank 0 writes to a temporary folder."""
        found = parallel.weights(self.model)
        moments = parallel.optimiser_state(self.model, self.optimiser)
        if parallel.rank() != 0:
            self.run.report(metrics, None)
            return
        folder = Path(tempfile.mkdtemp(prefix="as2ray-checkpoint-"))
        try:
            save(self.ranker, folder / "ranker", found)
            torch.save(moments, folder / "moments.pt")
            (folder / "progress.json").write_text(json.dumps(asdict(self.progress)))
            self.run.report(metrics, folder)
        except _NOT_WRITTEN as error:
            raise TrainingError(
                f"{error}, as the checkpoint after {self.progress.steps:,} steps was written",
                expected="room for a checkpoint in the temporary folder and for two in the run's",
                mend="free some, or set TMPDIR and --workers.storage to larger places, and start "
                "the run again: it goes on from the checkpoint before",
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _resume(self) -> Progress:
        with self.run.resume() as folder:
            if folder is None:
                return Progress()
            parallel.load_weights(self.model, weights_of(self.ranker, folder / "ranker"))
            moments = torch.load(folder / "moments.pt", weights_only=True)
            parallel.load_optimiser_state(self.model, self.optimiser, moments)
            return Progress(**json.loads((folder / "progress.json").read_text()))


@dataclass(frozen=True)
class _Since:
    """What happened since the last report of the loss."""

    loss: Tensor
    tokens: int = 0
    steps: int = 0
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def now(cls, device: torch.device) -> "_Since":
        """Nothing yet."""
        return cls(torch.zeros((), device=device))

    def then(self, loss: Tensor, tokens: int) -> "_Since":
        return _Since(self.loss + loss, self.tokens + tokens, self.steps + 1, self.began)


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
