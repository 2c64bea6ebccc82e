"""Which stages start beside others on a cluster, and how; `cluster` has the tests on one."""

import pytest
import ray
from sleeping_stages import Cell

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError
from as2ray.experiments import ray_backend
from as2ray.experiments.ray_backend import RayBackend
from as2ray.experiments.stage import Label
from as2ray.experiments.store import Store

WORKERS = WorkersConfig(
    num_workers=2,
    cpus_per_worker=1.0,
    gpus_per_worker=0.5,
    num_data_cpus=3.0,
    driver_label_selector={"driver": "yes"},
)


class Gang(Cell):
    RESOURCES = "gang"


class Device(Cell):
    RESOURCES = "device"


class Data(Cell):
    RESOURCES = "data"


CPU, GANG, DEVICE, DATA = Cell("cpu"), Gang("gang"), Device("device"), Data("data")


@pytest.fixture
def nodes(monkeypatch):
    """Four nodes with six CPUs and a GPU together, and the limits of an autoscaler."""
    nodes = [{"CPU": 1.5, "GPU": 0.5}] * 2 + [{"CPU": 1.5, "memory": 4e9}] * 2
    monkeypatch.setattr(
        ray_backend,
        "node_resources",
        lambda *selectors: nodes[2:] if selectors == ({"driver": "yes"},) else nodes,
    )
    limits = {}
    monkeypatch.setattr(
        ray_backend.cluster_state, "get_max_resources_from_cluster_config", lambda: limits or None
    )
    return limits


@pytest.fixture
def backend(tmp_path, nodes):
    return RayBackend(Store(str(tmp_path / "store")), WORKERS, 8)


@pytest.mark.parametrize(
    ("stage", "running", "is_admitted"),
    [
        (GANG, [], True),
        (GANG, [CPU], True),
        (GANG, [CPU, CPU], False),  # 7 CPUs of 6
        (CPU, [GANG], True),
        (CPU, [GANG, CPU], False),
        (DEVICE, [DEVICE], True),
        (DEVICE, [GANG], False),  # 1.5 GPUs of 1
        (DATA, [CPU] * 3, True),
        (DATA, [CPU] * 4, False),  # 7 CPUs of 6
        (CPU, [CPU, CPU, DATA], True),
        (CPU, [DATA, DATA], False),
    ],
)
def test_stage_starts_beside_others_if_the_cluster_has_room_for_all(
    backend, stage, running, is_admitted
):
    assert backend.admits(stage, running) == is_admitted


def test_stage_that_is_larger_than_the_cluster_starts_alone(backend):
    backend.workers = WorkersConfig(num_workers=9, cpus_per_worker=1.0)
    assert backend.admits(GANG, [])
    assert not backend.admits(GANG, [CPU])


def test_no_more_stages_start_than_may_run_at_the_same_time(backend):
    backend.max_parallel = 2
    assert backend.admits(CPU, [CPU])
    assert not backend.admits(CPU, [CPU, CPU])


def test_nodes_that_an_autoscaler_may_start_have_room_too(backend, nodes):
    nodes.update(CPU=12.0, GPU=9.0)
    assert backend.admits(GANG, [GANG])
    nodes.update(CPU=2.0, GPU=0.0)  # fewer than there are
    assert backend.admits(DEVICE, [DEVICE])


@pytest.mark.parametrize(("given", "number"), [(None, 3), (5, 5)])
def test_by_default_as_many_stages_run_as_the_memory_of_a_driver_s_node_holds(
    tmp_path, nodes, given, number
):
    backend = RayBackend.create(Store(str(tmp_path)), WORKERS, given)
    assert backend.max_parallel == number
    assert (backend.store, backend.workers) == (Store(str(tmp_path)), WORKERS)


def test_one_stage_runs_where_no_node_says_how_much_memory_it_has(tmp_path, nodes, monkeypatch):
    monkeypatch.setattr(ray_backend, "node_resources", lambda *selectors: [])
    assert RayBackend.create(Store(str(tmp_path)), WORKERS).max_parallel == 1


def test_plan_is_checked_for_stages_with_workers_and_gpus_are_shared_by_those_that_score(
    backend, monkeypatch
):
    class Pool(Cell):
        RESOURCES = "pool"

    checked = []
    monkeypatch.setattr(
        ray_backend, "check_plan", lambda plan, **options: checked.append((plan, options))
    )
    backend.check([CPU, DEVICE, DATA])
    assert not checked
    backend.check([CPU, Pool("pool")])
    backend.check([GANG, Pool("pool")])
    assert checked == [(WORKERS, {"allow_gpu_sharing": is_shared}) for is_shared in (True, False)]


def test_workers_that_would_share_a_gpu_in_training_are_refused_before_anything_starts(backend):
    with pytest.raises(ResourceError, match="share a GPU"):
        backend.check([GANG])


@pytest.mark.parametrize(
    ("stage", "cpus", "gpus"), [(CPU, 1.0, 0.0), (DEVICE, 1.0, 0.5), (GANG, 0.0, 0.0)]
)
def test_task_of_a_stage_holds_what_it_uses_itself(backend, monkeypatch, stage, cpus, gpus):
    options, calls = {}, []

    class Task:
        def options(self, **values):
            options.update(values)
            return self

        def remote(self, *arguments):
            calls.append(arguments)

    def remote(**values):
        options.update(values)
        return lambda function: Task()

    monkeypatch.setattr(ray, "remote", remote)
    label = Label("title", "a/name")
    backend.submit(stage, {}, label)
    assert calls == [(stage, {}, backend.store, WORKERS, label)]
    assert (options["num_cpus"], options["num_gpus"]) == (cpus, gpus)
    assert (options["name"], options["label_selector"]) == ("a/name", {"driver": "yes"})
    assert options["max_retries"] > 0
    assert "env_vars" in options["runtime_env"]
    backend.workers = WorkersConfig()
    backend.submit(stage, {}, Label())
    assert (options["name"], options["label_selector"]) == (stage.kind, None)


def test_interrupt_cancels_all_stages_that_run_and_waits_until_they_have_ended(
    backend, monkeypatch
):
    calls = []

    def wait(handles, num_returns, timeout=None):
        calls.append((handles, num_returns))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return handles[1:], handles[:1]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "cancel", lambda handle, recursive: calls.append((handle, recursive)))
    handles = ("a", "b", "c")
    assert backend.wait(handles) == "b"
    with pytest.raises(KeyboardInterrupt):
        backend.wait(handles)
    cancelled = [(handle, False) for handle in handles]
    every = list(handles)
    assert calls == [(every, 1), (every, 1), *cancelled, (every, 3)]
