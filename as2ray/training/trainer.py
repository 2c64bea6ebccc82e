"""The training loop over packed batches, for every loss.

It runs the same in a notebook, on a GPU machine without Ray and in a worker of Ray Train.
"""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from as2ray.checkpoints.loading import load_weights
from as2ray.checkpoints.saving import save
from as2ray.data.packed_dataset import MicroBatch
from as2ray.data.prefetch import prefetch
from as2ray.errors import CheckpointError, ConfigError, DivergedError, TrainingError
from as2ray.losses.base import Loss, StepContext
from as2ray.models.ranker import Ranker
from as2ray.tables.atomic import atomic_folder
from as2ray.training import parallel
from as2ray.training.checkpoint_store import BEST, STATE_FILE, CheckpointStore
from as2ray.training.config import TrainingConfig
from as2ray.training.optimization import compute_learning_rate, create_optimizer
from as2ray.training.step_metrics import StepMetrics
from as2ray.training.tracking import (
    RunDescription,
    RunState,
    Tracker,
    TrackingConfig,
    calling_at_end,
    create_trackers,
    log_metrics,
)
from as2ray.training.validation import EvalSet, PassageEvalSet, validate

_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError, CheckpointException)
"""Errors that a full disk causes: in files, in safetensors, in `torch.save` and in shards."""

RANKER, OPTIMIZER_FILE, OPTIMIZER_SHARDS = "ranker", "optimizer.pt", "optimizer"
"""Weights in a checkpoint. A resume state has the optimizer's state too: as a file, or, of sharded
models, as a folder in the format of `torch.distributed.checkpoint`."""


class BatchSource(Protocol):
    """A source of packed batches: a `PackedDataset`, or Ray Data in its place."""

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterable[MicroBatch]:
        """Yields this worker's packed batches from step `start` of an epoch on."""


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run: all that is needed to resume, besides weights and optimizer state."""

    epoch: int = 0
    """Current epoch, from 0."""
    epoch_step: int = 0
    """Completed steps of the current epoch."""
    global_step: int = 0
    """Completed steps of the run."""
    best_metric: float = -1.0
    """Highest selection metric so far."""
    bad_evals: int = 0
    """Evaluations since then."""
    best_step: int = 0
    """Completed steps of the checkpoint that is selected so far."""
    has_ended: bool = False
    """Whether the last step or `early_stopping_patience` is reached."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision that all workers agreed on at the start; a resumed run keeps it."""


