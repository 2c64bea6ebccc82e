"""One model on many workers: copied (DDP) or shared out (FSDP2), or alone.

Knows torch.distributed. Must not know data, objectives or Ray: whoever starts the workers sets
up the process group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

from as2ray.models.ranker import Ranker

FULL_STATE_OPTIONS = StateDictOptions(
    full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False
)


def get_world_size() -> int:
    """Number of workers."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Number of this worker, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def wrap_distributed(ranker: Ranker, fsdp: bool) -> nn.Module:
    """The module to train: forward takes a packed batch and returns logits."""
    if get_world_size() == 1:
        return ranker
    if not fsdp:
        # A cascade's step runs the layers below one exit: the rest has no gradient to wait for.
        return DistributedDataParallel(ranker, find_unused_parameters=len(ranker.exit_layers) > 1)
    layers = [layer for encoder in ranker.encoders for layer in encoder.layers]
    # ALBERT runs one layer many times: shared out as part of the whole, not by itself.
    if len({id(layer) for layer in layers}) == len(layers):
        for layer in layers:
            fully_shard(layer)
    fully_shard(ranker)
    ranker.allow_parallel = False  # a layer's weights come from all workers, in one order
    return ranker


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Gradients are exchanged in the backward passes inside only if `now`."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    yield


def all_reduce_sum(value: Tensor) -> Tensor:
    """The sum of a tensor over all workers."""
    if get_world_size() > 1:
        dist.all_reduce(value)
    return value


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest of the workers' values."""
    if get_world_size() == 1:
        return value
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def all_gather(value: Any) -> list[Any]:
    """The workers' values, in order of rank, on every worker."""
    if get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def get_model_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU (whole on rank 0; empty elsewhere where they are shared out)."""
    return {
        k: cast(Tensor, v)
        for k, v in get_model_state_dict(model, options=FULL_STATE_OPTIONS).items()
    }


def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Puts whole weights back; every worker calls it with the same."""
    set_model_state_dict(model, dict(state), options=FULL_STATE_OPTIONS)


def get_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's state by the names of the parameters, whole, on the CPU."""
    return dict(get_optimizer_state_dict(model, optimizer, options=FULL_STATE_OPTIONS))


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Puts an optimiser's whole state back; a weight that had none yet has none again."""
    options = replace(FULL_STATE_OPTIONS, strict=False)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    names = {weights: name for name, weights in model.named_parameters()}
    for weights in [
        w for w in optimizer.state if _strip_ddp_prefix(names[w]) not in state["state"]
    ]:  # type: ignore[index]
        del optimizer.state[weights]


def _strip_ddp_prefix(name: str) -> str:
    """A weight's name without what DDP puts before it."""
    return name.removeprefix("module.")
