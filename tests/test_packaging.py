"""What a wheel holds: the packages without benchmarks, and every file that they read."""

import os
import pty
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools import find_packages

import as2ray
from as2ray.cli.main import COMMANDS
from as2ray.experiments.configuration import read_tree
from as2ray.experiments.recipe import Recipe

ROOT = Path(as2ray.__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_has_the_packages_without_benchmarks_and_tests():
    include = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.partition(".")[0] for name in find_packages(ROOT, include=include)}
    assert packages == {"as2ray", "pipelines", "tune_spaces", "serve_configs"}


@pytest.mark.parametrize("package", ["as2ray", "pipelines", "serve_configs"])
def test_wheel_has_every_file_of_a_package(package):
    patterns = SETTINGS["tool"]["setuptools"]["package-data"][package]
    files = [path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*")]
    data = [
        str(f) for f in files if f.suffix not in ("", ".py", ".pyc") or f.name == "Containerfile"
    ]
    assert data
    assert [f for f in data if not any(fnmatch(f, pattern) for pattern in patterns)] == []


def test_version_stands_in_one_place():
    assert SETTINGS["project"]["dynamic"] == ["version"]
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "as2ray.__version__"}


def test_installed_recipe_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tanda_minilm.yaml", "pipelines/recipes/tanda_minilm.yaml"):
        assert "runs" in read_tree([Recipe], ["--config", name])


def test_guide_names_every_extra_and_the_readme_only_commands_that_exist():
    table = (ROOT / "docs/guide.md").read_text().partition("## Corpora")[0]
    extras = SETTINGS["project"]["optional-dependencies"]
    assert all(f"`{extra}`" in table for extra in extras)
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = {line.split()[1] for line in lines if line.startswith("    as2ray ")}
    assert commands
    assert commands <= COMMANDS.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Folder with the content of a wheel that was built from this checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("as2ray", "pipelines", "tune_spaces", "serve_configs", "benchmarks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [path] = (source / "dist").glob("*.whl")
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(path).extractall(folder)
    return folder


@pytest.mark.slow
def test_built_wheel_has_its_packages_data_command_and_metadata(wheel):
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == {
        *("as2ray", "pipelines", "tune_spaces", "serve_configs"),
    }
    recipes = {path.name for path in (ROOT / "pipelines/recipes").glob("*.yaml")}
    assert {path.name for path in (wheel / "pipelines/recipes").iterdir()} == recipes
    configs = {path.name for path in (ROOT / "serve_configs").iterdir() if path.is_file()}
    assert {path.name for path in (wheel / "serve_configs").iterdir()} == configs
    assert (wheel / "as2ray/serving/static/index.html").is_file()
    [info] = wheel.glob("*.dist-info")
    assert info.name == f"as2ray-{as2ray.__version__}.dist-info"
    assert "as2ray = as2ray.cli.main:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    for extra in SETTINGS["project"]["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


@pytest.mark.slow
def test_built_wheel_ranks_and_plans_a_recipe_in_an_empty_folder(wheel, checkpoint, tmp_path):
    (tmp_path / "sentences.txt").write_text("Kovarin.\nBadesso lala.\n")
    lines = [
        "import as2ray, sys",
        "from as2ray.cli.main import main",
        f"assert as2ray.__file__.startswith({str(wheel)!r})",
        "main(['--version'])",
        f"main(['rank', '--model', {str(checkpoint('bert'))!r}, '--question', 'Kovarin?',"
        " '--candidates', 'sentences.txt'])",
        "from pipelines.transfer_adapt import PIPELINE",
        "sys.argv = ['x', '--config', 'tanda_minilm.yaml', '--output', 'o', '--dry_run']",
        "PIPELINE.command()",
    ]
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    version, *printed = process.stdout.splitlines()
    assert version == f"as2ray {as2ray.__version__}"
    assert {line.split()[-1] for line in printed[:2]} == {"Kovarin.", "lala."}
    assert " stages, 0 stored; " in process.stdout


def make_pip_project(folder, script):
    """Copies the Makefile into a folder whose Python runs a script instead of pip."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    program = folder / "python3"
    program.write_text(f"#!/bin/sh\ncase $3 in install) {script};; esac\n")
    program.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(program)
    # The test may itself run inside make, which then names folders.
    return ["make", "--no-print-directory", f"PYTHON={program}"]


def test_quickstart_installs_only_its_extra(tmp_path):
    make = make_pip_project(tmp_path, "exit 0")
    plan = {
        target: subprocess.run(
            [*make, "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for target in ("quickstart", "test")
    }
    assert "--editable '.[quickstart]'" in plan["quickstart"]
    assert "development" not in plan["quickstart"]
    assert "[quickstart,development,documents," in plan["test"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_installation_takes_a_line_for_each_call_of_pip_and_shows_its_errors(tmp_path, is_terminal):
    make = make_pip_project(tmp_path, 'echo "$@"; echo Collecting ray')
    output = run_in(make, tmp_path, is_terminal)
    lines = output.replace("\r\n", "\n").split("\n")
    assert lines[0] == "pip install torch"
    assert ("-qq" in output) is not is_terminal
    if is_terminal:
        assert lines[1].startswith("\r\033[K-m pip install --constraint")
        assert len(output.split("\n")) <= 6

    (failing := tmp_path / "failing").mkdir()
    make = make_pip_project(failing, "echo no such package >&2; exit 1")
    output = run_in(make, failing, is_terminal)
    assert "no such package" in output
    assert ".[quickstart]" not in output
    assert not (failing / ".venv" / "quickstart-installed").exists()


def run_in(command, folder, is_terminal):
    """Runs a command in a folder, on a terminal or not; returns what it prints."""
    if not is_terminal:
        process = subprocess.run(
            [*command, "quickstart"], cwd=folder, capture_output=True, text=True, check=False
        )
        return process.stdout + process.stderr
    printed: list[bytes] = []

    def read(descriptor):
        printed.append(data := os.read(descriptor, 1024))
        return data

    shell = f"cd {shlex.quote(str(folder))} && {shlex.join([*command, 'quickstart'])}"
    pty.spawn(["sh", "-c", shell], read)
    return b"".join(printed).decode()
