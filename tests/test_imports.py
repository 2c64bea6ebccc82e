"""Which package may import which, and which modules load without Ray or transformers."""

import ast
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import as2ray

PACKAGE = Path(as2ray.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

FREE = {"errors", "interrupts", "outputs", "plugins", "progress"}
"""Modules that every package may import; they import at most each other."""

CORE = {"tables", "text", "cascade"}
RANKERS = {*CORE, "models", "checkpoints"}
TRAINING = {*RANKERS, "data", "losses", "evaluation", "training"}

PACKAGES_WITH_RAY = {"distributed", "serving"}
MODULES_WITH_RAY = {"as2ray.experiments.ray_backend"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "interrupts": set(),
    "outputs": set(),
    "plugins": set(),
    "progress": set(),
    "console": set(),
    "tables": set(),
    "cascade": set(),
    "text": {"tables"},
    "losses": {"tables"},
    "corpora": {"tables", "text"},
    "data": {"tables", "text"},
    "retrieval": {"tables", "text"},
    "evaluation": {"tables", "cascade", "text"},
    "models": CORE,
    "checkpoints": {*CORE, "models"},
    "profiling": {*CORE, "models", "evaluation"},
    "training": TRAINING,
    "integrations": RANKERS,
    "distributed": {*TRAINING, "corpora", "retrieval", "console"},
    "experiments": {
        *(*TRAINING, "corpora", "retrieval", "profiling", "distributed", "console"),
    },
    "serving": {*RANKERS, "retrieval", "distributed", "console"},
    "cli": {
        *(*TRAINING, "corpora", "retrieval", "profiling", "experiments", "console"),
        *PACKAGES_WITH_RAY,
    },
    "api": {*TRAINING, "retrieval", "experiments", "cli"},
    "__init__": {*TRAINING, "corpora", "retrieval", "experiments", "api"},
}
"""Packages that each package may import, beside itself and `FREE`."""

FRAMEWORKS = {
    "haystack": "haystack",
    "langchain": "langchain_core",
    "llama_index": "llama_index",
    "gpu_kernels": "triton",
}
"""What a module needs that is not installed everywhere: extras, and what comes with a GPU."""


NOT_LOADED_BY_ASK = {
    "transformers",
    "huggingface_hub",
    "accelerate",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "pandas",
    "scipy.optimize",
    "scipy.stats",
    "ray",
    "matplotlib",
}
"""What answering from an index needs only with a ranker, or never."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a module imports, also inside its functions."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_packages(path: Path) -> set[str]:
    """Packages of as2ray that a module imports."""
    parts = (name.split(".") for name in imported_modules(path))
    return {part[1] for part in parts if part[0] == "as2ray" and len(part) > 1}


MODULES_WITHOUT_RAY = [
    path
    for path in MODULES
    if package_of(path) not in PACKAGES_WITH_RAY and module_name(path) not in MODULES_WITH_RAY
]


def test_list_of_packages_is_complete():
    packages = {package_of(path) for path in MODULES}
    assert packages == MAY_IMPORT.keys()
    assert set().union(*MAY_IMPORT.values()) <= packages


def test_modules_import_only_what_their_packages_may():
    forbidden = {}
    for path in MODULES:
        package = package_of(path)
        allowed = MAY_IMPORT[package] | FREE | {package, "__version__"}
        forbidden[module_name(path)] = imported_packages(path) - allowed
    assert len(forbidden) == len(MODULES)
    assert {name: packages for name, packages in forbidden.items() if packages} == {}


def test_modules_have_docstrings():
    assert [module_name(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_modules_outside_the_ray_packages_do_not_import_ray():
    top = {
        module_name(path): {name.split(".")[0] for name in imported_modules(path)}
        for path in MODULES_WITHOUT_RAY
    }
    assert [name for name, imported in top.items() if "ray" in imported] == []


@pytest.mark.slow
def test_modules_outside_the_ray_packages_load_where_ray_is_not_installed():
    # Integrations and the rankers' benchmarks, too: all in one process, as loading takes seconds.
    not_installed = {module for module, needs in FRAMEWORKS.items() if not find_spec(needs)}
    modules = [module_name(path) for path in MODULES_WITHOUT_RAY if path.stem not in not_installed]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"
        f"for name in {[*modules, 'benchmarks.gpu', 'benchmarks.ranking']}:\n"
        "    importlib.import_module(name)\n"
    )
    root = PACKAGE.parent
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "not_loaded",
    [
        {
            "as2ray.outputs": {"torch", "transformers", "ray"},
            "pipelines.distill": {"torch", "transformers", "ray", "matplotlib"},
            "as2ray.experiments.cascades": {"torch", "transformers", "ray", "matplotlib"},
            "tune_spaces.distillation": {"transformers", "ray"},
            "as2ray.losses": {"transformers", "ray"},
            "as2ray.training.job": {"transformers", "ray"},
        },
        {
            "as2ray.retrieval.answer_scoring": {"scipy.stats", "scipy.optimize"},
            "as2ray.cli.main": {"torch", "transformers", "ray", "pandas", "scipy.stats"},
        },
        {
            "as2ray.distributed.ingest": {"torch", "transformers"},
            "as2ray.serving.deployment": {
                *("torch", "transformers", "scipy.stats", "scipy.optimize"),
            },
            "as2ray.distributed.train": {"transformers"},
            "as2ray.distributed.tune": {"transformers"},
        },
    ],
    ids=["without-ray", "command-line", "with-ray"],
)
def test_light_processes_do_not_load_what_they_do_not_need(not_loaded):
    # Each process of a search or a run loads them: transformers' models take seconds of a core.
    code = "import sys\n" + "".join(
        f"import {module}\nassert not {names} & sys.modules.keys(), '{module}'\n"
        for module, names in not_loaded.items()
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.slow
def test_ask_loads_neither_transformers_nor_what_takes_as_long(sentence_encoder, tmp_path):
    # Importing them takes longer than an answer. scipy.special and torch are needed.
    from as2ray.cli.main import main

    (tmp_path / "whales.md").write_text("Whales eat krill near the ice.")
    index = str(tmp_path / "i")
    main(["index", str(tmp_path / "whales.md"), "--output", index, "--encoder", sentence_encoder])
    code = (
        "import sys\n"
        "from as2ray.cli.main import main\n"
        f"main(['ask', 'What do whales eat?', '--index', {index!r}, '--score_threshold', '0'])\n"
        f"loaded = {NOT_LOADED_BY_ASK} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "krill" in process.stdout


def test_public_names_are_those_of_the_lazy_table():
    assert set(as2ray.__all__) == {*as2ray._MODULES, "__version__"}
    for name in as2ray.__all__:
        assert getattr(as2ray, name) is not None
