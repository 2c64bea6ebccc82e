"""What a wheel holds: the packages without benchmarks, and every file that they read."""

import tomllib
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
