"""Workers of the tests' Ray are forked from a process that has imported torch, if possible."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def starter() -> str:
    """What Ray runs as Python where another process starts it."""
    code = "import sys; from ray._private import services; print(services.sys.executable)"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


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
    assert Path(starter()).parent.name.startswith("nursery-")
    code = "import sys; print(sys.executable)"
    assert subprocess.check_output([starter(), "-c", code], text=True).strip() == sys.executable


@pytest.mark.usefixtures("forked_workers_elsewhere")
def test_forked_worker_sees_the_disk_of_its_starter(tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount folders")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    worker, seen = tmp_path / "default_worker.py", tmp_path / "seen"
    code = (
        "import pathlib, sys; print('torch' in sys.modules, pathlib.Path('here/name').read_text())"
    )
    worker.write_text(code)
    mounted = 'mount --bind there here && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", starter(), worker]
    with seen.open("wb") as output:
        subprocess.run(command, cwd=tmp_path, stdout=output, check=True)
    deadline = time.monotonic() + 900
    while not seen.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert seen.read_text().split() == ["True", "there"]
    assert (tmp_path / "here/name").read_text() == "here"
