"""The resource plan: refused before anything starts, with the numbers."""

import pytest

from as2ray.distributed import cluster
from as2ray.distributed.cluster import Workers, check, compare, own_errors, sizes
from as2ray.errors import CorpusError, ResourceError


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(cluster, "nodes", lambda: [{"CPU": 2.0}])


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


@pytest.fixture
def mixed(monkeypatch):
    """Two GPU nodes, and a CPU node that tokenises."""
    found = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 16.0}]
    monkeypatch.setattr(cluster, "nodes", lambda: found)


def test_gpu_workers_fill_gpu_nodes_while_the_cpu_node_tokenises(mixed):
    check(Workers(count=4, cpus=2, gpus=1, data_cpus=16))


def test_workers_that_fit_the_sum_of_nodes_but_no_node_are_refused(mixed):
    with pytest.raises(ResourceError, match=r"2 workers fit on the nodes \(4 CPU \+ 2 GPU"):
        check(Workers(count=4, cpus=3, gpus=1, data_cpus=4))


def test_gpus_are_shared_by_workers_that_score_and_not_by_those_that_train(mixed):
    several = Workers(count=8, cpus=0.5, gpus=0.5, data_cpus=1)
    check(several, sharing=True)
    with pytest.raises(ResourceError, match="NCCL"):
        check(several)
    check(Workers(count=1, cpus=0.5, gpus=0.5, data_cpus=1))


def test_more_than_one_gpu_and_a_part_is_refused(mixed):
    with pytest.raises(ResourceError, match="whole GPUs"):
        check(Workers(count=1, gpus=1.5))


def test_file_that_another_node_does_not_see_is_refused_with_the_node(tmp_path):
    paths = [str(tmp_path / name) for name in ("one", "two", "absent")]
    (tmp_path / "one").write_text("a")
    (tmp_path / "two").write_text("bc")
    here = sizes(paths)
    assert here == [1, 2, -1]
    compare(paths, here, {"10.0.0.2": here})
    with pytest.raises(
        ResourceError, match=r"two \(and 0 more\) is not on node 10\.0\.0\.3(.|\n)*3 n"
    ):
        compare(paths, here, {"10.0.0.2": here, "10.0.0.3": [1, 5, -1]})


def test_own_error_comes_out_of_what_wraps_it():
    wrapped, other = RuntimeError("wrapped"), RuntimeError("other")
    wrapped.__cause__ = CorpusError("came", expected="x", mend="y")
    with pytest.raises(CorpusError, match="came"), own_errors():
        raise wrapped
    with pytest.raises(RuntimeError, match="other"), own_errors():
        raise other


def test_elastic_plan_fits_where_its_least_workers_do(monkeypatch):
    monkeypatch.setattr(cluster, "nodes", lambda: [{"CPU": 1.0}, {"CPU": 2.0}])
    check(Workers(count=4, cpus=2, data_cpus=1, least=1))
    with pytest.raises(ResourceError, match="4 workers"):
        check(Workers(count=4, cpus=2, data_cpus=1))
    with pytest.raises(ResourceError, match="5 workers at least, of 4"):
        check(Workers(count=4, cpus=2, data_cpus=1, least=5))


def test_elastic_plan_that_could_take_data_s_cpus_is_refused(two_cpus):
    # One worker fits and leaves a CPU; Train, looking for room again, would take both.
    with pytest.raises(ResourceError, match="could leave 0 CPU for data"):
        check(Workers(count=2, data_cpus=1, least=1))
