"""Checks that a cluster has the resources that a run needs, before anything starts."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

from as2ray.distributed.workers_config import (
    WorkersConfig,
    bundle_resources,
    data_bundles,
    gang_resources,
)
from as2ray.errors import ResourceError

POLL_INTERVAL_S = 1.0
"""Seconds between two checks of a cluster whose nodes are not started yet."""


def node_resources(*label_selectors: Mapping[str, str]) -> list[dict[str, float]]:
    """Returns the resources of each node of the cluster that has the labels of all selectors."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for selector in label_selectors:
        nodes = [node for node in nodes if has_labels(node["Labels"], selector)]
    return [dict(node["Resources"]) for node in nodes]


def has_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether labels fit a selector: `a`, `!a`, `in(a,b)` or `!in(a,b)` for each name."""
    for name, condition in selector.items():
        values = condition.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        is_listed = labels.get(name) in [value.strip() for value in values]
        if is_listed == condition.startswith("!"):
            return False
    return True


def check_plan(workers: WorkersConfig, allow_gpu_sharing: bool = False) -> None:
    """Checks that the plan fits the cluster; waits up to `provision_timeout_s` for nodes.

    Ray itself would wait without end, and without a message, for a worker that fits on no node.

    Args:
        workers: The plan.
        allow_gpu_sharing: Whether several workers may share a GPU. Workers that score may; those
            that train exchange gradients by NCCL, which does not support it.

    Raises:
        ResourceError: Workers that train would share a GPU, or the cluster has no nodes on which
            all required workers fit.
    """
    if not allow_gpu_sharing and workers.num_workers > 1 and 0 < workers.gpus_per_worker <= 0.5:
        raise ResourceError(
            f"{_describe_plan(workers)}: two workers that train would share a GPU, which NCCL does "
            "not support",
            fix="set --workers.gpus_per_worker 1, or --workers.num_workers 1",
        )
    if ray.is_initialized():
        place_detached_actors(workers.driver_label_selector)
    deadline = time.monotonic() + workers.provision_timeout_s
    requests: list[PlacementGroup] = []
    try:
        while True:
            try:
                check_capacity(workers, node_resources(workers.label_selector))
                return check_data_nodes(workers)
            except ResourceError:
                if time.monotonic() >= deadline:
                    raise
            # An autoscaler starts nodes for groups that wait.
            requests = requests or _request_nodes(workers)
            time.sleep(min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))
    finally:
        for request in requests:
            remove_placement_group(request)


def place_detached_actors(label_selector: Mapping[str, str]) -> None:
    """Starts two actors that Ray keeps for all runs on a node that is not lost.

    Ray would bind them to the node of the first run. An autoscaler could never stop that node. Once
    it were lost, runs would not grow any more and wait without end for the statistics of Ray Data.

    Args:
        label_selector: Labels of the node; if this node has them, it is this one.
    """
    if has_labels(ray.get_runtime_context().get_node_labels(), label_selector):
        _start_detached_actors()
    else:
        task = ray.remote(num_cpus=0, label_selector=dict(label_selector))(_start_detached_actors)
        ray.get(task.remote())


def _start_detached_actors() -> None:
    from ray.data._internal.cluster_autoscaler import get_or_create_autoscaling_coordinator
    from ray.data._internal.stats import get_or_create_stats_actor

    get_or_create_autoscaling_coordinator()
    get_or_create_stats_actor()


def max_concurrent_runs(workers: WorkersConfig) -> int:
    """Returns how many runs of a plan fit on the cluster at the same time; at least one.

    Args:
        workers: The plan of each run, with one worker or more.
    """
    cluster = node_resources(workers.label_selector)
    return max(1, _count_fitting_workers(workers, cluster) // workers.num_workers)


def check_capacity(workers: WorkersConfig, cluster: list[dict[str, float]]) -> None:
    """Checks that every required worker fits on one node, with its share of the CPUs for data.

    Args:
        workers: The plan.
        cluster: The resources of each node that has the plan's labels.

    Raises:
        ResourceError: The cluster is too small.
    """
    num_fitting = _count_fitting_workers(workers, cluster)
    if num_fitting >= workers.required_workers:
        return
    num_cpus, num_gpus = (sum(node.get(name, 0.0) for node in cluster) for name in ("CPU", "GPU"))
    nodes = Counter(f"{node.get('CPU', 0):g} CPU + {node.get('GPU', 0):g} GPU" for node in cluster)
    raise ResourceError(
        f"{_describe_plan(workers)}, but the cluster has {num_cpus:g} CPU and {num_gpus:g} GPU: "
        f"{num_fitting} workers fit on its nodes "
        f"({', '.join(f'{count} x {node}' for node, count in nodes.items())})",
        fix="set --workers.gpus_per_worker 0, or add nodes with GPUs"
        if workers.gpus_per_worker and not num_gpus
        else "lower --workers.num_workers, --workers.cpus_per_worker or --workers.num_data_cpus "
        "(fractions are allowed), or add nodes; a worker cannot be spread over nodes",
    )


def check_data_nodes(workers: WorkersConfig) -> None:
    """Checks the nodes of `data_label_selector`, if there is one.

    Runs reserve CPUs for data first and their workers afterwards. If both could be on the same
    node, two runs could hold the one and wait without end for the other.

    Raises:
        ResourceError: A worker fits on one of the nodes, or the CPUs for data do not.
    """
    if not (bundles := data_bundles(workers)):
        return
    selector = workers.data_label_selector
    if _count_fitting_workers(workers, node_resources(selector, workers.label_selector)):
        raise ResourceError(
            f"a worker fits on a node with the labels {selector} of --workers.data_label_selector",
            fix="choose nodes without the workers' GPUs, or exclude them by "
            "--workers.label_selector",
        )
    nodes = node_resources(selector)
    num_fitting = sum(int(node.get("CPU", 0.0) / bundles[0]["CPU"] + 1e-9) for node in nodes)
    if num_fitting < len(bundles):
        raise ResourceError(
            f"the plan needs {len(bundles)} x {bundles[0]['CPU']:g} CPU for data, and "
            f"{num_fitting} fit on the {len(nodes)} nodes with the labels {selector}",
            fix="lower --workers.num_data_cpus, or add nodes",
        )


@contextmanager
def reserve_data_cpus(workers: WorkersConfig, name: str) -> Iterator[PlacementGroup | None]:
    """Reserves the CPUs for data on nodes of their own, one bundle for each worker.

    Waits for them. A run holds them before it waits for its workers: no run has workers and waits.

    Args:
        workers: The plan.
        name: Name of the run. What a lost attempt has reserved under it is released.
    """
    if not (bundles := data_bundles(workers)):
        yield None
        return
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))
    labels = [workers.data_label_selector] * len(bundles)
    group = placement_group(bundles, name=name, bundle_label_selector=labels)
    ray.get(group.ready())
    try:
        yield group
    finally:
        remove_placement_group(group)


def _describe_plan(workers: WorkersConfig) -> str:
    gang, bundle = gang_resources(workers), bundle_resources(workers)
    names = ["accelerator_type", "label_selector"]
    names += ["placement_strategy"] if "STRICT" in workers.placement_strategy else []
    demands = [f", {name} {getattr(workers, name)}" for name in names if getattr(workers, name)]
    return (
        f"the plan needs {gang.get('CPU', 0):g} CPU and {gang.get('GPU', 0):g} GPU "
        f"({workers.required_workers} workers x {bundle.get('CPU', 0):g} CPU, with their share of "
        f"{workers.num_data_cpus:g} CPU for data, and {workers.gpus_per_worker:g} GPU"
        f"{''.join(demands)})"
    )


def _request_nodes(workers: WorkersConfig) -> list[PlacementGroup]:
    """Creates groups like those of the required workers and of their data."""
    gang = [bundle_resources(workers)] * workers.required_workers
    labels = [workers.label_selector] * len(gang)
    groups = [placement_group(gang, workers.placement_strategy, bundle_label_selector=labels)]
    if bundles := data_bundles(workers):
        labels = [workers.data_label_selector] * len(bundles)
        groups.append(placement_group(bundles, bundle_label_selector=labels))
    return groups


def _count_fitting_workers(workers: WorkersConfig, cluster: list[dict[str, float]]) -> int:
    """Returns the number of workers that fit on the nodes, placed as the plan says."""
    bundle = bundle_resources(workers)
    ratios = [[node.get(name, 0.0) / bundle[name] for name in bundle] for node in cluster]
    numbers = [int(min(ratios_of_node) + 1e-9) for ratios_of_node in ratios]
    if workers.placement_strategy == "STRICT_PACK":
        return max(numbers, default=0)
    if workers.placement_strategy == "STRICT_SPREAD":
        return sum(number > 0 for number in numbers)
    return sum(numbers)
