"""Worker processes of Ray that are forked from a process which has imported torch.

Each worker of Ray is a new Python process. Its imports of torch and transformers take five CPU
seconds, which is most of what tests on Ray compute. Here Ray runs a small program instead (the
starter), which asks a process that has imported them (the nursery) to fork the worker. The worker
imports Ray itself, which reads its environment then.

Where a library may be imported in another way (variables of the environment, a working folder of
its own), or the nursery has ended, the starter runs the worker as Ray would.
"""

import array
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

IMPORT_VARIABLES = ("CUDA", "HF_", "LD_", "MKL", "TORCH", "TRANSFORMERS")
"""How names of variables begin that libraries read when they are imported."""

STARTER = """#!{python} -IS
import array, json, os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect({address!r})
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        files = array.array("i", [0, 1, 2]).tobytes()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        nursery.sendmsg([len(request).to_bytes(8, "little")], rights)
        nursery.sendall(request)
        forked = nursery.recv(1) == b"1"
except OSError:
    forked = False
if not forked:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Forks the workers of clusters that this process starts in the context."""
    from ray._private import services

    with tempfile.TemporaryDirectory(prefix="nursery-") as folder:
        starter = Path(folder, "python")
        address = str(Path(folder, "socket"))
        starter.write_text(STARTER.format(python=sys.executable, address=address))
        starter.chmod(0o755)
        nursery = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)
        assert nursery.stdin is not None
        services.sys = SimpleNamespace(**vars(sys) | {"executable": str(starter)})
        try:
            yield
        finally:
            services.sys = sys
            nursery.stdin.close()
            nursery.wait()


LIBRARIES = (
    *("aiohttp", "fastapi", "grpc", "jsonschema", "opentelemetry.sdk.metrics", "pandas"),
    *("prometheus_client", "pyarrow.dataset", "requests", "uvicorn", "yaml"),
    *("torch.distributed", "torch._dynamo", "transformers.models.bert.modeling_bert"),
    *("as2ray.checkpoints.loading", "as2ray.training.tracking", "as2ray.training.trainer"),
)
"""What workers import, except for Ray and what imports it."""


def _fork_on_request(address: str) -> None:
    """Forks a worker for each request of a starter, until the standard input is closed."""
    environment = dict(os.environ)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    for name in LIBRARIES:
        import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()  # so that a collection in a worker does not copy these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
            files = array.array("i", ancillary[0][2])
            request = connection.makefile("rb").read(int.from_bytes(header, "little"))
            arguments, variables, folder = json.loads(request)
            worker = _worker_arguments(arguments, variables)
            can_fork = worker is not None and not _differ(environment, variables)
            if can_fork and os.fork() == 0:
                listener.close()
                _become_worker(worker, variables, folder, files)
            connection.sendall(b"1" if can_fork else b"0")
        for file in files:
            os.close(file)


def _worker_arguments(arguments: list[str], variables: dict[str, str]) -> list[str] | None:
    """Arguments of a worker whose runtime environment has variables alone, which are added."""
    if not arguments:
        return None
    name, *rest = arguments
    if Path(name).name == "setup_worker.py":
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
        parser.add_argument("--language")
        setup, arguments = parser.parse_known_args(rest)
        context = setup.serialized_runtime_env_context
        variables.update(context.get("env_vars") or {})
        if context.get("command_prefix") or context.get("override_worker_entrypoint"):
            return None
    return arguments if Path(arguments[0]).name == "default_worker.py" else None


def _differ(first: dict[str, str], second: dict[str, str]) -> bool:
    names = {name for name in first.keys() | second.keys() if name.startswith(IMPORT_VARIABLES)}
    return any(first.get(name) != second.get(name) for name in names)


def _search_path(variables: dict[str, str]) -> list[str]:
    return [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _become_worker(
    arguments: list[str], variables: dict[str, str], folder: str, files: Sequence[int]
) -> None:
    import numpy as np
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    np.random.seed()
    torch.seed()
    if num_threads := variables.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(num_threads))
    sys.argv = arguments
    sys.path[:1] = [str(Path(arguments[0]).parent), *_search_path(variables)]
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.exit(_fork_on_request(sys.argv[1]))
