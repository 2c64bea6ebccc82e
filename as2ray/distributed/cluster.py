"""The cluster: connecting to it, and checking before anything starts that a plan fits it.

Knows Ray's resources. Must not know what runs on them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from as2ray.errors import As2rayError, ResourceError

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait sleep: where they spin, a worker that shares its cores with Ray's own
processes or another worker was seen to crawl at a tenth of its speed."""


@dataclass(frozen=True)
class Workers:
    """What a run may take of the cluster; changes nothing of its result."""

    count: int = 1
    """Training workers; 0 trains in this process, without Ray."""
    cpus: float = 1.0
    """CPUs that each worker holds."""
    gpus: float = 0.0
    """GPUs that each worker holds; a part of one lets several workers that score share it."""
    data_cpus: float = 1.0
    """CPUs left for reading, tokenising and packing, all workers together."""
    least: int | None = None
    """Go on with so few while nodes are lost or not there yet; by default with all or none."""
    resize_every: float = 60.0
    """Seconds between looks whether there is room for more of them again."""
    max_failures: int = 3
    """Times the workers are started again after one died."""
    storage: str | None = None
    """Where checkpoints of a run in work lie; on several nodes, a place all of them see."""


def nodes() -> list[dict[str, float]]:
    """The resources of each node of the cluster."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check(workers: Workers, sharing: bool = False) -> None:
    """Compares the plan with the cluster, node by node.

    Ray waits for ever, without a word, for a worker that fits on no node, and Ray Data for CPUs
    that the workers hold. CPU nodes may tokenise for GPU nodes that train: Ray keeps tasks without
    a GPU off GPU nodes while others have room.

    Args:
        workers: The plan.
        sharing: Whether several workers may share a GPU: those that score may, those that train
            exchange gradients by NCCL, which refuses it.

    Raises:
        ResourceError: The cluster has fewer CPUs or GPUs than the plan needs, or its nodes no room
            for every worker whole.
    """
    cluster = nodes()
    has = {name: sum(node.get(name, 0.0) for node in cluster) for name in ("CPU", "GPU")}
    count = workers.count if workers.least is None else workers.least
    needs = {"CPU": count * workers.cpus + workers.data_cpus, "GPU": count * workers.gpus}
    plan = (
        f"a plan of {count} workers x {workers.cpus:g} CPU, {workers.gpus:g} GPU and "
        f"{workers.data_cpus:g} CPU for data: {needs['CPU']:g} CPU, {needs['GPU']:g} GPU"
    )
    if not 0 < count <= workers.count:
        raise ResourceError(
            f"{workers.least} workers at least, of {workers.count}",
            expected=f"1 to {workers.count}",
            mend="correct --workers.least",
        )
    if any(needs[name] > has[name] for name in needs) or workers.data_cpus <= 0:
        raise ResourceError(
            plan,
            expected=f"at most {has['CPU']:g} CPU and {has['GPU']:g} GPU (what the "
            "cluster has), with more than 0 CPU for data",
            mend="lower --workers.count or --workers.cpus (fractions are allowed), or add nodes",
        )
    if workers.gpus > 1 and workers.gpus % 1:
        raise ResourceError(
            plan,
            expected="a part of one GPU, or whole GPUs",
            mend="set --workers.gpus to a fraction below 1 or to a whole number",
        )
    if not sharing and workers.count > 1 and 0 < workers.gpus <= 0.5:
        raise ResourceError(
            f"{plan}; two workers that train would share a GPU",
            expected="a GPU for each of several workers that train: NCCL refuses to share one",
            mend="set --workers.gpus 1, or --workers.count 1",
        )
    rooms = [_room(workers, node) for node in cluster]
    _check_room(count, rooms, cluster, plan)
    if workers.least is not None:
        _check_spare(workers, rooms, cluster, plan)


def _check_room(count: int, rooms: list[int], cluster: list[dict[str, float]], plan: str) -> None:
    """Whether the nodes have room for every worker whole."""
    placed = sum(rooms)
    if placed < count:
        of_each = ", ".join(f"{n.get('CPU', 0):g} CPU + {n.get('GPU', 0):g} GPU" for n in cluster)
        raise ResourceError(
            f"{plan}; {placed} workers fit on the nodes ({of_each})",
            expected="room on one node for every worker whole",
            mend="lower --workers.cpus or --workers.gpus, or add nodes of that size",
        )


def _check_spare(
    workers: Workers, rooms: list[int], cluster: list[dict[str, float]], plan: str
) -> None:
    """Whether data keeps its CPUs however workers are placed again: Train takes what it finds."""
    spare = sum(n.get("CPU", 0.0) - room * workers.cpus for n, room in zip(cluster, rooms))
    if spare < workers.data_cpus:
        raise ResourceError(
            f"{plan}; workers placed again after a loss could leave {spare:g} CPU for data",
            expected=f"{workers.data_cpus:g} CPU on nodes that have no room for a worker, or "
            "beside as many workers as have room",
            mend="raise --workers.cpus so that a node's CPUs do not all go to workers, add a node "
            "for data, or leave --workers.least out",
        )


def _room(workers: Workers, node: dict[str, float]) -> int:
    """Workers for which a node has room."""
    asked = {"CPU": workers.cpus, "GPU": workers.gpus}
    parts = [node.get(name, 0.0) / each for name, each in asked.items() if each]
    return min((int(part + 1e-9) for part in parts), default=workers.count)


def check_shared(paths: Iterable[str | Path], folder: str | Path) -> None:
    """Asks every other node whether it sees these files, and what is written to a folder.

    Args:
        paths: Files that the workers read.
        folder: Where they write; a mark is put there for a moment.

    Raises:
        ResourceError: A node does not see one of them: a disk of one node serves one node alone.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] != here]
    if not others:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix=".as2ray-", dir=folder) as mark:
        names = [mark.name, *map(str, paths)]
        look = ray.remote(num_cpus=0)(sizes)
        found = {
            n["NodeManagerAddress"]: look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)
            ).remote(names)
            for n in others
        }
        seen = {node: ray.get(answer) for node, answer in found.items()}
        compare(names, sizes(names), seen)


def sizes(paths: Sequence[str]) -> list[int]:
    """Bytes of each file as this node sees it, -1 of one that it does not."""
    return [os.stat(path).st_size if os.path.exists(path) else -1 for path in paths]


def compare(paths: Sequence[str], here: Sequence[int], there: Mapping[str, Sequence[int]]) -> None:
    """Compares the files of this node with those that others see.

    Args:
        paths: The files.
        here: Their sizes here.
        there: For each other node's address their sizes there.

    Raises:
        ResourceError: They differ.
    """
    for node, found in there.items():
        differ = [path for path, a, b in zip(paths, here, found) if a != b]
        if differ:
            raise ResourceError(
                f"{differ[0]} (and {len(differ) - 1} more) is not on node {node} as it is here",
                expected="tables, checkpoints and --workers.storage in a place that every node "
                f"sees: there are {len(there) + 1} nodes",
                mend="give --output and --workers.storage on a file system that all nodes mount",
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
    ray.init(address=address, logging_level="WARNING")
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
