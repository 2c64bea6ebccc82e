"""A server that speaks S3, for tests of object stores."""

import pytest


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