class Trainer:
    """Trains a ranker.

    Args:
        ranker: The ranker, on its device.
        loss: The loss of each step.
        batch_source: Packed batches by epoch.
        config: Hyperparameters.
        checkpoint_store: Where the run is saved to and resumed from.
        eval_sets: Evaluation tables by name; `dev` selects the best checkpoint, and is not needed
            if `config.select_by` is `epoch`.
        folder: Folder of the trackers' files.
        tracking: How the run is tracked.
        run: What trackers show of the run.

    Raises:
        ConfigError: There is no table `dev`, or the loss does not fit the ranker.
        CheckpointError: The checkpoint to resume from has another format.
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
        run: RunDescription | None = None,
    ) -> None:
        if "dev" not in eval_sets and config.needs_dev:
            raise ConfigError(
                f"the evaluation tables {sorted(eval_sets)} have none named 'dev', whose MAP "
                "selects the best checkpoint",
                fix="add one, or set select_by: epoch without early_stopping_patience",
            )
        _check_loss(loss, ranker)
        self.ranker, self.loss, self.batch_source = ranker, loss, batch_source
        self.config, self.checkpoint_store, self.eval_sets = config, checkpoint_store, eval_sets
        ranker.set_gradient_checkpointing(config.gradient_checkpointing)
        self.model: nn.Module = parallel.wrap_distributed(ranker, config.fsdp)
        self.optimizer = create_optimizer(self.model, config, ranker.network.base_model_prefix)
        peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.lr_scales = [peak / config.learning_rate for peak in peaks]
        self.state = self._resume()
        ranker.dtype = self.state.precision
        self.saved_best_steps = (self.state.best_step,) * 2
        self._remove_unused_weights()
        self.is_stopping, self.steps_s = self.state.has_ended, 0.0
        self.tracking = tracking or TrackingConfig()
        self.trackers: list[Tracker] = []
        if parallel.get_rank() == 0:
            step = self.state.global_step
            num_steps = self._total_steps()
            self.trackers = create_trackers(self.tracking, Path(folder), step, num_steps, run)

    def fit(self) -> TrainerState:
        """Trains until the last epoch or early stopping, or until a node is about to be lost."""
        self.saved_at = self.started_at = time.perf_counter()
        self._start_interval()
        with calling_at_end(self._close_trackers):
            while self.state.global_step < self._total_steps() and not self.is_stopping:
                self._train_epoch()
            if self.state.has_ended and parallel.get_rank() == 0:
                self._complete()
        return self.state

    def _complete(self) -> None:
        """Names the selected weights `best`, after trackers have all that they keep.

        A run that is killed before resumes, so that no tracker lacks its end.
        """
        best = self.checkpoint_store.folder / BEST
        selected = best if best.exists() else self._weights_folder(self.state.best_step)
        for tracker in self.trackers:
            if self.tracking.upload_rankers:
                tracker.log_file(selected / RANKER)
            tracker.flush()
        if selected != best:
            os.rename(selected, best)
        for path in self.checkpoint_store.folder.glob(f"{BEST}-*"):  # of states before the end
            shutil.rmtree(path)

    def _close_trackers(self, state: RunState) -> None:
        # Before its node is lost a run stops without an error.
        is_complete = self.state.has_ended or state != "FINISHED"
        for tracker in self.trackers:
            tracker.close(state if is_complete else "KILLED")

    def _train_epoch(self) -> None:
        """Trains the rest of the current epoch."""
        self.model.train()
        batches = self.batch_source.epoch(self.state.epoch, self.state.epoch_step)
        if self.ranker.device.type == "cuda":  # a CPU has no core to spare
            batches = prefetch(batches)
        batches = self._iter_timed(batches)
        for _, group in groupby(batches, key=lambda micro_batch: micro_batch.step):
            micro_batches = list(group)
            started_at = time.perf_counter()
            self._train_step(micro_batches)
            is_validation_due = self._is_validation_due()
            if is_validation_due or self.interval.num_steps[""] >= self.tracking.log_every_steps:
                self._log_interval()
                self._start_interval()
            self.steps_s += time.perf_counter() - started_at
            if is_validation_due:
                self._validate()
                self.model.train()
                # Tokens per second are those of training, without the time of validation.
                self._start_interval()
            self.is_stopping = self.state.has_ended or self._save_if_due()
            if self.is_stopping:
                return
        self.state = replace(self.state, epoch=self.state.epoch + 1, epoch_step=0)

    def _start_interval(self) -> None:
        self.interval = StepMetrics(self.ranker, self.config.max_batch_tokens)

    def _iter_timed(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the batches, and counts the seconds in which training waits for each."""
        iterator = iter(batches)
        while True:
            started_at = time.perf_counter()
            micro_batch = next(iterator, None)
            self.interval.wait_s += time.perf_counter() - started_at
            if micro_batch is None:
                return
            yield micro_batch

    def _train_step(self, micro_batches: list[MicroBatch]) -> None:
        """Updates the weights once."""
        state, context = self.state, self._step_context()
        forward_kwargs = self.loss.forward_kwargs(context)
        # The seed of dropout follows from the step, so a resumed run drops the same units.
        torch.manual_seed(_derive_seed(self.config.seed, state.global_step, parallel.get_rank()))
        part_names: set[str] = set()
        for micro_batch, is_last in self._iter_micro_batches(micro_batches):
            with parallel.gradient_sync(self.model, is_last), self.ranker.autocast():
                output = self.model(micro_batch.batch, **forward_kwargs)
                targets = self._build_targets(micro_batch)
                context = self._step_context()
                loss = self.loss.compute(output, targets, context)
                mean = loss / micro_batch.num_examples
                mean = mean * 0.0 if micro_batch.is_empty else mean
                # DDP and FSDP average the gradients; the loss is a mean over all workers' examples.
                (mean * parallel.get_world_size()).backward()  # type: ignore[no-untyped-call]
            exit_indices = forward_kwargs.get("exit_indices")
            self.interval.add_batch(micro_batch, loss.detach(), context.parts, exit_indices)
            part_names |= context.parts.keys()
        gradient_norm = None
        if self.config.max_grad_norm:
            parameters, max_norm = self.model.parameters(), self.config.max_grad_norm
            gradient_norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        self.interval.end_step(part_names, gradient_norm)
        learning_rate = self._current_learning_rate()
        for group, scale in zip(self.optimizer.param_groups, self.lr_scales):
            group["lr"] = learning_rate * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = replace(
            state, epoch_step=state.epoch_step + 1, global_step=state.global_step + 1
        )

    def _current_learning_rate(self) -> float:
        """Returns the encoder's learning rate of this step; resets AdamW at a restart."""
        step, num_steps = self.state.global_step, self._total_steps()
        if self.config.restart_every == "epoch":
            step, num_steps = self.state.epoch_step, self.batch_source.steps
            if step == 0:
                self.optimizer.state.clear()
        return compute_learning_rate(self.config, (step + 1) / (num_steps + 1), num_steps + 1)

    def _step_context(self) -> StepContext:
        exits = self.ranker.exit_layers
        return StepContext(self.state.global_step, self._total_steps(), self.config.seed, exits)

    def _iter_micro_batches(
        self, micro_batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Yields the micro-batches of a step, and whether each is the last."""
        if self.config.fsdp:
            # Workers with sharded weights must all run the model equally often.
            num_passes = parallel.all_reduce_max(len(micro_batches), self.ranker.device)
            padding = [micro_batches[-1].emptied()] * (num_passes - len(micro_batches))
            micro_batches = micro_batches + padding
        for number, micro_batch in enumerate(micro_batches, 1):
            yield micro_batch, number == len(micro_batches)

    def _build_targets(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        arrays = {**micro_batch.batch.sequence_data, **micro_batch.batch.marker_data}
        return {n: torch.from_numpy(array).to(self.ranker.device) for n, array in arrays.items()}

    def _total_steps(self) -> int:
        return self.config.max_steps or self.batch_source.steps * self.config.epochs

    def _is_validation_due(self) -> bool:
        interval = self.config.eval_steps or self.batch_source.steps
        step = self.state.global_step
        return step % interval == 0 or step == self._total_steps()

    def _log_interval(self) -> None:
        metrics = self.interval.reduce()
        loss, groups = metrics["train/loss"], self.optimizer.param_groups
        learning_rate = groups[0]["lr"]
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} after {self.state.global_step:,} steps, at learning rate "
                f"{learning_rate:.2g}",
                fix="lower learning_rate, raise warmup_ratio, or set precision to fp32",
            )
        metrics["train/learning_rate"] = learning_rate
        if self.config.head_learning_rate:
            metrics["train/head_learning_rate"] = groups[-1]["lr"]
        log_metrics(self.trackers, self.state.global_step, metrics)

    def _validate(self) -> None:
        """Evaluates, reports the metrics, and writes weights that are the best so far."""
        metrics = validate(self.ranker, self.eval_sets)
        state = self.state
        # A run that keeps its last checkpoint may have no dev table.
        metric = metrics.get(self.config.selection_metric, state.best_metric)
        bad_evals = 0 if metric > state.best_metric else state.bad_evals + 1
        patience = self.config.early_stopping_patience
        is_last = state.global_step == self._total_steps()
        has_ended = is_last or (patience is not None and bad_evals >= patience)
        # Of equal checkpoints the latest is selected.
        is_selected = has_ended if self.config.select_by == "epoch" else metric >= state.best_metric
        self.state = replace(
            state,
            best_metric=max(metric, state.best_metric),
            bad_evals=bad_evals,
            best_step=state.global_step if is_selected else state.best_step,
            has_ended=has_ended,
        )
        metrics["epoch"] = state.global_step / self.batch_source.steps
        total_s = time.perf_counter() - self.started_at
        metrics["speed/share_outside_steps"] = 1 - self.steps_s / total_s
        log_metrics(self.trackers, state.global_step, metrics)
        self.checkpoint_store.report(metrics)
        if is_selected:
            self._write_best_weights()

    def _write_best_weights(self) -> None:
        """Writes weights and progress into the run's folder; the optimizer's state stays here."""
        weights = parallel.get_model_state(self.model)
        if parallel.get_rank() != 0:
            return
        path = self._weights_folder(self.state.best_step)
        with self._explain_errors(), atomic_folder(path, overwrite=True) as folder:
            self._write_checkpoint(folder, weights)
        self._remove_unused_weights()

    def _save_if_due(self) -> bool:
        """Saves a resume state by the clock, or because a node is about to be lost.

        Returns whether a node is about to be lost.
        """
        store = self.checkpoint_store
        if self.state.global_step % store.check_every_steps:
            return False
        is_leaving = store.is_node_leaving()
        is_due = is_leaving or time.perf_counter() - self.saved_at >= store.resume_interval_s
        # The clocks of the workers differ.
        if parallel.all_reduce_max(int(is_due), self.ranker.device):
            self._save()
        return is_leaving

    def _save(self) -> None:
        """Saves a resume state, which rank 0 writes to a temporary folder.

        If the model is sharded, every rank writes its part of the optimizer's state.
        """
        weights, is_sharded = parallel.get_model_state(self.model), parallel.is_sharded(self.model)
        state = None if is_sharded else parallel.get_optimizer_state(self.model, self.optimizer)
        folder = None
        with self._explain_errors():
            try:
                if is_sharded or parallel.get_rank() == 0:
                    folder = Path(tempfile.mkdtemp(prefix="as2ray-checkpoint-"))
                    self._write_resume_state(folder, weights, state)
                for tracker in self.trackers:
                    tracker.flush()
                self.checkpoint_store.save(folder)
            except BaseException:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        # The state before this one is complete, but this one may still be lost.
        self.saved_best_steps = (self.saved_best_steps[1], self.state.best_step)
        self._remove_unused_weights()
        self.saved_at = time.perf_counter()

    def _write_resume_state(
        self, folder: Path, weights: dict[str, Tensor], optimizer_state: dict[str, Any] | None
    ) -> None:
        if parallel.get_rank() == 0:
            self._write_checkpoint(folder, weights)
        if optimizer_state is None:
            shards = folder / OPTIMIZER_SHARDS
            parallel.save_optimizer_shards(self.model, self.optimizer, shards)
        else:
            torch.save(optimizer_state, folder / OPTIMIZER_FILE)

    def _write_checkpoint(self, folder: Path, weights: dict[str, Tensor]) -> None:
        save(self.ranker, folder / RANKER, weights)
        (folder / STATE_FILE).write_text(json.dumps(asdict(self.state)))

    def _weights_folder(self, step: int) -> Path:
        return self.checkpoint_store.folder / f"{BEST}-{step}"

    def _remove_unused_weights(self) -> None:
        """Removes weights that are not the best of a state from which the run may resume.

        Weights that were written after that state are not valid for it: the steps that led to them
        are repeated, and may round differently.
        """
        if parallel.get_rank() == 0:
            steps = {*self.saved_best_steps, self.state.best_step}
            valid = {self._weights_folder(step) for step in steps}
            folder = self.checkpoint_store.folder
            for path in {*folder.glob(f"{BEST}-*"), *folder.glob(f".{BEST}-*")} - valid:
                shutil.rmtree(path)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except _WRITE_ERRORS as error:
            raise TrainingError(
                f"the checkpoint after {self.state.global_step:,} steps was not written: {error}",
                fix="make room for two checkpoints in TMPDIR and for four in the run's folder "
                "(--workers.storage_path), and start the run again; it resumes",
            ) from error

    def _resume(self) -> TrainerState:
        with self.checkpoint_store.open_last_checkpoint() as folder:
            if folder is None:
                precision = parallel.agree_on_precision(self.config.precision, self.ranker.device)
                return TrainerState(precision=precision)
            if not (folder / STATE_FILE).exists():
                raise CheckpointError(
                    f"{folder} has no {STATE_FILE}: an earlier version of as2ray wrote it",
                    fix="remove the run's folder and train again",
                )
            parallel.load_model_state(self.model, load_weights(self.ranker, folder / RANKER))
            if (shards := folder / OPTIMIZER_SHARDS).is_dir():
                parallel.load_optimizer_shards(self.model, self.optimizer, shards)
            else:
                state = torch.load(folder / OPTIMIZER_FILE, weights_only=True)
                parallel.load_optimizer_state(self.model, self.optimizer, state)
            return TrainerState(**json.loads((folder / STATE_FILE).read_text()))


def _check_loss(loss: Loss, ranker: Ranker) -> None:
    """Checks that a cascade is trained with a loss over exits, and no other ranker is."""
    num_exits = len(ranker.exit_layers)
    context = StepContext(exit_layers=ranker.exit_layers or (1,))
    needs_exits = "exit_indices" in loss.forward_kwargs(context)
    if (needs_exits and not num_exits) or (num_exits > 1 and not needs_exits):
        raise ConfigError(
            f"the loss {loss} does not fit a ranker with exits {ranker.exit_layers}: a cascade "
            "needs a loss over exits, such as 'uniform_exit', and other rankers need another loss"
        )


def _derive_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
