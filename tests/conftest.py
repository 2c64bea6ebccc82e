"""Fixtures for all tests: tiny checkpoints and corpora, made once per session (see `tiny`)."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of a library that asks a hub
# On busy cores a thread that waits for the others of a product would take their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray Train's controller polls the reports of its workers, by default every two seconds.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
# Ray Serve gives up a deployment whose replicas fail to start; by default each starts three times.
os.environ["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"] = "1"
# No test needs these two processes of Ray: usage reports and the watcher for preempted nodes.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
# A worker process that starts slowly on a busy machine is waited for; by default Ray kills it after
# a minute and starts another one, which is as slow.
os.environ["RAY_worker_register_timeout_seconds"] = "900"  # noqa: SIM112 - as Ray spells it
# A worker process that is idle for a second is ended, so that every epoch of a small run, and every
# table, would start another one; and each driver starts as many as there are CPUs, which tasks with
# an environment of their own never use.
os.environ["RAY_idle_worker_killing_time_threshold_ms"] = "120000"  # noqa: SIM112
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import durations
import pyarrow as pa
import pytest
import tiny
from hypothesis import Phase, settings
from patience import start_patiently
from scheduling import ClusterScheduling, starts_ray

from as2ray.checkpoints.gc_pause import gc_paused
from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows

if TYPE_CHECKING:
    import transformers

Checkpoint = Callable[..., Path]
MakeTable = Callable[..., pa.Table]

LONGEST_FILES = (
    "test_watched_search",
    "test_nodes_without_shared_disk",
    "test_benchmarks",
    "test_faults",
    "test_ray_benchmarks",
    "test_autoscaling",
    "test_experiments",
)
"""Files of tests that take longest, of which none uses this process' own Ray."""

# On a busy machine an example of hypothesis can exceed its deadline without a defect.
settings.register_profile("as2ray", deadline=None)
settings.load_profile("as2ray")
# A mutant is killed by the first example that fails, however large, and by the same in each run.
phases = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", deadline=None, derandomize=True, phases=phases)


def pytest_addoption(parser):
    """Adds `--at-most SECONDS`."""
    text = "skip tests that took longer when they ran last, also those of long fixtures"
    parser.addoption("--at-most", type=float, metavar="SECONDS", help=text)


def pytest_configure(config):
    """Notes the seconds that tests take, in the process that hears of all of them."""
    config.pluginmanager.register(durations)
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Durations(config.cache))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempts all objects of the collection from garbage collection."""
    with gc_paused():
        result = yield
        gc.freeze()
    return result


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Limits the number of clusters of Ray that live at a time."""
    return ClusterScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config, items):
    """Runs the longest files first, then folders with slow tests, so that processes end together.

    Tests that connect to a cluster come before those that start this process' own Ray.
    """
    if (limit := config.getoption("at_most")) is not None:
        seconds = config.cache.get(durations.DURATIONS, {})
        is_long = partial(durations.is_long, seconds=seconds, limit_s=limit)
        long = [item for item in items if is_long(item.nodeid, item.fixturenames)]
        config.hook.pytest_deselected(items=long)
        kept = set(items).difference(long)
        items[:] = [item for item in items if item in kept]
    for item in items:
        if {"ray_local", "cluster"} & set(item.fixturenames) and not starts_ray(item.path):
            raise pytest.UsageError(f"{item.path} starts Ray; add it to tests/scheduling.py")
    slow_folders = {item.path.parent for item in items if item.get_closest_marker("slow")}
    rank = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(
        key=lambda item: (
            rank.get(item.path.stem, len(rank)),
            item.path.parent.name != "cluster",
            item.path.parent not in slow_folders,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    """Limits torch to one thread, which is faster for tiny matrices, and hides progress bars."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _on_cpu():
    """Hides GPUs from tests and the processes that they start, but not from `test_gpu`.

    A ranker takes a GPU by default, and tests compare its scores with tensors of a CPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # of other processes; this one may have read it
        patch.setattr("torch.cuda.is_available", lambda: False)
        yield


@pytest.fixture(params=[name for name in tiny.FAMILIES if name not in tiny.DECODERS])
def family(request) -> str:
    """Name of each supported family of encoders in turn."""
    return request.param


@pytest.fixture(scope="session")
def published() -> Callable[[str], "transformers.PreTrainedTokenizerBase"]:
    """Returns the tokenizer of a family, as in transformers: `published(family)`."""
    return cache(tiny.published_tokenizer)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, published) -> Checkpoint:
    """Writes a checkpoint with transformers: `checkpoint(family, labels, **config)`."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(family: str = "bert", labels: int | None = 2, **changes: object) -> Path:
        name = "-".join(map(str, [family, labels, *changes.values()]))
        return tiny.write_checkpoint(root / name, family, published(family), labels, **changes)

    return make


@pytest.fixture(scope="session")
def sentence_encoder(tmp_path_factory, checkpoint, published) -> str:
    """Folder of a tiny sentence encoder."""
    from transformers import AutoModel

    from as2ray.checkpoints.sentence_encoder import save_sentence_encoder
    from as2ray.models.sentence_encoder import EmbeddingSettings, SentenceEncoder

    network = AutoModel.from_pretrained(checkpoint("bert", None), add_pooling_layer=False)
    encoder = SentenceEncoder("tiny", network, published("bert"), EmbeddingSettings(24))
    return str(save_sentence_encoder(encoder, tmp_path_factory.mktemp("encoder") / "e"))


@pytest.fixture(scope="session")
def seq2seq(tmp_path_factory) -> Path:
    """A tiny sequence-to-sequence model that generates questions."""
    return tiny.write_seq2seq(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Folder of Parquet files with 400 pairs that a tiny network can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    return tiny.write_corpus(folder, tiny.candidates(80), files=2, row_group=150)


@pytest.fixture(scope="session")  # a function-scoped fixture cannot be used with hypothesis
def make_table() -> MakeTable:
    """Makes a small candidates table from the labels of each question: `make_table([[0, 1]])`."""
    return _make_table


def _make_table(labels: Sequence[Sequence[int]], grades: Sequence[Sequence[int]] = ()) -> pa.Table:
    rows = [
        (f"q{q}", f"question {q}", f"q{q}-{c}", f"candidate {c}", label)
        for q, question_labels in enumerate(labels)
        for c, label in enumerate(question_labels)
    ]
    table = from_rows(rows, CANDIDATE_SCHEMA)
    if grades:
        table = table.append_column("grade", pa.array([g for gs in grades for g in gs], pa.int8()))
    return table


@pytest.fixture(scope="session")
def _forked_workers():
    """Forks the workers of clusters that this process starts, which saves their imports."""
    from forked_workers import forked_workers

    with forked_workers() as folder:
        yield folder


@pytest.fixture(scope="module")
def forked_workers_elsewhere(_forked_workers):
    """Forks the workers of clusters that are started by processes of a module's tests, too."""
    from forked_workers import with_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", with_folder(_forked_workers))
        yield


@pytest.fixture(scope="session")
def ray_local(_forked_workers):
    """Starts one small local Ray per test process."""
    import ray

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            logging_level="ERROR",
        )

    if not ray.is_initialized():
        start_patiently(start)
    yield
    ray.shutdown()


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
