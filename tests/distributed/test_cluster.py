"""What nodes see of each other's files, and errors that come out of the cluster."""

import subprocess
import sys

import pytest
import ray

from as2ray.distributed.cluster import compare_files, file_sizes, ray_session, unwrap_ray_errors
from as2ray.errors import CorpusError, ResourceError


def test_file_that_another_node_does_not_see_is_refused_with_the_node(tmp_path):
    paths = [str(tmp_path / name) for name in ("one", "two", "absent")]
    (tmp_path / "one").write_text("a")
    (tmp_path / "two").write_text("bc")
    here = file_sizes(paths)
    assert here == [1, 2, -1]
    compare_files(paths, here, {"10.0.0.2": here})
    with pytest.raises(
        ResourceError,
        match=r"two \(and 0 more\) is missing.* on node 10\.0\.0\.3(.|\n)*3 n",
    ):
        compare_files(paths, here, {"10.0.0.2": here, "10.0.0.3": [1, 5, -1]})


def test_own_error_comes_out_of_what_wraps_it():
    wrapped, other = RuntimeError("wrapped"), RuntimeError("other")
    wrapped.__cause__ = CorpusError(
        "came; expected x",
    )
    with pytest.raises(CorpusError, match="came"), unwrap_ray_errors():
        raise wrapped
    with pytest.raises(RuntimeError, match="other"), unwrap_ray_errors():
        raise other


def test_cluster_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # tests before may use Ray
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with (
        pytest.raises(ResourceError, match=r"no Ray at nowhere: (.|\n)*RAY_ADDRESS"),
        ray_session(),
    ):
        pass


PROGRAM = """
import signal, time, ray
from as2ray.distributed.cluster import ray_session
from as2ray.experiments.command import exit_with_error

shut_down = ray.shutdown

def report_handler():
    print("ignored" if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else "heard")
    shut_down()

ray.shutdown = report_handler
with exit_with_error(), ray_session():
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


@pytest.mark.slow
def test_sigterm_interrupts_a_session_and_stays_ignored_while_ray_ends_if_the_body_ignores_it():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        shown, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted; run the same command again" in error
    assert "ignored" in shown.splitlines()
