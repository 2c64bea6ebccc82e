"""The rooms' walls: who may import what, and that every module says at its door what it knows."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import as2ray

PACKAGE = Path(as2ray.__file__).parent
ROOMS_WITH_RAY = ("distributed", "serving")
MODULES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORKS = {"haystack": "haystack", "langchain": "langchain_core", "llama_index": "llama_index"}
"""What an adapter, by the name of its file, needs of the extra `adapters`."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Top-level packages that a module imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def rooms_imported(path: Path) -> set[str]:
    """Rooms of as2ray that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("as2ray"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("as2ray")}
    return {name.split(".")[1] for name in found if "." in name}


def is_in(path: Path, *rooms: str) -> bool:
    return path.relative_to(PACKAGE).parts[0] in rooms


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", [p for p in MODULES if not is_in(p, *ROOMS_WITH_RAY)], ids=name_of)
def test_module_outside_the_rooms_of_ray_does_not_import_ray(path):
    assert "ray" not in imported(path)


def test_what_knows_no_ray_loads_where_ray_is_not_installed():
    # Adapters and the rankers' benchmarks, too: all in one process, as loading takes seconds.
    missing = {adapter for adapter, needs in FRAMEWORKS.items() if not find_spec(needs)}
    names = [
        name_of(path)
        for path in MODULES
        if not is_in(path, *ROOMS_WITH_RAY) and path.stem not in missing
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"
        f"for name in {[*names, 'benchmarks.gpu', 'benchmarks.ranking']}:\n"
        "    importlib.import_module(name)\n"
    )
    root = PACKAGE.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


WALLS = {
    "text": {"models", "objectives", "training", "corpora", "evaluation", "checkpoint"},
    "models": {"checkpoint", "objectives", "training", "corpora", "evaluation"},
    "objectives": {"models", "training", "corpora", "text", "checkpoint", "evaluation"},
    "evaluation": {"models", "training", "text", "objectives", "checkpoint"},
    "corpora": {"models", "training", "objectives", "checkpoint"},
    "retrieval": {"models", "training", "objectives", "checkpoint"},
    "training": {"corpora", "retrieval"},
    "adapters": {"serving", "training", "corpora", "objectives"},
}


@pytest.mark.parametrize("room", WALLS)
def test_room_does_not_import_what_it_must_not_know(room):
    for path in (PACKAGE / room).rglob("*.py"):
        seen = rooms_imported(path) & (WALLS[room] | set(ROOMS_WITH_RAY))
        assert not seen, f"{name_of(path)} imports {sorted(seen)}"


@pytest.mark.parametrize(
    "unneeded",
    [
        {
            "pipelines.trials": {"torch", "transformers", "ray", "matplotlib"},
            "tune_spaces.distillation": {"transformers", "ray"},
            "as2ray.training.job": {"transformers", "ray"},
        },
        {
            "as2ray.distributed.ingest": {"torch", "transformers"},
            "as2ray.distributed.train": {"transformers"},
            "as2ray.distributed.tune": {"transformers"},
        },
    ],
    ids=["without-ray", "with-ray"],
)
def test_what_trials_and_controllers_load_leaves_out_what_they_do_not_need(unneeded):
    # Each process of a search or a run loads them: transformers' models take seconds of a core.
    code = "import sys\n" + "".join(
        f"import {module}\nassert not {names} & sys.modules.keys(), '{module}'\n"
        for module, names in unneeded.items()
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
