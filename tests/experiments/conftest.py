"""Stages that are complete in a moment, and a server that speaks S3."""

import pytest

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.store import Store


@pytest.fixture
def complete(tmp_path):
    """Runs stages: `complete(stage)` returns the outputs and the folder."""
    store = Store(str(tmp_path / "store"))
    backend = SequentialBackend(store, WorkersConfig(num_workers=0))

    def run(stage):
        graph_run = run_graph([stage], store, backend)
        graph_run.raise_failures({})
        result = graph_run.results[stage]
        return result.outputs, store.fetch(result)

    return run


@pytest.fixture(scope="module")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch, request):
    """URI of a new bucket in a region."""
    import boto3
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(request.node.name))}"
    region = {"LocationConstraint": "eu-central-1"}
    boto3.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration=region)
    yield f"s3://{name}"
    S3FileSystem.clear_instance_cache()
