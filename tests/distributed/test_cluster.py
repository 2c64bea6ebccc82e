"""The resource plan: refused before anything starts, with the numbers."""

import pytest

from as2ray.distributed import cluster
from as2ray.distributed.cluster import Workers, check
from as2ray.errors import ResourceError


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 2.0})


def test_plan_that_fits_passes(two_cpus):
    check(Workers(count=2, cpus=0.5, data_cpus=1))


def test_plan_with_more_workers_than_the_cluster_has_is_refused_with_numbers(two_cpus):
    with pytest.raises(ResourceError, match=r"4 workers x 1 CPU.*5 CPU(.|\n)*at most 2 CPU"):
        check(Workers(count=4))


def test_plan_that_leaves_no_cpu_for_data_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="for data"):
        check(Workers(count=2, data_cpus=1))
    with pytest.raises(ResourceError, match="more than 0 CPU for data"):
        check(Workers(count=1, data_cpus=0))


def test_plan_with_gpus_on_a_cluster_without_is_refused(two_cpus):
    with pytest.raises(ResourceError, match="1 GPU"):
        check(Workers(count=1, gpus=1))
