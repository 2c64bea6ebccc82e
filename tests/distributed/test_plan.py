"""The resource plan: refused before anything starts, with the numbers."""

import pytest
from pydantic import ValidationError

from as2ray.distributed import plan
from as2ray.distributed.plan import check_plan
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(plan, "node_resources", lambda: [{"CPU": 2.0}])


def test_plan_that_fits_passes(two_cpus):
    check_plan(WorkersConfig(num_workers=2, cpus_per_worker=0.5, num_data_cpus=1))


def test_plan_with_more_workers_than_the_cluster_has_is_refused_with_numbers(two_cpus):
    with pytest.raises(ResourceError, match=r"needs 5 CPU.*4 workers x 1 CPU.*has 2 CPU"):
        check_plan(WorkersConfig(num_workers=4))


def test_plan_that_leaves_no_cpu_for_data_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="for data"):
        check_plan(WorkersConfig(num_workers=2, num_data_cpus=1))
    with pytest.raises(ValidationError, match=r"num_data_cpus(.|\n)*greater than 0"):
        WorkersConfig(num_workers=1, num_data_cpus=0)


def test_plan_with_gpus_on_a_cluster_without_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="1 GPU"):
        check_plan(WorkersConfig(num_workers=1, gpus_per_worker=1))


@pytest.fixture
def mixed(monkeypatch):
    """Two GPU nodes, and a CPU node that tokenises."""
    found = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 16.0}]
    monkeypatch.setattr(plan, "node_resources", lambda: found)


def test_gpu_workers_fill_gpu_nodes_while_the_cpu_node_tokenises(mixed):
    check_plan(WorkersConfig(num_workers=4, cpus_per_worker=2, gpus_per_worker=1, num_data_cpus=16))


def test_runs_side_by_side_are_as_many_as_have_room_for_workers_and_data(two_cpus):
    assert (
        plan.max_concurrent_runs(
            WorkersConfig(num_workers=1, cpus_per_worker=0.5, num_data_cpus=0.5)
        )
        == 2
    )
    assert plan.max_concurrent_runs(WorkersConfig(num_workers=1)) == 1


def test_runs_side_by_side_are_as_many_as_have_gpus(mixed):
    assert plan.max_concurrent_runs(WorkersConfig(num_workers=1, gpus_per_worker=1)) == 4
    assert (
        plan.max_concurrent_runs(WorkersConfig(num_workers=2, gpus_per_worker=1, num_data_cpus=9))
        == 2
    )


def test_workers_that_fit_the_sum_of_nodes_but_no_node_are_refused(mixed):
    with pytest.raises(ResourceError, match=r"2 workers fit on the nodes \(4 CPU \+ 2 GPU"):
        check_plan(
            WorkersConfig(num_workers=4, cpus_per_worker=3, gpus_per_worker=1, num_data_cpus=4)
        )


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


def test_more_than_one_gpu_and_a_part_is_refused(mixed):
    with pytest.raises(ValidationError, match="whole number of GPUs"):
        WorkersConfig(num_workers=1, gpus_per_worker=1.5)


def test_elastic_plan_fits_where_its_least_workers_do(monkeypatch):
    monkeypatch.setattr(plan, "node_resources", lambda: [{"CPU": 1.0}, {"CPU": 2.0}])
    check_plan(WorkersConfig(num_workers=4, cpus_per_worker=2, num_data_cpus=1, min_workers=1))
    with pytest.raises(ResourceError, match="4 workers"):
        check_plan(WorkersConfig(num_workers=4, cpus_per_worker=2, num_data_cpus=1))
    with pytest.raises(ValidationError, match="min_workers=5 is more than num_workers=4"):
        WorkersConfig(num_workers=4, cpus_per_worker=2, num_data_cpus=1, min_workers=5)


def test_elastic_plan_that_could_take_data_s_cpus_is_refused(two_cpus):
    # One worker fits and leaves a CPU; Train, looking for room again, would take both.
    with pytest.raises(ResourceError, match="could leave 0 CPU for data"):
        check_plan(WorkersConfig(num_workers=2, num_data_cpus=1, min_workers=1))


def test_plan_waits_for_nodes_that_the_autoscaler_was_asked_for(monkeypatch):
    looks = iter([[{"CPU": 1.0}], [{"CPU": 1.0}], [{"CPU": 1.0}, {"CPU": 4.0, "GPU": 2.0}]])
    asked = []
    monkeypatch.setattr(plan, "node_resources", lambda: next(looks))
    monkeypatch.setattr(plan, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(plan, "request_resources", lambda bundles: asked.append(bundles))
    check_plan(
        WorkersConfig(num_workers=2, gpus_per_worker=1, num_data_cpus=2, provision_timeout_s=60)
    )
    assert asked == [[{"CPU": 1.0, "GPU": 1}] * 2 + [{"CPU": 1.0}] * 2]


def test_plan_that_never_fits_is_refused_when_the_wait_is_over(two_cpus, monkeypatch):
    monkeypatch.setattr(plan, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(plan, "request_resources", lambda bundles: None)
    with pytest.raises(ResourceError, match="has 2 CPU"):
        check_plan(WorkersConfig(num_workers=4, provision_timeout_s=0.05))
