"""Workers of the tests' Ray are forked from a process that has imported torch, if possible."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variable", "is_forked"), [("RAY_SEEN_BY_A_TASK", True), ("TORCH_SEEN_BY_AN_IMPORT", False)]
)
def test_worker_is_forked_unless_its_environment_may_change_an_import(
    ray_local, tmp_path, variable, is_forked
):
    import ray

    def look() -> tuple[str, bool, str, list[float]]:
        import sys

        had_torch = "torch" in sys.modules
        import torch

        return os.environ[variable], had_torch, os.getcwd(), torch.rand(3).tolist()

    environment = {"env_vars": {variable: "5"}}
    task = ray.remote(num_cpus=0, max_calls=1, runtime_env=environment)(look)
    values = ray.get([task.remote(), task.remote()])
    assert [value[:3] for value in values] == [("5", is_forked, os.getcwd())] * 2
    assert values[0][3] != values[1][3]  # each worker has a random state of its own


@pytest.mark.usefixtures("forked_workers_elsewhere")
def test_other_process_starts_workers_with_the_starter_and_all_else_with_python():
    code = "import sys; from ray._private import services; print(services.sys.executable)"
    starter = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert Path(starter).parent.name.startswith("nursery-")
    code = "import sys; print(sys.executable)"
    assert subprocess.check_output([starter, "-c", code], text=True).strip() == sys.executable
