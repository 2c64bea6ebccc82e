"""An index built in shards on a cluster.

Knows Ray's tasks. Must not know how a shard is built: `retrieval.build` does. On several nodes
documents and index lie where all of them see them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from as2ray.errors import ResourceError
from as2ray.retrieval.index_writer import IndexConfig, write_index


def build_sharded(
    documents: str | Path,
    folder: str | Path,
    config: IndexConfig | None = None,
    *,
    num_shards: int = 8,
    overwrite: bool = False,
    cpus_per_shard: float = 1.0,
) -> dict[str, Any]:
    """`retrieval.build.build` with each shard a task; the same index as in one process.

    Args:
        source: Documents.
        folder: Where the index goes.
        settings: How text is read and scored.
        shards: Parts.
        replace: Whether an older index there is replaced.
        cpus: That each task holds.

    Raises:
        ResourceError: No node has as many CPUs.
    """
    most = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes()), default=0.0)
    if not 0 < cpus_per_shard <= most:
        raise ResourceError(
            f"{cpus_per_shard:g} CPU a shard"
            f"; expected more than 0 and at most {most:g}, what the largest node has",
            fix="lower the CPUs of a shard",
        )

    def spread(work: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        task, held = ray.remote(num_cpus=cpus_per_shard)(_call), ray.put(work)
        found: list[Any] = ray.get([task.remote(held, argument) for argument in arguments])
        return found

    return write_index(
        documents, folder, config, num_shards=num_shards, overwrite=overwrite, map_function=spread
    )


def _call(work: Callable[[Any], Any], argument: Any) -> Any:
    return work(argument)
