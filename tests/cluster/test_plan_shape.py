"""The simulated schedule of `benchmarks.plan` has the shape of runs on virtual nodes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import sleeping_stages
from sleeping_stages import Cell, start_times

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.cost_model import Cost
from as2ray.experiments.executor import run_graph
from as2ray.experiments.ray_backend import RayBackend
from as2ray.experiments.store import Store
from benchmarks.plan import simulate

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECONDS = 2.0
"""Duration of a cell's work, which needs no CPU: one machine plays all nodes."""


def count_rounds(started_at: Sequence[float]) -> int:
    """Length of the longest chain of cells of which each starts after the one before has ended.

    Unlike the duration of a schedule it does not grow with the load of the machine.
    """
    rounds: list[int] = []
    for start in started_at:
        ended = [r for r, earlier in zip(rounds, started_at) if earlier + SECONDS <= start]
        rounds.append(1 + max(ended, default=0))
    return max(rounds)


def test_table_gets_faster_with_nodes_as_simulated(cluster, tmp_path):
    class WorkingCell(Cell):
        RESOURCES = "device"

    def cell(name, *after):
        log.mkdir(exist_ok=True)
        return WorkingCell(name, after, SECONDS, str(log), expected_hours=SECONDS)

    measured, simulated = {}, {}
    environment = {"env_vars": {"PYTHONPATH": str(Path(sleeping_stages.__file__).parent)}}
    ray.init(address=cluster.address, logging_level="ERROR", runtime_env=environment)
    try:
        for num_nodes in (1, 2, 4):
            while len(cluster.worker_nodes) < num_nodes:
                cluster.add_node(num_cpus=1, object_store_memory=10**8)
            backend = RayBackend(Store(str(tmp_path / "store")), WorkersConfig(), 16)
            log = tmp_path / f"log-{num_nodes}"
            warm = [WorkingCell(f"warm-{num_nodes}-{n}", seconds=1.0) for n in range(num_nodes)]
            run_graph(warm, backend.store, backend)
            first = cell(f"first-{num_nodes}")
            rows = [cell(f"row-{num_nodes}-{n}", first) for n in range(8)]
            stages = [first, *rows, cell(f"last-{num_nodes}", rows[0])]
            run_graph(stages, backend.store, backend).raise_failures({})
            measured[num_nodes] = count_rounds(start_times(log)) * SECONDS
            costs = {stage: Cost(None, stage.hours(), fixed_hours=0.0) for stage in stages}
            simulated[num_nodes] = simulate(costs, num_nodes, gang_size=1)
    finally:
        ray.shutdown()
    assert simulated == {1: 10 * SECONDS, 2: 6 * SECONDS, 4: 4 * SECONDS}
    assert measured[1] > measured[2] > measured[4]
    for num_nodes, duration_s in measured.items():
        assert 0 <= duration_s - simulated[num_nodes] <= SECONDS, (measured, simulated)
