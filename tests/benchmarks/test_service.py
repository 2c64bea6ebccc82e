"""Services of the serving benchmark, as processes."""

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import service

pytestmark = pytest.mark.slow


@pytest.fixture
def working(monkeypatch):
    """A service that works, by a child of its own, for two seconds of a core and then rests."""
    monkeypatch.setattr(service, "IDLE_CORE_SHARE", 0.05)  # of a busy machine it may get little
    code = "import time\nwhile time.process_time() < 2: pass"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", f"{parent}; time.sleep(60)"])
    yield service.ServiceProcess("http://127.0.0.1:9/rerank", process.pid)
    process.kill()
    process.wait()


def test_service_that_still_works_is_waited_for(working, monkeypatch):
    monkeypatch.setattr(service, "POLL_INTERVAL_S", 0.5)
    process = psutil.Process(working.pid)
    while not process.children():
        time.sleep(0.05)
    service.wait_until_idle(working)
    assert not process.children()


def test_service_that_never_rests_ends_the_benchmark(working, monkeypatch):
    monkeypatch.setattr(service, "POLL_INTERVAL_S", 0.2)
    monkeypatch.setattr(service, "IDLE_TIMEOUT_S", 0.5)
    time.sleep(0.5)
    with pytest.raises(SystemExit, match="still busy"):
        service.wait_until_idle(working)
