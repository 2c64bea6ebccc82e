"""The site of the documents builds, and no link of it leads nowhere."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILDER = ROOT / "docs" / "build_site.py"

pytest.importorskip("zensical", reason="the extra `site` is not installed")


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_site", BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_repository_become_links_of_the_site(builder):
    text = "[a](../CONTRIBUTING.md#x) [b](docs/guide.md) ![c](images/c.png) [d](README.md)"
    linked = "[a](CONTRIBUTING.md#x) [b](guide.md) ![c](images/c.png) [d](index.md)"
    assert builder.link_inside(text) == linked


@pytest.mark.slow
def test_site_builds_without_a_broken_link():
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(BUILDER)]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "output" / "site"
    commands = (site / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "as2ray cascade" in commands
    assert "--max_loss" in commands
    assert "usage: as2ray [options] cascade" in commands
    recipes = (site / "reference" / "recipes" / "index.html").read_text(encoding="utf-8")
    assert "usage: python -m pipelines.cascade" in recipes
    http = (site / "reference" / "http" / "index.html").read_text(encoding="utf-8")
    assert all(f"POST {path}" in http for path in ("/v2/rerank", "/rank", "/ask"))
    metrics = (site / "reference" / "metrics" / "index.html").read_text(encoding="utf-8")
    assert "as2ray_queue_fill" in metrics
    assert "budget_ms" in (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
