"""The resources that a run takes of a cluster. Loads no Ray."""

from typing import Annotated

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
    gpus_per_worker: NonNegativeFloat = 0.0
    """A fraction below 1 lets several workers that score share a GPU."""
    num_data_cpus: PositiveFloat = 1.0
    """CPUs that are reserved for reading, tokenizing and packing, for all workers together."""
    min_workers: PositiveInt | None = None
    """Train with as few workers while nodes are lost or not started yet; by default with all."""
    elastic_resize_interval_s: PositiveFloat = 60.0
    """Seconds between two checks whether the cluster can take more workers again."""
    provision_timeout_s: NonNegativeFloat = 0.0
    """Seconds to wait for the nodes that the plan needs; an autoscaler is asked to start them."""
    max_failures: Annotated[int, Field(ge=-1)] = 3
    """Restarts of the workers after one of them died; -1 sets no limit, as in Ray Train."""
    storage_path: str | None = None
    """Folder for checkpoints during a run; with several nodes, one that all of them mount."""

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
        return self
