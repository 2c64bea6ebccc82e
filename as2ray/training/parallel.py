"""Data-parallel training over torch.distributed: with DDP, with FSDP2, or in one process.

Whoever starts the workers sets up the process group; without one there is a single worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from as2ray.models.precision import Dtype, resolve_dtype
from as2ray.models.ranker import Ranker

FULL_STATE_OPTIONS = StateDictOptions(
    full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False
)


def get_world_size() -> int:
    """Returns the number of workers."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Returns the rank of this worker, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def wrap_distributed(ranker: Ranker, fsdp: bool) -> nn.Module:
    """Returns the module to train, whose forward takes a packed batch and returns logits.

    Args:
        ranker: The ranker, on its device.
        fsdp: Shard the weights (FSDP2) instead of copying them (DDP).
    """
    if get_world_size() == 1:
        return ranker
    if not fsdp:
        # A step of a cascade may run the layers below one exit only; the others get no gradient.
        return DistributedDataParallel(ranker, find_unused_parameters=len(ranker.exit_layers) > 1)
    layers = [layer for encoder in ranker.encoders for layer in encoder.layers]
    # ALBERT runs the same layer several times, so it cannot be sharded layer by layer.
    if len({id(layer) for layer in layers}) == len(layers):
        for layer in layers:
            fully_shard(layer)
    fully_shard(ranker)
    # Sharded layers are gathered from all workers, which must run them in the same order.
    ranker.allow_parallel = False
    return ranker


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Exchanges gradients in the backward passes inside the context only if `enabled`."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    yield


def barrier() -> None:
    """Waits for all workers."""
    if get_world_size() > 1:
        dist.barrier()


def all_reduce_sum(value: Tensor) -> Tensor:
    """Sums a tensor over all workers, in place; returns it."""
    if get_world_size() > 1:
        dist.all_reduce(value)
    return value


def all_reduce_max(value: int, device: torch.device) -> int:
    """Returns the highest value of all workers."""
    if get_world_size() == 1:
        return value
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def agree_on_precision(precision: Dtype, device: torch.device) -> Literal["fp32", "bf16"]:
    """Returns the precision of all workers; `auto` is bf16 only if it is faster for all."""
    is_fp32 = resolve_dtype(precision, device) == torch.float32
    return "fp32" if all_reduce_max(int(is_fp32), device) else "bf16"


def all_gather(value: Any) -> list[Any]:
    """Returns the values of all workers in the order of their ranks, on every worker."""
    if get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def get_model_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns all weights on the CPU; of a sharded model they are complete on rank 0 only."""
    state = get_model_state_dict(model, options=FULL_STATE_OPTIONS)
    return {name: cast(Tensor, value) for name, value in state.items()}


def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads complete weights; every worker calls it with the same ones."""
    set_model_state_dict(model, dict(state), options=FULL_STATE_OPTIONS)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether each worker holds a part of the weights and of the optimizer's state."""
    return isinstance(model, FSDPModule)


def save_optimizer_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Writes the state of the optimizer of a sharded model, of which nothing is gathered.

    Args:
        model: The model; every worker calls this.
        optimizer: Its optimizer.
        folder: Folder of this worker's part. The folders of all workers together are the state.
    """
    state = get_optimizer_state_dict(model, optimizer)
    state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(folder))


def load_optimizer_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Loads a state that `save_optimizer_shards` wrote with any number of workers.

    Args:
        model: The model, which need not be sharded; every worker calls this.
        optimizer: Its optimizer.
        folder: Folder with the parts of all workers that wrote the state.
    """
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    values = state["state"].items()
    state["state"] = {name: value for name, value in values if f"state.{name}.step" in saved}
    state_dict_loader.load(state, storage_reader=reader)
    _set_optimizer_state(model, optimizer, state, StateDictOptions(strict=False))


def get_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the complete state of the optimizer on the CPU, by the names of the parameters."""
    return dict(get_optimizer_state_dict(model, optimizer, options=FULL_STATE_OPTIONS))


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a complete state of the optimizer."""
    _set_optimizer_state(model, optimizer, state, replace(FULL_STATE_OPTIONS, strict=False))


def _set_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], options: StateDictOptions
) -> None:
    """Sets the state of the optimizer; parameters that it lacks have no state afterwards.

    AdamW creates a parameter's state with its first gradient, which a cascade's upper layers get
    later than its lower ones.
    """
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for name, parameter in model.named_parameters():
        # DDP puts `module.` before every name.
        if name.removeprefix("module.") not in state["state"]:
            optimizer.state.pop(parameter, None)
