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

from as2ray.checkpoints.loading import load_weights
from as2ray.checkpoints.saving import save
from as2ray.data.packed_dataset import MicroBatch
from as2ray.errors import ConfigError, TrainingError
from as2ray.losses.base import Loss, StepContext
from as2ray.models.ranker import Ranker
from as2ray.training import parallel
from as2ray.training.checkpoint_store import CheckpointStore
from as2ray.training.config import SELECTION_METRIC, TrainingConfig
from as2ray.training.optimization import compute_learning_rate, create_optimizer
from as2ray.training.tracking import Tracker, TrackingConfig, create_trackers, log_metrics
from as2ray.training.validation import EvalSet, PassageEvalSet, validate

_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)
"""What a full disk causes: of files, of safetensors, of torch's own format."""


class BatchSource(Protocol):
    """Where packed batches come from: `text.stream.Stream`, or Ray Data in its place."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterable[MicroBatch]:
        """This worker's packed batches from step `start` of an epoch on."""


@dataclass(frozen=True)
class TrainerState:
    """How far a run has come: all that is needed, beside weights and moments, to go on."""

    epoch: int = 0
    """Epoch in work, from 0."""
    epoch_step: int = 0
    """Steps done in it."""
    global_step: int = 0
    """Steps done in all."""
    best_metric: float = -1.0
    """Highest selection metric so far."""
    bad_evals: int = 0
    """Validations since."""
    should_stop: bool = False
    """Whether patience ran out."""


