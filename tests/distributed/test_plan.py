"""The resource plan: refused before anything starts, with the numbers."""

import pytest
from pydantic import ValidationError

from as2ray.distributed import plan
from as2ray.distributed.plan import check_plan, has_labels
from as2ray.distributed.workers_config import (
    WorkersConfig,
    bundle_resources,
    data_bundles,
    gang_resources,
)
from as2ray.errors import ResourceError


@pytest.fixture
def create_cluster(monkeypatch):
    """`create_cluster(*nodes)` with the resources of each node."""
    return lambda *nodes: monkeypatch.setattr(plan, "node_resources", lambda selector: [*nodes])


@pytest.fixture
def two_cpus(create_cluster):
    create_cluster({"CPU": 2.0})


def test_plan_that_fits_passes(two_cpus):
    check_plan(WorkersConfig(num_workers=2, cpus_per_worker=0.5, num_data_cpus=1))


def test_plan_with_more_workers_than_the_cluster_has_is_refused_with_numbers(two_cpus):
    with pytest.raises(
        ResourceError,
        match=r"needs 5 CPU.*4 workers x 1\.25 CPU.*has 2 CPU.*1 workers fit.*1 x 2 CPU",
    ):
        check_plan(WorkersConfig(num_workers=4))


def test_plan_that_leaves_no_cpu_for_data_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="1 CPU for data"):
        check_plan(WorkersConfig(num_workers=2, num_data_cpus=1))
    with pytest.raises(ValidationError, match=r"num_data_cpus(.|\n)*greater than 0"):
        WorkersConfig(num_workers=1, num_data_cpus=0)


def test_bundle_holds_a_worker_and_its_share_of_data_and_never_more_than_its_part():
    workers = WorkersConfig(num_workers=3, cpus_per_worker=1, gpus_per_worker=1, num_data_cpus=2)
    # Ray rounds 1.66667 up to 1.6667, and three of them would not fit on five CPUs.
    assert bundle_resources(workers) == {"CPU": 1.6666, "GPU": 1}
    assert gang_resources(workers)["CPU"] <= 5
    typed = WorkersConfig(accelerator_type="A100", cpus_per_worker=0.7, num_data_cpus=0.1)
    assert bundle_resources(typed) == {"CPU": 0.8, "accelerator_type:A100": 0.001}
    # The share stays as it is when an elastic run shrinks.
    elastic = WorkersConfig(num_workers=4, num_data_cpus=8, min_workers=2)
    assert gang_resources(elastic) == {"CPU": 6.0}
    assert gang_resources(WorkersConfig(num_workers=0)) == {"CPU": 0.0}
    apart = WorkersConfig(num_workers=3, num_data_cpus=2, data_label_selector={"pool": "cpu"})
    assert bundle_resources(apart) == {"CPU": 1.0}
    assert data_bundles(apart) == [{"CPU": 0.6666}] * 3
    assert gang_resources(apart)["CPU"] == pytest.approx(5, abs=0.001)


def test_plan_with_gpus_on_a_cluster_without_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="1 GPU"):
        check_plan(WorkersConfig(num_workers=1, gpus_per_worker=1))


@pytest.fixture
def mixed(create_cluster):
    """Two GPU nodes and a CPU node."""
    a100 = {"CPU": 4.0, "GPU": 2.0, "accelerator_type:A100": 1.0}
    create_cluster(a100, {"CPU": 4.0, "GPU": 2.0, "accelerator_type:L4": 1.0}, {"CPU": 16.0})


def test_runs_side_by_side_are_as_many_as_have_room_for_workers_and_data(two_cpus):
    half = WorkersConfig(num_workers=1, cpus_per_worker=0.5, num_data_cpus=0.5)
    assert plan.max_concurrent_runs(half) == 2
    assert plan.max_concurrent_runs(WorkersConfig(num_workers=1)) == 1


def test_runs_side_by_side_are_as_many_as_have_gpus(mixed):
    assert plan.max_concurrent_runs(WorkersConfig(num_workers=1, gpus_per_worker=1)) == 4
    two = WorkersConfig(num_workers=2, gpus_per_worker=1, num_data_cpus=6)
    assert plan.max_concurrent_runs(two) == 1


