"""Connects to a Ray cluster, checks that its nodes share files, and unwraps its errors."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile

import ray
from ray.exceptions import NodeDiedError, RayTaskError, TaskUnschedulableError, WorkerCrashedError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from as2ray.console.configuration import worker_variables
from as2ray.distributed.node_files import NodeFiles
from as2ray.errors import As2rayError, ResourceError
from as2ray.interrupts import sigterm_interrupts

WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}
"""Environment variables of training workers.

Idle OpenMP threads sleep: with spinning threads, a worker that shared its cores with Ray's
processes or another worker was measured at a tenth of its speed. oneDNN and the layer of torch
above it cache up to 1,024 primitives each, about 1 MB for every new shape. Packed batches always
have new shapes, and a worker would grow by about 4 GB."""

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""Environment variable: seconds that Ray Train waits for the resources of its workers."""

PLACEMENT_GROUP = "placement_group"
"""File in the folder of a run with the id of its workers' placement group."""

_start_timeout_of_user = os.environ.get(START_TIMEOUT)


def worker_environment() -> dict[str, str]:
    """Returns the environment variables of workers whose log goes to this process's console."""
    return WORKER_ENVIRONMENT | worker_variables()


def set_start_timeout(is_elastic: bool) -> None:
    """Sets for how long the next run of this process waits for the resources of its workers.

    A run with a fixed number of workers keeps its place among those that wait; after a timeout it
    would go to the end. An elastic run looks after Ray's minute whether fewer workers have room.
    """
    os.environ[START_TIMEOUT] = _start_timeout_of_user or ("60" if is_elastic else "3600")


def check_shared(
    paths: Iterable[str | Path],
    folder: str | Path | None = None,
    node_files: NodeFiles = NodeFiles(),  # noqa: B008
) -> None:
    """Checks that every other node sees the same files, and the files written to a folder.

    A node that is lost meanwhile does not count.

    Args:
        paths: Files and folders that the workers read; what exists nowhere, as the id of a model on
            a hub, passes. Nodes fetch what they can.
        folder: Folder to which they write, if any; a temporary file is created there, unless nodes
            publish what they write.
        node_files: How nodes see files of others.

    Raises:
        ResourceError: A node does not see one of the files, for example on another node's disk.
    """
    this_node = ray.get_runtime_context().get_node_id()
    other_nodes = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] != this_node]
    if not other_nodes:
        return
    with ExitStack() as stack:
        names = []
        if folder is not None and node_files.is_local:
            Path(folder).mkdir(parents=True, exist_ok=True)
            probe = stack.enter_context(NamedTemporaryFile(prefix=".as2ray-", dir=folder))
            names.append(probe.name)
        files = [sorted(filter(Path.is_file, Path(p).rglob("*"))) or [Path(p)] for p in paths]
        names += map(str, chain.from_iterable(files))
        pending = {}
        for node in other_nodes:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(file_sizes)
            pending[node["NodeManagerAddress"]] = task.remote(names, node_files)
        sizes_by_node = {}
        for address, sizes in pending.items():
            with suppress(NodeDiedError, TaskUnschedulableError, WorkerCrashedError):
                sizes_by_node[address] = ray.get(sizes)
        compare_files(names, file_sizes(names), sizes_by_node)


def file_sizes(paths: Sequence[str], node_files: NodeFiles | None = None) -> list[int]:
    """Returns the size of each file in bytes as this node sees it, -1 if it does not exist."""
    if node_files is not None:
        node_files.fetch_paths(paths)
    return [os.stat(path).st_size if os.path.exists(path) else -1 for path in paths]


def compare_files(
    paths: Sequence[str], local_sizes: Sequence[int], sizes_by_node: Mapping[str, Sequence[int]]
) -> None:
    """Compares the files of this node with those that other nodes see.

    Args:
        paths: The files.
        local_sizes: Their sizes on this node, as `file_sizes` returns them.
        sizes_by_node: Their sizes on every other node, by its address.

    Raises:
        ResourceError: The sizes differ.
    """
    for node, sizes in sizes_by_node.items():
        different = [path for path, size, local in zip(paths, sizes, local_sizes) if size != local]
        if different:
            raise ResourceError(
                f"{different[0]} (and {len(different) - 1} more) is missing or different on node "
                f"{node}; all {len(sizes_by_node) + 1} nodes must see the same tables, checkpoints "
                "and --workers.storage_path",
                fix="give --output and --workers.storage_path on a file system of all nodes, or "
                "--store on an object store",
            )


@contextmanager
def ray_session() -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS, or starts a local one that ends with the context.

    A submitted job has RAY_ADDRESS set. A connection that exists already is used and stays open.
    SIGTERM interrupts the context as Ctrl-C does.

    Raises:
        ResourceError: Ray does not start, or there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    with sigterm_interrupts():
        try:
            ray.init(address=address, logging_level="WARNING")
        except Exception as error:  # Ray raises plain exceptions, too.
            fix = "start the cluster, or leave RAY_ADDRESS out"
            if address == "local":
                fix = "run again when cores are free; see Ray's logs"
            raise ResourceError(f"no Ray at {address}: {error}", fix) from error
        # Ray has set a handler, which kills Ray's processes first: stages could not end.
        with sigterm_interrupts():
            try:
                yield
            finally:
                ray.shutdown()


def record_placement_group(folder: str | Path) -> None:
    """Writes the id of the placement group of this worker into the folder of its run."""
    if (group := get_current_placement_group()) is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / PLACEMENT_GROUP).write_text(group.id.hex())


def release_placement_group(folder: Path) -> None:
    """Removes the placement group of a run that has ended, if it still exists.

    Where the controller of a run was killed, Ray Train leaves that to a process that asks the
    dashboard, which may not be there.
    """
    with suppress(FileNotFoundError):
        group_id = ray.PlacementGroupID(bytes.fromhex((folder / PLACEMENT_GROUP).read_text()))
        remove_placement_group(PlacementGroup(group_id))
        (folder / PLACEMENT_GROUP).unlink()


def hide_log_of_ray_data() -> None:
    """Leaves what Ray Data says of each execution to its log file; warnings are shown."""
    # It warns that progress bars are off.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__name__ == "PlainRayHandler":  # the console's
            handler.setLevel(logging.WARNING)


@contextmanager
def unwrap_ray_errors() -> Iterator[None]:
    """Raises an error of as2ray that ended a task as itself, without the errors Ray wraps it in."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while isinstance(cause, RayTaskError) or not isinstance(cause, As2rayError | None):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None or cause is error:
            raise
        raise cause from error
