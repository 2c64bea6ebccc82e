"""The resources that a run takes of a cluster. Loads no Ray."""

import math
from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class WorkersConfig:
    """The resources that a run takes of the cluster. They do not change its result."""

    num_workers: NonNegativeInt = 1
    """Training workers; 0 trains in this process, without Ray."""
    cpus_per_worker: NonNegativeFloat = 1.0
    """CPUs that a worker reserves to train or score, besides its share of `num_data_cpus`."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """A fraction below 1 lets several workers that score share a GPU."""
    num_data_cpus: PositiveFloat = 1.0
    """CPUs for reading, tokenizing and packing, for all workers together. Every worker reserves its
    share of them on its node, so that a run gets all that it needs at once, or waits."""
    data_label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of other nodes that read, tokenize and pack for training, such as `{"pool": "cpu"}`.
    Runs reserve `num_data_cpus` there before their workers, so no worker may fit on these nodes."""
    num_scoring_actors: PositiveInt | None = None
    """Actors that score a table, each with a worker's resources; by default as many as workers."""
    accelerator_type: str | None = None
    """Type of the workers' accelerators as Ray names it, such as `A100`; by default any."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which workers run, such as `{"ray.io/market-type": "spot"}`."""
    driver_label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which stages and Ray's coordinator of autoscaling run: those that are
    not lost, such as `{"ray.io/market-type": "!spot"}`."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Whether workers share nodes (PACK) or are spread over them; STRICT waits until they can."""
    min_workers: PositiveInt | None = None
    """Train with as few workers while nodes are lost or not started yet; by default with all."""
    elastic_resize_interval_s: PositiveFloat = 60.0
    """Seconds between two checks whether the cluster can take more workers again."""
    provision_timeout_s: NonNegativeFloat = 0.0
    """Seconds to wait for the nodes that the plan needs; an autoscaler starts them."""
    max_failures: Annotated[int, Field(ge=-1)] = 3
    """Restarts of the workers after one of them died; -1 sets no limit, as in Ray Train."""
    resume_interval_s: PositiveFloat = 600.0
    """Seconds between two states from which a run resumes after a failure."""
    preemption_check_steps: PositiveInt = 20
    """Steps between two checks whether such a state is due, or a node is about to be taken. A check
    takes some 10 ms; the steps in between must take less than the notice that a cloud gives."""
    storage_path: str | None = None
    """Folder for checkpoints during a run; with several nodes, one that all of them mount. Not used
    if the stages are stored on an object store."""

    @property
    def required_workers(self) -> int:
        """Number of workers without which a run does not start."""
        return self.num_workers if self.min_workers is None else self.min_workers

    @model_validator(mode="after")
    def _check_workers(self) -> "WorkersConfig":
        if self.num_workers and self.required_workers > self.num_workers:
            raise ValueError(
                f"min_workers={self.min_workers} is more than num_workers={self.num_workers}"
            )
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise ValueError(
                f"gpus_per_worker={self.gpus_per_worker:g} is neither a fraction of one GPU nor a "
                "whole number of GPUs"
            )
        if self.min_workers and (self.label_selector or "STRICT" in self.placement_strategy):
            # It would stop the workers to grow onto these nodes, again and again.
            raise ValueError(
                "min_workers cannot be used with label_selector or a STRICT placement_strategy: "
                "Ray Train counts the nodes to grow on without regard to them; choose nodes by "
                "accelerator_type, or leave min_workers out"
            )
        return self


def bundle_resources(workers: WorkersConfig) -> dict[str, float]:
    """Returns what Ray reserves for a worker: its own resources and its share of data's CPUs.

    With `data_label_selector` the share is reserved elsewhere (see `data_bundles`). Ray counts in
    ten-thousandths. The share is rounded down, or three thirds would exceed a whole.
    """
    num_cpus = workers.cpus_per_worker
    if not workers.data_label_selector:
        num_cpus += _data_share(workers)
    bundle = {
        "CPU": _round_down(num_cpus),
        "GPU": workers.gpus_per_worker,
        f"accelerator_type:{workers.accelerator_type}": 0.001 if workers.accelerator_type else 0.0,
    }
    return {name: amount for name, amount in bundle.items() if amount}


def gang_resources(workers: WorkersConfig) -> dict[str, float]:
    """Returns what Ray reserves, all or nothing, before a run starts."""
    bundle = bundle_resources(workers)
    gang = {name: workers.required_workers * amount for name, amount in bundle.items()}
    for data_bundle in data_bundles(workers):
        gang["CPU"] = gang.get("CPU", 0.0) + data_bundle["CPU"]
    return gang


def data_bundles(workers: WorkersConfig) -> list[dict[str, float]]:
    """Returns what Ray reserves on other nodes for the data of each worker; nothing by default."""
    num_bundles = workers.num_workers if workers.data_label_selector else 0
    return [{"CPU": _round_down(_data_share(workers))}] * num_bundles


def _data_share(workers: WorkersConfig) -> float:
    return workers.num_data_cpus / max(1, workers.num_workers)


def _round_down(num_cpus: float) -> float:
    return math.floor(round(num_cpus * 10_000, 3)) / 10_000
