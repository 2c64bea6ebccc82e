"""Worker processes of Ray that are forked from a process which has imported torch.

Each worker of Ray is a new Python process. Its imports of torch and transformers take five CPU
seconds, which is most of what tests on Ray compute. Here Ray runs a small program instead (the
starter), which asks a process that has imported them (the nursery) to fork the worker. The worker
imports Ray itself, which reads its environment then.

Where a library may be imported in another way (variables of the environment, a working folder of
its own), or the nursery has ended, the starter runs the worker as Ray would.
"""

import array
import ctypes
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

PROGRAMS = ("default_worker.py", "setup_worker.py")
"""What Ray runs as a worker, without and with an environment of its own."""

STARTER = """#!{python} -IS
import array, json, os, socket, sys

def ask_nursery():
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect({address!r})
        request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        disks = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        files = array.array("i", [0, 1, 2, disks]).tobytes()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        nursery.sendmsg([len(request).to_bytes(8, "little")], rights)
        nursery.sendall(request)
        return nursery.recv(1) == b"1"

try:
    # Others, such as Ray's agents, for which it waits seconds only, need not wait for the nursery.
    forked = os.path.basename(sys.argv[1]) in {names!r} and ask_nursery()
except OSError:
    forked = False
if not forked:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


HOOK = """
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

class Hook:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "ray._private.services":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def run_and_patch(module):
            run(module)
            module.sys = SimpleNamespace(**vars(sys) | {{"executable": {starter!r}}})

        spec.loader.exec_module = run_and_patch
        return spec

sys.meta_path.insert(0, Hook)
"""
"""Runs first in each process that has its folder in `PYTHONPATH`."""


@contextmanager
def nursery() -> Iterator[Path]:
    """Runs a nursery in the context; yields a folder with the starter and the hook."""
    with tempfile.TemporaryDirectory(prefix="nursery-") as name:
        folder = Path(name)
        starter, address = folder / "python", str(folder / "socket")
        starter.write_text(STARTER.format(python=sys.executable, address=address, names=PROGRAMS))
        starter.chmod(0o755)
        (folder / "sitecustomize.py").write_text(HOOK.format(starter=str(starter)))
        process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)
        assert process.stdin is not None
        try:
            yield folder
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def forked_workers() -> Iterator[Path]:
    """Forks the workers of clusters that this process starts in the context.

    Those of other processes are forked if `PYTHONPATH` has the folder that is yielded; see
    `with_folder`.
    """
    from ray._private import services

    with nursery() as folder:
        services.sys = SimpleNamespace(**vars(sys) | {"executable": str(folder / "python")})
        try:
            yield folder
        finally:
            services.sys = sys


def with_folder(folder: Path) -> str:
    """Returns `PYTHONPATH` with the folder of a nursery."""
    return os.pathsep.join([str(folder), *_search_path(dict(os.environ))])


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
            header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 4))
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
    os.setpgrp()  # A node of another session ends the group of a worker that dies.
    *standard, disks = files
    for number, file in enumerate(standard):
        os.dup2(file, number)
    if not os.path.samestat(os.fstat(disks), os.stat("/proc/self/ns/mnt")):
        _see_disks(disks)
    for file in files:
        os.close(file)
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


def _see_disks(namespace: int) -> None:
    """Sees the disks of a process whose `/proc/PID/ns/mnt` is open, if other ones are mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "no other disks")


if __name__ == "__main__":
    sys.exit(_fork_on_request(sys.argv[1]))
