"""The cluster: connecting to it, what its nodes see, and errors that come out of it.

Knows Ray's nodes. Must not know what runs on them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from as2ray.errors import As2rayError, ResourceError

WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}
"""Threads that wait sleep: where they spin, a worker that shares its cores with Ray's own
processes or another worker was seen to crawl at a tenth of its speed. And oneDNN, with torch's
layer above it, keeps up to 1,024 products each, a megabyte or so for every shape that it has met;
packed batches bring new shapes for ever, and a worker would grow by some 4 GB."""


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
        look = ray.remote(num_cpus=0)(file_sizes)
        found = {
            n["NodeManagerAddress"]: look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)
            ).remote(names)
            for n in others
        }
        seen = {node: ray.get(answer) for node, answer in found.items()}
        compare_files(names, file_sizes(names), seen)


def file_sizes(paths: Sequence[str]) -> list[int]:
    """Bytes of each file as this node sees it, -1 of one that it does not."""
    return [os.stat(path).st_size if os.path.exists(path) else -1 for path in paths]


def compare_files(
    paths: Sequence[str], local_sizes: Sequence[int], sizes_by_node: Mapping[str, Sequence[int]]
) -> None:
    """Compares the files of this node with those that others see.

    Args:
        paths: The files.
        here: Their sizes here.
        there: For each other node's address their sizes there.

    Raises:
        ResourceError: They differ.
    """
    for node, found in sizes_by_node.items():
        differ = [path for path, a, b in zip(paths, local_sizes, found) if a != b]
        if differ:
            raise ResourceError(
                f"{differ[0]} (and {len(differ) - 1} more) is not on node {node} as it is here"
                "; expected tables, checkpoints and --workers.storage in a place that every node "
                f"sees: there are {len(sizes_by_node) + 1} nodes",
                fix="give --output and --workers.storage on a file system that all nodes mount",
            )


@contextmanager
def ray_session() -> Iterator[None]:
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
def unwrap_ray_errors() -> Iterator[None]:
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
