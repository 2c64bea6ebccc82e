"""Checks that a cluster has the resources that a run needs, before anything starts."""

import math
import time

import ray
from ray.autoscaler.sdk import request_resources

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError

POLL_INTERVAL_S = 5.0
"""Seconds between two checks of a cluster whose nodes are not started yet."""


def node_resources() -> list[dict[str, float]]:
    """Returns the resources of each node of the cluster."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_plan(workers: WorkersConfig, allow_gpu_sharing: bool = False) -> None:
    """Checks that the plan fits the cluster; waits up to `provision_timeout_s` for nodes.

    Ray itself would wait without end, and without a message, for a worker that fits on no node, and
    Ray Data for CPUs that the workers occupy. CPU nodes may tokenize for GPU nodes that train: Ray
    places tasks without a GPU on GPU nodes only if no other node has free CPUs.

    Args:
        workers: The plan.
        allow_gpu_sharing: Whether several workers may share a GPU. Workers that score may; those
            that train exchange gradients by NCCL, which does not support it.

    Raises:
        ResourceError: Workers that train would share a GPU, the cluster has fewer CPUs or GPUs than
            the plan needs, or not every worker fits on one node.
    """
    if not allow_gpu_sharing and workers.num_workers > 1 and 0 < workers.gpus_per_worker <= 0.5:
        raise ResourceError(
            f"{_describe_plan(workers)}: two workers that train would share a GPU, which NCCL does "
            "not support",
            fix="set --workers.gpus_per_worker 1, or --workers.num_workers 1",
        )
    deadline = time.monotonic() + workers.provision_timeout_s
    is_requested = False
    while True:
        try:
            check_capacity(workers, node_resources())
        except ResourceError:
            if time.monotonic() >= deadline:
                raise
        else:
            return
        if not is_requested:
            worker = {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
            worker = {name: amount for name, amount in worker.items() if amount}
            data_cpus = [{"CPU": 1.0}] * math.ceil(workers.num_data_cpus)
            request_resources(bundles=[worker] * workers.num_workers + data_cpus)
            is_requested = True
        time.sleep(min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))


def max_concurrent_runs(workers: WorkersConfig) -> int:
    """Returns how many runs of a plan fit on the cluster at the same time; at least one.

    Args:
        workers: The plan of each run, with one worker or more.
    """
    cluster = node_resources()
    num_workers = sum(_count_fitting_workers(workers, node) for node in cluster)
    num_cpus = sum(node.get("CPU", 0.0) for node in cluster)
    cpus_per_run = workers.num_workers * workers.cpus_per_worker + workers.num_data_cpus
    return max(1, min(num_workers // workers.num_workers, int(num_cpus // cpus_per_run)))


def check_capacity(workers: WorkersConfig, cluster: list[dict[str, float]]) -> None:
    """Checks that every required worker fits on one node, and that CPUs are left for data.

    Args:
        workers: The plan.
        cluster: The resources of each node.

    Raises:
        ResourceError: The cluster is too small.
    """
    plan = _describe_plan(workers)
    available = {name: sum(node.get(name, 0.0) for node in cluster) for name in ("CPU", "GPU")}
    needed = _needed_resources(workers)
    if any(needed[name] > available[name] for name in needed):
        raise ResourceError(
            f"{plan}, but the cluster has {available['CPU']:g} CPU and {available['GPU']:g} GPU",
            fix="lower --workers.num_workers or --workers.cpus_per_worker (fractions are allowed), "
            "or add nodes",
        )
    num_fitting = sum(_count_fitting_workers(workers, node) for node in cluster)
    if num_fitting < workers.required_workers:
        nodes = ", ".join(f"{n.get('CPU', 0):g} CPU + {n.get('GPU', 0):g} GPU" for n in cluster)
        raise ResourceError(
            f"{plan}, but only {num_fitting} workers fit on the nodes ({nodes}); a worker cannot "
            "be spread over nodes",
            fix="lower --workers.cpus_per_worker or --workers.gpus_per_worker, or add nodes of "
            "that size",
        )
    # An elastic run grows to all workers that fit, so the CPUs for data must lie elsewhere.
    spare_cpus = available["CPU"] - num_fitting * workers.cpus_per_worker
    if workers.min_workers is not None and spare_cpus < workers.num_data_cpus:
        raise ResourceError(
            f"{plan}, but workers that are placed again after a loss could leave {spare_cpus:g} "
            "CPU for data",
            fix="raise --workers.cpus_per_worker so that workers do not use all CPUs of a node, "
            "add a node for data, or leave --workers.min_workers out",
        )


def _needed_resources(workers: WorkersConfig) -> dict[str, float]:
    num_workers = workers.required_workers
    return {
        "CPU": num_workers * workers.cpus_per_worker + workers.num_data_cpus,
        "GPU": num_workers * workers.gpus_per_worker,
    }


def _describe_plan(workers: WorkersConfig) -> str:
    needed = _needed_resources(workers)
    return (
        f"the plan needs {needed['CPU']:g} CPU and {needed['GPU']:g} GPU "
        f"({workers.required_workers} workers x {workers.cpus_per_worker:g} CPU and "
        f"{workers.gpus_per_worker:g} GPU, {workers.num_data_cpus:g} CPU for data)"
    )


def _count_fitting_workers(workers: WorkersConfig, node: dict[str, float]) -> int:
    """Returns the number of workers that fit on a node."""
    worker = {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    ratios = [node.get(name, 0.0) / amount for name, amount in worker.items() if amount]
    return min((int(ratio + 1e-9) for ratio in ratios), default=workers.num_workers)