class Trainer:
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
        loss: Loss,
        batch_source: BatchSource,
        config: TrainingConfig,
        checkpoint_store: CheckpointStore,
        eval_sets: Mapping[str, EvalSet | PassageEvalSet],
        folder: str | Path,
        tracking: TrackingConfig | None = None,
    ) -> None:
        if "dev" not in eval_sets:
            raise ConfigError(
                f"tables to watch: {sorted(eval_sets)}"
                f"; expected one named 'dev': {SELECTION_METRIC} selects the best checkpoint",
                fix="name the development split 'dev'",
            )
        asks = (
            "exits"
            in loss.for_step(StepContext(num_exits=max(1, len(ranker.exit_layers)))).forward_kwargs
        )
        if (asks and not ranker.exit_layers) or (len(ranker.exit_layers) > 1 and not asks):
            raise ConfigError(
                f"objective {loss} for a ranker with exits {ranker.exit_layers}"
                "; expected an objective of exits for a cascade, another for any other ranker",
                fix="name an objective such as 'uniform_exit', or leave the model's exits out",
            )
        self.ranker, self.loss, self.batch_source = ranker, loss, batch_source
        self.config, self.checkpoint_store, self.eval_sets = config, checkpoint_store, eval_sets
        ranker.dtype = config.precision
        ranker.set_gradient_checkpointing(config.gradient_checkpointing)
        self.model: nn.Module = parallel.wrap_distributed(ranker, config.fsdp)
        self.optimizer = create_optimizer(self.model, config, ranker.network.base_model_prefix)
        peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.lr_scales = [peak / config.learning_rate for peak in peaks]
        self.state = self._resume()
        self.interval = _Interval.start(ranker.device)
        self.tracking = tracking or TrackingConfig()
        self.trackers: list[Tracker] = []
        if parallel.get_rank() == 0:
            self.trackers = create_trackers(self.tracking, Path(folder), self.state.global_step)

    def fit(self) -> TrainerState:
        """Trains until the last epoch or until patience runs out."""
        try:
            while self.state.epoch < self.config.epochs and not self.state.should_stop:
                self._train_epoch()
        finally:
            for tracker in self.trackers:
                tracker.close()
        return self.state

    def _train_epoch(self) -> None:
        """The rest of the epoch in work."""
        self.model.train()
        data = self.batch_source.epoch(self.state.epoch, self.state.epoch_step)
        for _, micros in groupby(data, key=lambda micro: micro.step):
            step = list(micros)
            tokens = sum(micro.batch.num_tokens for micro in step)
            self.interval = self.interval.add_step(self._train_step(step), tokens)
            due = self._is_validation_due()
            if due or self.interval.num_steps >= self.tracking.log_every_steps:
                self._log_interval(self.interval)
                self.interval = _Interval.start(self.ranker.device)
            if due:
                self._validate()
                self.model.train()
                self.interval = _Interval.start(self.ranker.device)  # speed is training's alone
                if self.state.should_stop:
                    return
        self.state = replace(self.state, epoch=self.state.epoch + 1, step=0)

    def _train_step(self, micro_batches: list[MicroBatch]) -> Tensor:
        """One update of the weights; this worker's share of the mean loss of the step."""
        progress = self.state
        task = self.loss.for_step(self._step_context())
        # Dropout follows from where the run is, so a resumed run drops what it would have.
        torch.manual_seed(_derive_seed(self.config.seed, progress.global_step, parallel.get_rank()))
        loss = torch.zeros((), device=self.ranker.device)
        for micro, last in self._iter_micro_batches(micro_batches):
            with parallel.gradient_sync(self.model, last), self.ranker.autocast():
                logits = self.model(micro.batch, **task.forward_kwargs)
                part = task.loss(logits, self._build_targets(micro)) / micro.num_examples
                part = part * 0.0 if micro.is_empty else part
                # Workers' gradients are averaged; the loss is a mean over all workers' pairs.
                (part * parallel.get_world_size()).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        if self.config.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        height = self._current_learning_rate()
        for group, share in zip(self.optimizer.param_groups, self.lr_scales):
            group["lr"] = height * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = replace(progress, step=progress.epoch_step + 1, steps=progress.global_step + 1)
        return loss

    def _current_learning_rate(self) -> float:
        """The encoder's learning rate in the step in work; an epoch begins anew if asked."""
        done, steps = self.state.global_step, self._total_steps()
        if self.config.restart_every == "epoch":
            done, steps = self.state.epoch_step, self.batch_source.steps
            if done == 0:
                self.optimizer.state.clear()
        return compute_learning_rate(self.config, (done + 1) / (steps + 1))

    def _step_context(self) -> StepContext:
        exits = len(self.ranker.exit_layers)
        return StepContext(self.state.global_step, self._total_steps(), self.config.seed, exits)

    def _iter_micro_batches(
        self, micro_batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """The passes of a step, and whether each is the last."""
        if self.config.fsdp:
            # Workers that hold shares of the weights must all run equally often.
            passes = parallel.all_reduce_max(len(micro_batches), self.ranker.device)
            micro_batches = micro_batches + [micro_batches[-1].emptied()] * (
                passes - len(micro_batches)
            )
        for number, micro in enumerate(micro_batches):
            yield micro, number == len(micro_batches) - 1

    def _build_targets(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        told = {**micro_batch.batch.sequence_data, **micro_batch.batch.marker_data}
        return {n: torch.from_numpy(values).to(self.ranker.device) for n, values in told.items()}

    def _total_steps(self) -> int:
        return self.batch_source.steps * self.config.epochs

    def _is_validation_due(self) -> bool:
        every = self.config.eval_steps or self.batch_source.steps
        steps = self.state.global_step
        return steps % every == 0 or steps == self._total_steps()

    def _log_interval(self, interval: "_Interval") -> None:
        tokens = torch.tensor(float(interval.num_tokens), device=self.ranker.device)
        seconds = time.perf_counter() - interval.started_at
        loss = float(parallel.all_reduce_sum(interval.loss)) / interval.num_steps
        if not math.isfinite(loss):
            raise TrainingError(
                f"a loss of {loss} after {self.state.global_step:,} steps, at learning rate "
                f"{self.optimizer.param_groups[0]['lr']:.2g}"
                "; expected a finite loss",
                fix="lower learning_rate, lengthen warmup, or set precision to fp32",
            )
        metrics = {
            "loss": loss,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": float(parallel.all_reduce_sum(tokens)) / seconds,
        }
        log_metrics(self.trackers, self.state.global_step, metrics)

    def _validate(self) -> None:
        """Measures, keeps the best, writes a checkpoint, reports."""
        metrics = validate(self.ranker, self.eval_sets)
        better = metrics[SELECTION_METRIC] > self.state.best_metric
        waited = 0 if better else self.state.bad_evals + 1
        patience = self.config.early_stopping_patience
        self.state = replace(
            self.state,
            best=max(metrics[SELECTION_METRIC], self.state.best_metric),
            waited=waited,
            stopped=patience is not None and waited >= patience,
        )
        metrics["epoch"] = self.state.global_step / self.batch_source.steps
        log_metrics(self.trackers, self.state.global_step, metrics)
        self._save_checkpoint(metrics)

    def _save_checkpoint(self, metrics: Mapping[str, float]) -> None:
        """Reports with a checkpoint, which rank 0 writes to a temporary folder."""
        found = parallel.get_model_state(self.model)
        moments = parallel.get_optimizer_state(self.model, self.optimizer)
        if parallel.get_rank() != 0:
            self.checkpoint_store.report(metrics, None)
            return
        folder = Path(tempfile.mkdtemp(prefix="as2ray-checkpoint-"))
        try:
            save(self.ranker, folder / "ranker", found)
            torch.save(moments, folder / "moments.pt")
            (folder / "progress.json").write_text(json.dumps(asdict(self.state)))
            self.checkpoint_store.report(metrics, folder)
        except _WRITE_ERRORS as error:
            raise TrainingError(
                f"{error}, as the checkpoint after {self.state.global_step:,} steps was written"
                "; expected room for a checkpoint in the temporary folder and for two in the run's",
                fix="free some, or set TMPDIR and --workers.storage to larger places, and start "
                "the run again: it goes on from the checkpoint before",
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _resume(self) -> TrainerState:
        with self.checkpoint_store.open_last_checkpoint() as folder:
            if folder is None:
                return TrainerState()
            parallel.load_model_state(self.model, load_weights(self.ranker, folder / "ranker"))
            moments = torch.load(folder / "moments.pt", weights_only=True)
            parallel.load_optimizer_state(self.model, self.optimizer, moments)
            return TrainerState(**json.loads((folder / "progress.json").read_text()))


@dataclass(frozen=True)
class _Interval:
    """What happened since the last report of the loss."""

    loss: Tensor
    num_tokens: int = 0
    num_steps: int = 0
    started_at: float = field(default_factory=time.perf_counter)

    @classmethod
    def start(cls, device: torch.device) -> "_Interval":
        """Nothing yet."""
        return cls(torch.zeros((), device=device))

    def add_step(self, loss: Tensor, num_tokens: int) -> "_Interval":
        return _Interval(
            self.loss + loss, self.num_tokens + num_tokens, self.num_steps + 1, self.started_at
        )


def _derive_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
