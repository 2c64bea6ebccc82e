"""Runs stages as tasks of Ray: a task holds nothing while its training workers or actors work."""

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state as cluster_state

from as2ray.console.configuration import log_to_console
from as2ray.distributed.cluster import unwrap_ray_errors, worker_environment
from as2ray.distributed.plan import check_plan, node_resources
from as2ray.distributed.workers_config import WorkersConfig, gang_resources
from as2ray.experiments.executor import execute
from as2ray.experiments.stage import Label, Result, Stage
from as2ray.experiments.store import Store

MAX_RETRIES = 3
"""Times that a stage is started again after its process or node is lost; it resumes."""

CANCEL_TIMEOUT_S = 30.0
"""Seconds that interrupted stages have to end."""

CONTROLLER_BYTES = 1.3e9
"""Memory of a stage on its own node: its task, and the controller and watchers of Ray Train."""


@dataclass
class RayBackend:
    """Runs stages on the cluster that this process is connected to."""

    store: Store
    workers: WorkersConfig
    max_parallel: int

    @classmethod
    def create(
        cls, store: Store, workers: WorkersConfig, max_parallel: int | None = None
    ) -> "RayBackend":
        """Returns a backend for as many stages as the memory of a node has room for."""
        nodes = node_resources(workers.driver_label_selector)
        memory = max((node.get("memory", 0.0) for node in nodes), default=0.0)
        return cls(store, workers, max_parallel or max(1, int(memory / CONTROLLER_BYTES)))

    def check(self, stages: Sequence[Stage]) -> None:
        """See `Backend`."""
        resources = {stage.RESOURCES for stage in stages}
        if resources & {"gang", "pool"}:
            check_plan(self.workers, allow_gpu_sharing="gang" not in resources)

    def admits(self, stage: Stage, running: Sequence[Stage]) -> bool:
        """See `Backend`: the stage fits beside what runs, counted over the whole cluster.

        Other jobs are not counted, because Ray queues the placement groups of all jobs.
        """
        if not running:
            return True
        if len(running) >= self.max_parallel:
            return False
        demands = [self._demand(each) for each in (stage, *running)]
        capacity = _capacity()
        return all(
            sum(demand.get(name, 0.0) for demand in demands) <= capacity.get(name, 0.0) + 1e-9
            for name in demands[0]
        )

    def _demand(self, stage: Stage) -> dict[str, float]:
        """Returns the CPUs and GPUs that a stage occupies, in its task or in those it starts."""
        if stage.RESOURCES == "data":
            return {"CPU": self.workers.num_data_cpus}
        return self._task_resources(stage) or gang_resources(self.workers)

    def _task_resources(self, stage: Stage) -> dict[str, float]:
        """Returns the CPUs and GPUs of a stage's own task; {} if others work for it."""
        device = {"CPU": self.workers.cpus_per_worker, "GPU": self.workers.gpus_per_worker}
        return {"cpu": {"CPU": 1.0}, "device": device}.get(stage.RESOURCES, {})

    def submit(self, stage: Stage, inputs: Mapping[Stage, Result], label: Label) -> Any:
        """See `Backend`."""
        resources = self._task_resources(stage)
        task = ray.remote(max_retries=MAX_RETRIES)(_execute).options(
            name=label.name or stage.kind,
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            label_selector=self.workers.driver_label_selector or None,
            runtime_env={"env_vars": worker_environment()},
        )
        return task.remote(stage, inputs, self.store, self.workers, label)

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        try:
            return ray.wait(list(handles), num_returns=1)[0][0]
        except (KeyboardInterrupt, SystemExit):
            # Ray would kill them, and trackers would show their runs as running for ever.
            for handle in handles:
                ray.cancel(handle, recursive=False)
            ray.wait(list(handles), num_returns=len(handles), timeout=CANCEL_TIMEOUT_S)
            raise

    def result(self, handle: Any) -> Result:
        """See `Backend`."""
        with unwrap_ray_errors():
            result: Result = ray.get(handle)
        return result


def _execute(*arguments: Any) -> Result:
    # Ray cancels a task by it. A shell's background process ignores it, and so do its workers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log_to_console()
    return execute(*arguments)


def _capacity() -> Counter[str]:
    """Returns the resources that the cluster has, or that its autoscaler may give it."""
    capacity: Counter[str] = Counter()
    for node in node_resources():
        capacity.update(node)
    # Without an autoscaler there is no such configuration.
    capacity |= Counter(cluster_state.get_max_resources_from_cluster_config() or {})
    return capacity
