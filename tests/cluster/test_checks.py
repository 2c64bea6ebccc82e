"""What is looked at, and placed, on the nodes of a cluster before a run starts."""

from dataclasses import replace

import pytest
import ray

from as2ray.distributed.cluster import check_shared
from as2ray.distributed.plan import check_plan, node_resources
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ResourceError

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def connected(cluster):
    """This process is a driver of the cluster."""
    ray.init(cluster.address, logging_level="ERROR")
    yield
    ray.shutdown()


def test_shared_folder_is_checked_on_the_nodes_that_live(cluster, connected, tmp_path):
    lost = cluster.add_node(num_cpus=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("x")
    paths = [tmp_path / "model", "org/model-of-a-hub"]
    check_shared(paths, tmp_path)
    cluster.remove_node(lost, allow_graceful=False)
    assert lost.node_id in [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # for a while
    check_shared(paths, tmp_path)


def test_actors_of_ray_and_plan_keep_to_nodes_with_the_labels(cluster, connected):
    safe = cluster.add_node(num_cpus=3, labels={"ray.io/market-type": "on-demand"})
    labels = {"ray.io/market-type": "on-demand"}
    check_plan(WorkersConfig(driver_label_selector=labels))
    for name, namespace in [
        ("AutoscalingCoordinator", "AutoscalingCoordinator"),
        ("datasets_stats_actor", "_dataset_stats_actor"),
    ]:
        actor = ray.get_actor(name, namespace)
        node = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        assert ray.get(node) == safe.node_id
    assert [node["CPU"] for node in node_resources(labels)] == [3]
    two = WorkersConfig(
        num_workers=2, num_data_cpus=2, label_selector=labels, provision_timeout_s=1
    )
    with pytest.raises(ResourceError, match=r"has 3 CPU.* 1 workers fit on its nodes \(1 x 3 CPU"):
        check_plan(two)
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def test_nodes_for_data_must_have_room_for_it_and_none_for_a_worker(cluster, connected):
    cluster.add_node(num_cpus=2, labels={"pool": "cpu"})
    workers = WorkersConfig(num_data_cpus=2, data_label_selector={"pool": "cpu"})
    with pytest.raises(ResourceError, match="a worker fits on a node with the labels"):
        check_plan(workers)
    cluster.add_node(num_cpus=1, labels={"pool": "train"})
    check_plan(replace(workers, label_selector={"pool": "train"}))
    with pytest.raises(ResourceError, match="needs 1 x 3 CPU for data, and 0 fit on the 1 nodes"):
        check_plan(replace(workers, label_selector={"pool": "train"}, num_data_cpus=3))
