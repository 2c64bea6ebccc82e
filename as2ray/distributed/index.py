"""Builds an index in shards on a Ray cluster; maps functions over tasks and actors."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util import ActorPool

from as2ray.distributed.cluster import unwrap_ray_errors, worker_environment
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError
from as2ray.retrieval.embeddings import LoadEncoder
from as2ray.retrieval.index_writer import IndexConfig, write_index

T = TypeVar("T")


def build_sharded(
    documents: str | Path,
    folder: str | Path,
    config: IndexConfig | None = None,
    *,
    num_shards: int = 8,
    overwrite: bool = False,
    cpus_per_shard: float = 1.0,
    load_encoder: LoadEncoder | None = None,
    workers: WorkersConfig | None = None,
    with_subject_bound: bool = False,
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
        load_encoder: Loads `config.encoder` in each actor; see `write_index`.
        workers: Actors that encode the sentences; by default as many as tasks fit the cluster.
        with_subject_bound: See `write_index`.

    Raises:
        ResourceError: No node has as many CPUs.
    """
    cpus = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    max_cpus = max(cpus, default=0.0)
    if not 0 < cpus_per_shard <= max_cpus:
        raise ResourceError(
            f"{cpus_per_shard:g} CPU per shard must be more than 0 and at most {max_cpus:g}, the "
            "CPUs of the largest node"
        )
    if workers is None:
        num_workers = sum(int(num_cpus / cpus_per_shard) for num_cpus in cpus)
        workers = WorkersConfig(num_workers=num_workers, cpus_per_worker=cpus_per_shard)
    return write_index(
        documents,
        folder,
        config,
        num_shards=num_shards,
        overwrite=overwrite,
        map_function=partial(map_on_ray, num_cpus=cpus_per_shard),
        load_encoder=load_encoder,
        map_blocks=partial(map_on_actors, workers=workers),
        with_subject_bound=with_subject_bound,
    )


def map_on_ray(
    function: Callable[[Any], T], arguments: Iterable[Any], num_cpus: float = 1.0
) -> list[T]:
    """Calls a function with each argument, in tasks; returns the results in order."""
    return list(iter_on_ray(function, arguments, num_cpus))


def iter_on_ray(
    function: Callable[[Any], T], arguments: Iterable[Any], num_cpus: float = 1.0
) -> Iterator[T]:
    """Calls a function with each argument, in tasks; yields each result when those before it are.

    Results stay on the cluster until they are asked for.
    """
    task, function_ref = ray.remote(num_cpus=num_cpus)(_call), ray.put(function)
    with unwrap_ray_errors():
        for ref in [task.remote(function_ref, value) for value in arguments]:
            yield ray.get(ref)


def _call(function: Callable[[Any], T], argument: Any) -> T:
    return function(argument)


def map_on_actors(
    create: Callable[[], Callable[[Any], T]], arguments: Iterable[Any], workers: WorkersConfig
) -> Iterator[T]:
    """Calls what `create` returns with each argument, in actors; yields the results in order.

    An argument is read when an actor is free, so a caller that stops early stops the work. Actors
    of a node that is lost start again on another one.

    Args:
        create: Called once by each actor, for example to load a model.
        arguments: The arguments.
        workers: Number and resources of the actors.
    """
    num_actors = workers.num_scoring_actors or workers.num_workers
    actor = ray.remote(_Caller).options(
        num_cpus=workers.cpus_per_worker,
        num_gpus=workers.gpus_per_worker,
        accelerator_type=workers.accelerator_type,
        label_selector=workers.label_selector or None,
        runtime_env={"env_vars": worker_environment()},
        max_restarts=-1,
        max_task_retries=-1,
    )
    actors = [actor.remote(create) for _ in range(num_actors)]
    pool = ActorPool(actors)
    try:
        with unwrap_ray_errors():
            for argument in arguments:
                if not pool.has_free():
                    yield pool.get_next()
                pool.submit(lambda caller, value: caller.call.remote(value), argument)
            while pool.has_next():
                yield pool.get_next()
    finally:
        # An error's traceback refers to them, so they would keep their CPUs, for which the next
        # stage may wait, until Python collects garbage.
        if ray.is_initialized():  # otherwise they are gone, and `ray.kill` would start another Ray
            for each in actors:
                ray.kill(each)


class _Caller:
    def __init__(self, create: Callable[[], Callable[[Any], Any]]) -> None:
        self.create = create

    # Not in the constructor, whose errors Ray raises without their cause.
    @cached_property
    def function(self) -> Callable[[Any], Any]:
        return self.create()

    def call(self, argument: Any) -> Any:
        return self.function(argument)
