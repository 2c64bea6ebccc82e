"""The plan: what a run takes of the cluster, checked before anything starts.

Knows Ray's resources. Must not know what runs on them.
"""

import math
import time
from dataclasses import dataclass

import ray
from ray.autoscaler.sdk import request_resources

from as2ray.errors import ResourceError

POLL_INTERVAL_S = 5.0
"""Seconds between looks at a cluster that is waited for."""


@dataclass(frozen=True)
class WorkersConfig:
    """What a run may take of the cluster; changes nothing of its result."""

    num_workers: int = 1
    """Training workers; 0 trains in this process, without Ray."""
    cpus_per_worker: float = 1.0
    """CPUs that each worker holds."""
    gpus_per_worker: float = 0.0
    """GPUs that each worker holds; a part of one lets several workers that score share it."""
    num_data_cpus: float = 1.0
    """CPUs left for reading, tokenising and packing, all workers together."""
    min_workers: int | None = None
    """Go on with so few while nodes are lost or not there yet; by default with all or none."""
    elastic_resize_interval_s: float = 60.0
    """Seconds between looks whether there is room for more of them again."""
    provision_timeout_s: float = 0.0
    """Seconds to wait for nodes that the plan needs; an autoscaler is asked for them."""
    max_failures: int = 3
    """Times the workers are started again after one died."""
    storage_path: str | None = None
    """Where checkpoints of a run in work lie; on several nodes, a place all of them see."""

    @property
    def required_workers(self) -> int:
        """Workers without which a run does not begin."""
        return self.num_workers if self.min_workers is None else self.min_workers


def node_resources() -> list[dict[str, float]]:
    """The resources of each node of the cluster."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_plan(workers: WorkersConfig, allow_gpu_sharing: bool = False) -> None:
    """Compares the plan with the cluster, node by node; waits for nodes as long as it allows.

    Ray waits for ever, without a word, for a worker that fits on no node, and Ray Data for CPUs
    that the workers hold. CPU nodes may tokenise for GPU nodes that train: Ray keeps tasks without
    a GPU off GPU nodes while others have room.

    Args:
        workers: The plan.
        sharing: Whether several workers may share a GPU: those that score may, those that train
            exchange gradients by NCCL, which refuses it.

    Raises:
        ResourceError: The plan makes no sense; the cluster has fewer CPUs or GPUs than it needs,
            or its nodes no room for every worker whole.
    """
    _check_config(workers, allow_gpu_sharing)
    deadline = time.monotonic() + workers.provision_timeout_s
    asked = False
    while True:
        try:
            check_capacity(workers, node_resources())
        except ResourceError:
            if time.monotonic() >= deadline:
                raise
        else:
            return
        if not asked:
            each = {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
            data = [{"CPU": 1.0}] * math.ceil(workers.num_data_cpus)
            request_resources(
                bundles=[{k: v for k, v in each.items() if v}] * workers.num_workers + data
            )
            asked = True
        time.sleep(min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))


def max_concurrent_runs(workers: WorkersConfig) -> int:
    """How many runs of a plan the cluster has room for at once; at least one.

    Args:
        workers: The plan of each, of one worker or more.
    """
    cluster = node_resources()
    rooms = sum(_count_fitting_workers(workers, node) for node in cluster) // workers.num_workers
    cpus = sum(node.get("CPU", 0.0) for node in cluster)
    of_cpus = cpus // (workers.num_workers * workers.cpus_per_worker + workers.num_data_cpus)
    return max(1, min(int(rooms), int(of_cpus)))


def _describe_plan(workers: WorkersConfig) -> str:
    needed = workers.required_workers
    cpus, gpus = (
        needed * workers.cpus_per_worker + workers.num_data_cpus,
        needed * workers.gpus_per_worker,
    )
    return (
        f"a plan of {needed} workers x {workers.cpus_per_worker:g} CPU, {workers.gpus_per_worker:g} GPU and "
        f"{workers.num_data_cpus:g} CPU for data: {cpus:g} CPU, {gpus:g} GPU"
    )


def _check_config(workers: WorkersConfig, allow_gpu_sharing: bool) -> None:
    """What no cluster could mend."""
    if not 0 < workers.required_workers <= workers.num_workers:
        raise ResourceError(
            f"{workers.min_workers} workers at least, of {workers.num_workers}"
            f"; expected 1 to {workers.num_workers}",
            fix="correct --workers.least",
        )
    if workers.num_data_cpus <= 0:
        raise ResourceError(
            f"{_describe_plan(workers)}; expected more than 0 CPU for data",
            fix="raise --workers.data_cpus",
        )
    if workers.gpus_per_worker > 1 and workers.gpus_per_worker % 1:
        raise ResourceError(
            f"{_describe_plan(workers)}; expected a part of one GPU, or whole GPUs",
            fix="set --workers.gpus to a fraction below 1 or to a whole number",
        )
    if not allow_gpu_sharing and workers.num_workers > 1 and 0 < workers.gpus_per_worker <= 0.5:
        raise ResourceError(
            f"{_describe_plan(workers)}; two workers that train would share a GPU"
            "; expected a GPU for each of several workers that train: NCCL refuses to share one",
            fix="set --workers.gpus 1, or --workers.count 1",
        )


def check_capacity(workers: WorkersConfig, cluster: list[dict[str, float]]) -> None:
    """Whether the cluster's nodes have room for every worker whole, and for data."""
    needed, plan = workers.required_workers, _describe_plan(workers)
    has = {name: sum(node.get(name, 0.0) for node in cluster) for name in ("CPU", "GPU")}
    needs = {
        "CPU": needed * workers.cpus_per_worker + workers.num_data_cpus,
        "GPU": needed * workers.gpus_per_worker,
    }
    if any(needs[name] > has[name] for name in needs):
        raise ResourceError(
            f"{plan}"
            f"; expected at most {has['CPU']:g} CPU and {has['GPU']:g} GPU (what the cluster has)",
            fix="lower --workers.count or --workers.cpus (fractions are allowed), or add nodes",
        )
    rooms = [_count_fitting_workers(workers, node) for node in cluster]
    if sum(rooms) < needed:
        of_each = ", ".join(f"{n.get('CPU', 0):g} CPU + {n.get('GPU', 0):g} GPU" for n in cluster)
        raise ResourceError(
            f"{plan}; {sum(rooms)} workers fit on the nodes ({of_each})"
            "; expected room on one node for every worker whole",
            fix="lower --workers.cpus or --workers.gpus, or add nodes of that size",
        )
    # A run that grows takes what room it finds: data's CPUs must lie where no worker fits.
    spare = has["CPU"] - sum(rooms) * workers.cpus_per_worker
    if workers.min_workers is not None and spare < workers.num_data_cpus:
        raise ResourceError(
            f"{plan}; workers placed again after a loss could leave {spare:g} CPU for data"
            f"; expected {workers.num_data_cpus:g} CPU on nodes that have no room for a worker, or "
            "beside as many workers as have room",
            fix="raise --workers.cpus so that a node's CPUs do not all go to workers, add a node "
            "for data, or leave --workers.least out",
        )


def _count_fitting_workers(workers: WorkersConfig, node: dict[str, float]) -> int:
    """Workers for which a node has room."""
    asked = {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    parts = [node.get(name, 0.0) / each for name, each in asked.items() if each]
    return min((int(part + 1e-9) for part in parts), default=workers.num_workers)
