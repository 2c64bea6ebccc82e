"""The store on a disk and on an object store: results, leases, resuming, pruning."""

import errno
import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, StaleStageError
from as2ray.experiments import store as store_module
from as2ray.experiments.executor import SequentialBackend, execute, run_graph
from as2ray.experiments.experiment import Experiment, run_experiment
from as2ray.experiments.stage import Result, Stage
from as2ray.experiments.store import LEASE, MANIFEST, Store

WORKERS = WorkersConfig()
DIGEST = "0123456789abcdef"
LOG = "RUN_LOG"
"""Environment variable with the path of a file that gets a line for each run of a stage."""


@dataclass(frozen=True, eq=False)
class WriteText(Stage):
    """Writes its text after that of its source; fails or waits at its first attempt on demand."""

    text: str
    source: Stage | None = None
    first_attempt: str = ""

    def run(self, context):
        context.store.restore(context.scratch)
        is_first = not context.scratch.exists()
        context.scratch.mkdir(exist_ok=True)
        (context.scratch / "attempt").touch()
        context.store.publish(context.scratch)
        with Path(os.environ[LOG]).open("a") as file:
            file.write(f"{self.text}\n")
        if is_first and self.first_attempt == "fail":
            raise OSError("disk full")
        if is_first and self.first_attempt == "wait":
            time.sleep(60)
        time.sleep(float(os.environ.get("RUN_S", "0")))
        source = (context.path(self.source) / "a/text").read_text() if self.source else ""
        (context.output / "a").mkdir(exist_ok=True)
        (context.output / "a/text").write_text(source + self.text)
        return {"resumed": not is_first}


