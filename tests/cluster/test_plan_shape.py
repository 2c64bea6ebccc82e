"""The simulated schedule of `benchmarks.plan` has the shape of runs on virtual nodes."""

import time
from pathlib import Path

import pytest
import ray
import sleeping_stages
from sleeping_stages import Cell

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.cost_model import Cost
from as2ray.experiments.executor import run_graph
from as2ray.experiments.ray_backend import RayBackend
from as2ray.experiments.store import Store
from benchmarks.plan import simulate

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECONDS = 2.0
"""Duration of a cell's work, which needs no CPU: one machine plays all nodes."""


def test_table_gets_faster_with_nodes_as_simulated(cluster, tmp_path):
    class WorkingCell(Cell):
        RESOURCES = "device"

    def cell(name, *after):
        return WorkingCell(name, after, seconds=SECONDS, expected_hours=SECONDS)

    measured, simulated = {}, {}
    environment = {"env_vars": {"PYTHONPATH": str(Path(sleeping_stages.__file__).parent)}}
    ray.init(address=cluster.address, logging_level="ERROR", runtime_env=environment)
    try:
        for num_nodes in (1, 2, 4):
            while len(cluster.worker_nodes) < num_nodes:
                cluster.add_node(num_cpus=1, object_store_memory=10**8)
            backend = RayBackend(Store(str(tmp_path / "store")), WorkersConfig(), 16)
            warm = [WorkingCell(f"warm-{num_nodes}-{n}", seconds=1.0) for n in range(num_nodes)]
            run_graph(warm, backend.store, backend)
            first = cell(f"first-{num_nodes}")
            rows = [cell(f"row-{num_nodes}-{n}", first) for n in range(8)]
            stages = [first, *rows, cell(f"last-{num_nodes}", rows[0])]
            started_at = time.perf_counter()
            run_graph(stages, backend.store, backend).raise_failures({})
            measured[num_nodes] = time.perf_counter() - started_at
            costs = {stage: Cost(None, stage.hours(), fixed_hours=0.0) for stage in stages}
            simulated[num_nodes] = simulate(costs, num_nodes, gang_size=1)
    finally:
        ray.shutdown()
    assert simulated == {1: 10 * SECONDS, 2: 6 * SECONDS, 4: 4 * SECONDS}
    for num_nodes, duration_s in measured.items():
        assert 0.95 < duration_s / simulated[num_nodes] < 1.5, (measured, simulated)
