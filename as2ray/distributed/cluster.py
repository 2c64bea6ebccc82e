"""The cluster: connecting to it, and checking before anything starts that a plan fits it.

Knows Ray's resources. Must not know what runs on them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import RayTaskError

from as2ray.errors import As2rayError, ResourceError


@dataclass(frozen=True)
class Workers:
    """What a run may take of the cluster; changes nothing of its result."""

    count: int = 1
    """Training workers; 0 trains in this process, without Ray."""
    cpus: float = 1.0
    """CPUs that each worker holds."""
    gpus: float = 0.0
    """GPUs that each worker holds."""
    data_cpus: float = 1.0
    """CPUs left for reading, tokenising and packing, all workers together."""
    max_failures: int = 3
    """Times the workers are started again after one died."""
    storage: str | None = None
    """Where checkpoints of a run in work lie; on several nodes, a place all of them see."""


def check(workers: Workers) -> None:
    """Compares the plan with the cluster.

    Ray Data waits for ever, without a word, for CPUs that the workers hold.

    Raises:
        ResourceError: The cluster has fewer CPUs or GPUs than the plan needs.
    """
    has = ray.cluster_resources()
    needs = {
        "CPU": workers.count * workers.cpus + workers.data_cpus,
        "GPU": workers.count * workers.gpus,
    }
    short = {name: amount for name, amount in needs.items() if amount > has.get(name, 0.0)}
    if short or workers.data_cpus <= 0:
        raise ResourceError(
            f"a plan of {workers.count} workers x {workers.cpus:g} CPU, {workers.gpus:g} GPU and "
            f"{workers.data_cpus:g} CPU for data: {needs['CPU']:g} CPU, {needs['GPU']:g} GPU",
            expected=f"at most {has.get('CPU', 0):g} CPU and {has.get('GPU', 0):g} GPU (what the "
            "cluster has), with more than 0 CPU for data",
            mend="lower --workers.count or --workers.cpus (fractions are allowed), or add nodes",
        )


@contextmanager
def connected() -> Iterator[None]:
    """A connection to Ray: the cluster of RAY_ADDRESS (a submitted job has it), or one of our own.

    A cluster of our own lives as long as the context; one that was there stays.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    own = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, logging_level="WARNING", **own)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises an error of as2ray that ended a task as itself, out of what Ray wraps around it."""
    try:
        yield
    except Exception as error:
        inner: BaseException | None = error
        while isinstance(inner, RayTaskError) or not isinstance(inner, As2rayError | None):
            inner = getattr(inner, "cause", None) or inner.__cause__
        if inner is None or inner is error:
            raise
        raise inner from error
