"""Builds an index in shards on a Ray cluster."""

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
    """Builds an index with one task per shard; it equals the index that one process builds.

    With several nodes, documents and index must lie on a file system that all of them mount.

    Args:
        documents: A folder of documents, one document, or a table of them.
        folder: Where the index is written.
        config: How documents are read, split and scored.
        num_shards: Maximum number of shards.
        overwrite: Whether an existing index in `folder` is replaced.
        cpus_per_shard: CPUs of each task.

    Raises:
        ResourceError: No node has as many CPUs.
    """
    max_cpus = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes()), default=0.0)
    if not 0 < cpus_per_shard <= max_cpus:
        raise ResourceError(
            f"{cpus_per_shard:g} CPU per shard must be more than 0 and at most {max_cpus:g}, the "
            "CPUs of the largest node"
        )

    def map_on_ray(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        task, function_ref = ray.remote(num_cpus=cpus_per_shard)(_call), ray.put(function)
        results: list[Any] = ray.get([task.remote(function_ref, value) for value in arguments])
        return results

    return write_index(
        documents,
        folder,
        config,
        num_shards=num_shards,
        overwrite=overwrite,
        map_function=map_on_ray,
    )


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)