@dataclass(frozen=True, eq=False)
class WriteNothing(Stage):
    """Has no files."""

    def run(self, context):
        return None


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Returns the texts of all stages that ran, in order."""
    path = tmp_path / "runs"
    monkeypatch.setenv(LOG, str(path))
    return lambda: path.read_text().split()


@pytest.fixture(params=["disk", "s3"])
def uri(request, tmp_path):
    """A store on each kind of storage in turn."""
    if request.param == "disk":
        return f"file://{tmp_path}/store"
    return f"{request.getfixturevalue('bucket')}/top/store"


@pytest.fixture(autouse=True)
def _settle_quickly(monkeypatch):
    monkeypatch.setattr(store_module, "SETTLE_S", 0.1)


@pytest.fixture
def quick_leases(monkeypatch):
    monkeypatch.setattr(store_module, "RENEWAL_S", 0.05)


def run_stages(store, *stages):
    return run_graph(list(stages), store, SequentialBackend(store, WORKERS))


def write_lease(store, owner, age_s=0.0, namespace="other"):
    path = store.work_folder("Kind", DIGEST) / LEASE
    path.parent.mkdir(parents=True, exist_ok=True)
    lease = {"owner": owner, "pid_namespace": namespace, "time": time.time() - age_s}
    path.write_text(json.dumps(lease))
    return path


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("uri", ["file://{}/store", "file:{}/store", "{}/store/", "store"])
def test_folder_or_file_uri_is_an_absolute_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(uri.format(tmp_path))
    assert store.is_local
    assert store.work_folder("Kind", DIGEST) == tmp_path / f"store/Kind/{DIGEST}"


@pytest.mark.parametrize("uri", ["http://host/x", "hdfs://host/x", "s4:/x", "simplecache::s3://b"])
def test_unknown_scheme_is_refused(uri):
    with pytest.raises(ConfigError, match=r"unknown scheme of a store.*'gs', 's3'"):
        Store(uri)


def test_file_as_a_store_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store=.*file is a file\n.*name a folder"):
        Store(str(tmp_path / "file"))


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="the driver is installed")
def test_missing_driver_is_told_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match=r"needs the package gcsfs\n.*pip install gcsfs"):
        Store("gs://bucket/store")


def test_manifest_of_another_version_is_refused(tmp_path, runs):
    store, stage = Store(str(tmp_path)), WriteText("a")
    result = run_stages(store, stage).results[stage]
    path = store.fetch(result) / MANIFEST
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(StaleStageError, match="format_version 2; this version of as2ray reads 3"):
        run_stages(store, stage)


def test_failed_stage_spares_others_and_resumes_from_its_scratch(uri, tmp_path, runs):
    store = Store(uri, cache=str(tmp_path / "node-1"))
    failing, other = WriteText("a", first_attempt="fail"), WriteText("b")
    user = WriteText("c", failing)
    run = run_stages(store, user, other)
    assert run.failures.keys() == {failing}
    assert run.skipped == [user]
    assert run.results.keys() == {other}
    store = Store(uri, cache=str(tmp_path / "node-2"))
    run = run_stages(store, user, other)
    assert run.results[failing].outputs == {"resumed": True}
    folder = store.fetch(run.results[user])
    assert (folder / "a/text").read_text() == "ac"
    assert not (folder / "scratch").exists()
    assert runs() == ["a", "b", "a", "c"]


def test_graph_that_one_node_ran_is_fetched_by_another(uri, tmp_path, runs):
    stages = [WriteText("c", WriteText("b", WriteText("a"))), WriteNothing()]
    store = Store(uri, cache=str(tmp_path / "node-1"))
    results = run_stages(store, *stages).results
    assert pickle.loads(pickle.dumps(store)).find_all(results).items() == results.items()
    store = Store(uri, cache=str(tmp_path / "node-2"))
    again = run_stages(store, *stages).results
    assert runs() == ["a", "b", "c"]
    assert again == results
    for result in again.values():
        folder = store.fetch(result)
        assert (folder / MANIFEST).is_file()
        assert not (folder / LEASE).exists()
    assert (store.fetch(again[stages[0]]) / "a/text").read_text() == "abc"
    manifest = store.manifest("WriteText", again[stages[0]].digest)
    inputs = [stages[0].source.source, stages[0].source]
    assert manifest["built_on"] == [f"WriteText/{again[stage].digest}" for stage in inputs]


def test_stages_behind_one_that_is_missing_are_not_found(uri, tmp_path, runs):
    store = Store(uri, cache=str(tmp_path / "node"))
    first = WriteText("a")
    second = WriteText("b", first)
    third = WriteText("c", second)
    results = run_stages(store, third).results
    store.remove("WriteText", results[second].digest)
    assert store.find_all([first, second, third]) == {first: results[first]}


def test_object_store_keeps_no_scratch_and_a_fetch_only_the_files_of_the_manifest(
    bucket, tmp_path, runs
):
    store = Store(bucket, cache=str(tmp_path / "node-1"))
    result = execute(WriteText("a"), {}, store, WORKERS)
    remote = f"WriteText/{result.digest}"
    store._files.pipe_file(f"{remote}/left-by-an-interrupted-upload", b"x")
    names = {path.rpartition("/")[2] for path in store._files.find(remote)}
    assert names == {"text", MANIFEST, "left-by-an-interrupted-upload"}
    folder = Store(bucket, cache=str(tmp_path / "node-2")).fetch(result)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names == {"text", MANIFEST}


def test_fetch_replaces_what_an_interrupted_attempt_left_in_the_cache(bucket, tmp_path, runs):
    result = execute(WriteText("a"), {}, Store(bucket, cache=str(tmp_path / "node-1")), WORKERS)
    store = Store(bucket, cache=str(tmp_path / "node-2"))
    folder = store.work_folder(result.kind, result.digest)
    folder.mkdir(parents=True)
    (folder / "half").touch()
    store.fetch(result)
    assert (folder / "a/text").read_text() == "a"
    assert not (folder / "half").exists()


def test_paths_of_stages_are_fetched_to_a_node_that_does_not_have_them(bucket, tmp_path, runs):
    result = execute(WriteText("a"), {}, Store(bucket, cache=str(tmp_path / "node-1")), WORKERS)
    store = Store(bucket, cache=str(tmp_path / "node-2"))
    folder = store.work_folder(result.kind, result.digest)
    store.fetch_paths([folder / "a/text", tmp_path / "elsewhere"])
    assert (folder / "a/text").read_text() == "a"
    (folder / "a/text").write_text("it is here already")
    store.fetch_paths([str(folder / "a/text")])
    assert (folder / "a/text").read_text() == "it is here already"
    unfinished = store.work_folder("WriteText", "running")
    unfinished.mkdir()
    (unfinished / "half").write_text("half")
    store.publish(unfinished)
    other = Store(bucket, cache=str(tmp_path / "node-3"))
    path = other.work_folder("WriteText", "running")
    other.fetch_paths([path])
    assert (path / "half").read_text() == "half"


def test_stage_that_was_removed_from_an_object_store_runs_again(bucket, tmp_path, runs):
    store, other = (Store(bucket, cache=str(tmp_path / name)) for name in ("node-1", "node-2"))
    stage = WriteText("a")
    digest = execute(stage, {}, store, WORKERS).digest
    store.remove("WriteText", digest)
    with pytest.raises(StaleStageError, match="was removed"):
        other.fetch(Result("WriteText", digest, {}))
    execute(stage, {}, store, WORKERS)
    assert runs() == ["a", "a"]
    assert (other.fetch(Result("WriteText", digest, {})) / "a/text").read_text() == "a"


def test_bucket_that_does_not_exist_is_told_before_a_stage_runs(bucket, tmp_path, runs):
    store = Store(f"{bucket}-other/store", cache=str(tmp_path))
    with pytest.raises(ConfigError, match=r"store s3://.*bucket does not exist"):
        execute(WriteText("a"), {}, store, WORKERS)
    assert not Path(os.environ[LOG]).exists()


def test_missing_credentials_are_told(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"store s3://.*[Cc]redentials"):
        Store(bucket).manifest("Kind", DIGEST)


def test_storage_of_ray_lies_in_the_store(uri, tmp_path):
    store = Store(uri, cache=str(tmp_path / "node"))
    store.work_folder("Kind", DIGEST).mkdir(parents=True)
    path, filesystem = store.train_storage(store.work_folder("Kind", DIGEST) / "scratch")
    if filesystem is None:
        assert path == str(tmp_path / f"store/Kind/{DIGEST}/scratch")
        return
    filesystem.create_dir(f"{path}/run")
    with filesystem.open_output_stream(f"{path}/run/checkpoint") as file:
        file.write(b"state")
    store.restore(store.work_folder("Kind", DIGEST) / "scratch/run")
    assert (store.work_folder("Kind", DIGEST) / "scratch/run/checkpoint").read_bytes() == b"state"
    store.commit("Kind", DIGEST, {"outputs": {}})
    assert [s.num_bytes for s in store.stored_stages()] == [len(_manifest_bytes(store))]


def _manifest_bytes(store):
    return (store.work_folder("Kind", DIGEST) / MANIFEST).read_bytes()


def _run_in_process(uri, cache, queue, environment):
    os.environ.update(environment, RUN_S="0.5")
    stage = WriteText("a")
    queue.put(execute(stage, {}, Store(uri, cache), WORKERS).outputs)


@pytest.mark.slow
def test_stage_that_three_processes_want_runs_once(uri, tmp_path, runs):
    # Three forks of a process that has imported all of this, and whose environment may be older.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    queue = context.Queue()
    nodes = [(uri, str(tmp_path / f"node-{n}"), queue, dict(os.environ)) for n in range(3)]
    processes = [context.Process(target=_run_in_process, args=node) for node in nodes]
    for process in processes:
        process.start()
    outputs = [queue.get(timeout=900) for _ in processes]
    for process in processes:
        process.join()
    assert outputs == [{"resumed": False}] * 3
    assert runs() == ["a"]


@pytest.mark.slow
def test_stage_of_a_killed_process_is_taken_over_at_once_and_resumes(uri, tmp_path, runs):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_store import Store, WORKERS, WriteText, execute\n"
        "stage = WriteText('a', first_attempt='wait')\n"
        "execute(stage, {}, Store(sys.argv[2], sys.argv[3]), WORKERS)"
    )
    folder = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", code, folder, uri, str(tmp_path / "node-1")]
    process = subprocess.Popen(arguments)
    while not Path(os.environ[LOG]).exists():
        time.sleep(0.1)
        assert process.poll() is None
    process.kill()
    process.wait()
    started_at = time.monotonic()
    stage = WriteText("a", first_attempt="wait")
    result = execute(stage, {}, Store(uri, str(tmp_path / "node-2")), WORKERS)
    assert result.outputs == {"resumed": True}
    assert time.monotonic() - started_at < store_module.LEASE_TIMEOUT_S / 2


def test_stage_that_threads_want_runs_once(uri, tmp_path, runs, monkeypatch):
    monkeypatch.setattr(store_module, "SETTLE_S", 1.0)
    monkeypatch.setenv("RUN_S", "0.3")
    stage, outputs = WriteText("a"), []

    def run(number):
        store = Store(uri, cache=str(tmp_path / f"node-{number}"))
        outputs.append(execute(stage, {}, store, WORKERS).outputs)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [{"resumed": False}] * 3
    assert runs() == ["a"]


def test_stale_lease_that_threads_take_over_is_held_by_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SETTLE_S", 0.5)
    write_lease(Store(str(tmp_path)), "other:1:id", age_s=61)
    num_holders, counts = [], []

    def hold():
        with Store(str(tmp_path)).lease("Kind", DIGEST):
            num_holders.append(1)
            time.sleep(0.3)
            counts.append(len(num_holders))
            num_holders.pop()

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("host", "pid", "namespace", "age_s", "is_stale"),
    [
        ("other", 1, "", 0, False),
        ("other", 1, "", 61, True),
        ("this", "dead", "this", 0, True),
        ("this", "dead", "other", 0, False),
        ("this", "dead", "other", 61, True),
        ("this", 1, "this", 0, False),
        ("this", 1, "this", 61, True),
    ],
)
def test_lease_is_taken_over_if_it_is_old_or_its_process_of_this_host_is_gone(
    host, pid, namespace, age_s, is_stale, tmp_path, quick_leases, caplog
):
    store = Store(str(tmp_path))
    namespace = store_module._pid_namespace() if namespace == "this" else namespace
    host = socket.gethostname() if host == "this" else host
    owner = f"{host}:{dead_pid() if pid == 'dead' else pid}:id"
    path = write_lease(store, owner, age_s, namespace)
    remover = threading.Timer(1.0, path.unlink, kwargs={"missing_ok": True})
    if not is_stale:
        remover.start()
    with store.lease("Kind", DIGEST) as is_held:
        assert is_held()
        assert remover.finished.is_set() != is_stale
        assert json.loads(path.read_text())["pid_namespace"] == store_module._pid_namespace()
    assert not path.exists()
    waits = [record.getMessage() for record in caplog.records]
    message = f"waiting for {owner.removesuffix(':id')} to finish Kind {DIGEST}"
    assert waits == ([] if is_stale else [message])


def test_lease_of_a_process_that_was_killed_before_it_wrote_is_taken_over(
    tmp_path, quick_leases, monkeypatch
):
    monkeypatch.setattr(store_module, "LEASE_TIMEOUT_S", 1.0)
    path = write_lease(store := Store(str(tmp_path)), "x:1:id")
    path.write_bytes(b"")
    started_at = time.monotonic()
    with store.lease("Kind", DIGEST) as is_held:
        assert is_held()
    assert time.monotonic() - started_at >= 0.5


def test_lease_is_renewed_while_it_is_held(uri, tmp_path, quick_leases):
    store = Store(uri, cache=str(tmp_path / "node"))
    with store.lease("Kind", DIGEST):
        first = store._read_lease(f"Kind/{DIGEST}/lease.json")
        deadline = time.monotonic() + 10
        while store._read_lease(f"Kind/{DIGEST}/lease.json")["time"] == first["time"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert store._read_lease(f"Kind/{DIGEST}/lease.json") == {}


def test_lost_lease_is_neither_renewed_nor_deleted(tmp_path, quick_leases, caplog):
    store = Store(str(tmp_path))
    with store.lease("Kind", DIGEST) as is_held:
        time.sleep(0.1)
        # A renewal that has read the lease may overwrite it once, as a process that takes a
        # lease over would see after a second.
        while is_held():
            path = write_lease(store, "other:1:id")
            time.sleep(0.2)
    assert json.loads(path.read_text())["owner"] == "other:1:id"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"lost the lease of Kind {DIGEST}"]


def test_stage_that_lost_its_lease_waits_for_the_result_of_the_other_process(
    tmp_path, runs, quick_leases, monkeypatch
):
    store, stage = Store(str(tmp_path / "store")), WriteText("a")
    monkeypatch.setenv("RUN_S", "0.5")
    folder = store.work_folder("WriteText", stage.digest({}))

    def take_over():
        while not (folder / "scratch/attempt").exists():
            time.sleep(0.02)
        lease = {"owner": "other:1:id", "pid_namespace": "", "time": time.time()}
        (folder / LEASE).write_text(json.dumps(lease))
        time.sleep(1.0)
        store.commit("WriteText", stage.digest({}), {"outputs": {"by": "other"}})
        (folder / LEASE).unlink()

    other = threading.Thread(target=take_over)
    other.start()
    assert execute(stage, {}, store, WORKERS).outputs == {"by": "other"}
    other.join()
    assert runs() == ["a"]


def _link(output, **results):
    output.mkdir()
    links = {n: {"kind": r.kind, "digest": r.digest, "inputs": {}} for n, r in results.items()}
    (output / "stages.json").write_text(json.dumps(links))
    return output


def test_prune_keeps_linked_stages_and_what_they_are_built_on(uri, tmp_path, runs):
    store = Store(uri, cache=str(tmp_path / "node"))
    first, failing = WriteText("a"), WriteText("d", first_attempt="fail")
    kept, other = WriteText("b", first), WriteText("c", first)
    results = run_stages(store, kept, other, failing, empty := WriteNothing()).results
    output = _link(tmp_path / "output", kept=results[kept])
    stages = {stage.digest: stage for stage in store.stored_stages()}
    unlinked = {results[other].digest, results[empty].digest, failing.digest({})}
    assert {digest for digest, stage in stages.items() if not stage.is_complete} == {
        failing.digest({})
    }
    assert {stage.digest for stage in store.prune([output], dry_run=True)} == unlinked
    assert len(store.stored_stages()) == 5
    removed = store.prune([output])
    assert {stage.digest for stage in removed} == unlinked
    assert all(
        stages[stage.digest] == stage and stage.num_bytes > 0
        for stage in removed
        if stage.is_complete
    )
    assert {s.digest for s in store.stored_stages()} == {
        results[first].digest,
        results[kept].digest,
    }
    assert store.find_all([first, kept, other]).keys() == {first, kept}


def test_prune_keeps_what_an_interrupted_run_and_its_evaluations_need(tmp_path, runs):
    store = Store(str(tmp_path / "store"))
    named, failing = WriteText("a"), WriteText("d", first_attempt="fail")
    experiment, output = Experiment(), tmp_path / "output"
    experiment.add("texts/a", named)
    experiment.compare("test", "system", 0, WriteText("b", named))
    experiment.add("texts/d", failing)
    backend = SequentialBackend(store, WORKERS)
    with pytest.raises(OSError, match="disk full"):
        run_experiment(experiment, output, store, backend, lambda _: None)
    (output / "stages.json").unlink()  # as if the run had been killed before it wrote it
    run_stages(store, WriteText("c"))
    assert {stage.digest for stage in store.prune([output])} == {WriteText("c").digest({})}
    assert {stage.is_complete for stage in store.stored_stages()} == {True, False}


def test_prune_of_an_output_without_links_is_refused(tmp_path, runs):
    store = Store(str(tmp_path / "store"))
    run_stages(store, WriteText("a"))
    with pytest.raises(ConfigError, match=r"is no output: it has no stages\.json"):
        store.prune([tmp_path / "output"])
    assert len(store.stored_stages()) == 1


def test_folders_that_are_no_stages_are_neither_listed_nor_removed(uri, tmp_path, runs):
    store = Store(uri, cache=str(tmp_path / "node"))
    store._write("project/source/main.py", b"x")
    with pytest.raises(ConfigError, match="has no stages"):
        store.prune([])
    run_stages(store, WriteText("a"))
    assert [stage.kind for stage in store.prune([])] == ["WriteText"]
    assert store._files.exists("project/source/main.py")


def test_prune_of_a_store_that_cannot_be_written_names_the_store(tmp_path, runs, monkeypatch):
    store = Store(str(tmp_path))
    run_stages(store, WriteText("a"))

    def refuse(self, name):
        raise OSError(errno.EROFS, "Read-only file system", name)

    monkeypatch.setattr(Store, "_delete", refuse)
    with pytest.raises(ConfigError, match=rf"cannot remove WriteText/\w+ from {tmp_path}: .*Read"):
        store.prune([])


def test_prune_while_a_stage_is_running_is_refused(tmp_path, runs):
    store = Store(str(tmp_path / "store"))
    run_stages(store, WriteText("a"))
    with (
        store.lease("Kind", DIGEST),
        pytest.raises(ConfigError, match=rf"{os.getpid()} is running Kind/{DIGEST}"),
    ):
        store.prune([])
    write_lease(store, f"{socket.gethostname()}:1:id", age_s=61)
    assert [stage.kind for stage in store.prune([])] == ["Kind", "WriteText"]
    with pytest.raises(ConfigError, match="has no stages"):
        store.stored_stages()
