"""What nodes see of each other's files, and errors that come out of the cluster."""

import signal
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


def test_sigterm_interrupts_a_session_as_ctrl_c_does(monkeypatch):
    def init(**_):  # Its handler kills Ray's processes.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
