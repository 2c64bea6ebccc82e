"""The header of every recipe says what it reproduces, and each deviation with its reason."""

import re

import pytest
import yaml

from benchmarks import reproduction
from benchmarks.reproduction import HEADER_FIELDS, list_deviations, read_header

RECIPES = sorted(reproduction.RECIPES.glob("*.yaml"))


def list_problems(text: str) -> list[str]:
    """Returns what a recipe's header lacks."""
    header, recipe = read_header(text), yaml.safe_load(text)
    problems = [f"no field {name}" for name in HEADER_FIELDS if not header.get(name, "").strip()]
    if not re.search(r"Table|Figure|section", header.get("Reproduces", "")):
        problems.append("names no table, figure or section")
    deviations = list_deviations(header)
    if not deviations:
        problems.append("names no deviation")
    problems += [f"no reason: {d!r}" for d in deviations if not re.search(r"\S:\s+\S", d)]
    whole = " ".join(header.values())
    trainings = [run["training"] for run in recipe.get("runs", {}).values()]
    trainings += [recipe["training"]] if "training" in recipe else []
    is_clipped = any(training.get("max_grad_norm", 1.0) for training in trainings)
    if "published_results" in recipe and "reproduces" not in recipe:
        problems.append("its report does not compare with what is printed: no `reproduces`")
    for test, pairs in recipe.get("reproduces", {}).items():
        baseline = recipe["baseline"]
        if (baseline if isinstance(baseline, str) else baseline[test]) not in pairs:
            problems.append(f"no claim of {test} is computed: its baseline reproduces nothing")
    # What no paper says and a run does.
    for pattern, applies in {
        "clip": is_clipped,
        "bf16": any(training.get("precision", "auto") != "fp32" for training in trainings),
        "tokens": True,
        "triangle": any(t.get("lr_scheduler_type") == "triangular" for t in trainings),
    }.items():
        if applies and pattern not in whole:
            problems.append(f"does not say {pattern!r}")
    return problems


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_header_of_a_recipe_has_its_table_and_a_reason_for_each_deviation(path):
    assert list_problems(path.read_text()) == []


@pytest.mark.parametrize("name", HEADER_FIELDS)
def test_recipe_without_a_field_fails(name):
    text = RECIPES[0].read_text()
    assert f"# {name}:" in text
    assert f"no field {name}" in list_problems(text.replace(f"# {name}:", "# Other:", 1))


def test_deviation_without_a_reason_fails():
    text = (
        "# Reproduces: TANDA, Table 3.\n# Settings: section 5.2, 128 tokens.\n# Deviates in:\n"
        "# - three seeds.\n# Needs: nothing.\nruns: {}\n"
    )
    assert list_problems(text) == ["no reason: 'three seeds.'"]
    assert list_problems(text.replace("three seeds", "three seeds: they show the spread")) == []