def test_workers_that_fit_the_sum_of_nodes_but_no_node_are_refused(mixed):
    with pytest.raises(ResourceError, match=r"2 workers fit on its nodes \(2 x 4 CPU \+ 2 GPU"):
        check_plan(
            WorkersConfig(num_workers=4, cpus_per_worker=2, gpus_per_worker=1, num_data_cpus=4)
        )


def test_workers_want_the_accelerator_that_the_plan_names(mixed):
    two = {"num_workers": 2, "gpus_per_worker": 1}
    check_plan(WorkersConfig(**two, accelerator_type="A100"))
    with pytest.raises(ResourceError, match=r"accelerator_type H100\).* 0 workers fit"):
        check_plan(WorkersConfig(**two, accelerator_type="H100"))


def test_strict_placement_needs_one_node_or_a_node_each(mixed):
    check_plan(WorkersConfig(num_workers=3, placement_strategy="STRICT_SPREAD"))
    with pytest.raises(ResourceError, match=r"STRICT_SPREAD.* 3 workers fit"):
        check_plan(WorkersConfig(num_workers=4, placement_strategy="STRICT_SPREAD"))
    check_plan(WorkersConfig(num_workers=8, placement_strategy="STRICT_PACK"))
    with pytest.raises(ResourceError, match=r"STRICT_PACK.* 2 workers fit"):
        check_plan(
            WorkersConfig(num_workers=4, gpus_per_worker=1, placement_strategy="STRICT_PACK")
        )


def test_elastic_plan_with_demands_that_ray_train_does_not_count_is_refused():
    elastic = {"num_workers": 2, "min_workers": 1}
    WorkersConfig(**elastic, accelerator_type="A100", placement_strategy="SPREAD")
    for demand in ({"label_selector": {"a": "b"}}, {"placement_strategy": "STRICT_SPREAD"}):
        with pytest.raises(ValidationError, match="min_workers cannot be used with"):
            WorkersConfig(**elastic, **demand)


@pytest.mark.parametrize(
    ("condition", "fitting"),
    [("a", "a"), ("!a", "bc"), ("in(a, b)", "ab"), ("!in(a,b)", "c")],
)
def test_labels_fit_a_selector_as_in_ray(condition, fitting):
    nodes = {"a": {"zone": "a"}, "b": {"zone": "b"}, "c": {}}
    chosen = [name for name, labels in nodes.items() if has_labels(labels, {"zone": condition})]
    assert chosen == list(fitting)


def test_gpus_are_shared_by_workers_that_score_and_not_by_those_that_train(mixed):
    several = WorkersConfig(
        num_workers=8, cpus_per_worker=0.5, gpus_per_worker=0.5, num_data_cpus=1
    )
    check_plan(several, allow_gpu_sharing=True)
    with pytest.raises(ResourceError, match="NCCL"):
        check_plan(several)
    check_plan(
        WorkersConfig(num_workers=1, cpus_per_worker=0.5, gpus_per_worker=0.5, num_data_cpus=1)
    )


def test_more_than_one_gpu_and_a_part_is_refused():
    with pytest.raises(ValidationError, match="whole number of GPUs"):
        WorkersConfig(num_workers=1, gpus_per_worker=1.5)


def test_elastic_plan_fits_where_its_least_workers_do(create_cluster):
    create_cluster({"CPU": 1.0}, {"CPU": 3.0})
    four = {"num_workers": 4, "cpus_per_worker": 2, "num_data_cpus": 4}
    check_plan(WorkersConfig(**four, min_workers=1))
    with pytest.raises(ResourceError, match="4 workers"):
        check_plan(WorkersConfig(**four))
    with pytest.raises(ValidationError, match="min_workers=5 is more than num_workers=4"):
        WorkersConfig(**four, min_workers=5)


def test_run_that_waits_for_nodes_looks_every_second(monkeypatch):
    looks, waits_s = iter([[], [{"CPU": 1.0}], [{"CPU": 4.0}]]), []
    monkeypatch.setattr(plan.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(plan, "node_resources", lambda *_: next(looks))
    monkeypatch.setattr(plan, "_request_nodes", lambda _: [])
    monkeypatch.setattr(plan.time, "sleep", waits_s.append)
    check_plan(WorkersConfig(num_workers=1, provision_timeout_s=60))
    assert waits_s == [1.0, 1.0]
