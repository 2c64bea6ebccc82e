"""The scripts and notebooks of `examples/` run and show what they promise, with tiny models."""

import ast
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

import as2ray

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_OUTPUT_BYTES = 20_000
"""Of a notebook's stored outputs."""


@pytest.fixture(scope="module")
def ranker(checkpoint, tmp_path_factory) -> str:
    """Folder of a ranker with other probabilities than one half."""
    source = as2ray.load(checkpoint("bert", 1, initializer_range=0.3), device="cpu")
    return str(as2ray.save(source, tmp_path_factory.mktemp("examples") / "ranker"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder and returns what it prints: `run(name, *arguments)`."""
    monkeypatch.chdir(tmp_path)

    def run_script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_ranking_example_prints_each_sentence_with_its_score(run, ranker):
    lines = run("rank.py", ranker).splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 3
    assert scores == sorted(scores, reverse=True)


def test_table_example_reports_and_ranks(run, sentence_encoder):
    printed = run("own_table.py", sentence_encoder)
    for system in ("| ranker |", "| bm25 (baseline) |", "| similarity |"):
        assert system in printed
    assert "It eats krill." in printed
    assert Path("output/examples/animals/ranker/README.md").is_file()


def test_documents_example_answers_each_question(run, sentence_encoder):
    printed = run("own_documents.py", sentence_encoder)
    assert printed.startswith("SentenceIndex(")
    assert "What do blue whales eat? -> Blue whales eat krill." in printed
    assert run("own_documents.py", sentence_encoder) == printed  # a second time, too


def test_cascade_example_shows_that_candidates_leave_early(run, ranker):
    layers = [line.split()[3] for line in run("cascade.py", ranker).splitlines()]
    assert len(layers) == 3
    assert len(set(layers)) == 2


def test_distillation_example_reports_teacher_and_student(run, ranker, checkpoint):
    printed = run("distill.py", ranker, str(checkpoint("bert", None)))
    assert "| ranker |" in printed
    assert "| teacher |" in printed


@pytest.mark.parametrize("name", ["own_table.ipynb", "own_documents.ipynb"])
def test_notebook_runs_from_top_to_bottom_and_stores_small_outputs(
    name, sentence_encoder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.symlink(EXAMPLES / "animals.csv", "animals.csv")
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown"
    scope: dict[str, object] = {}
    shown = []
    for cell in code:
        text = "".join(cell["source"]).replace("packaged:all-MiniLM-L6-v2", sentence_encoder)
        *statements, last = ast.parse(text).body
        exec(compile(ast.Module(statements, []), name, "exec"), scope)
        if isinstance(last, ast.Expr):  # the notebook shows its value
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
        else:
            exec(compile(ast.Module([last], []), name, "exec"), scope)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(shown)
    assert {"error"}.isdisjoint(output["output_type"] for output in outputs)
    assert sum(map(bool, (cell["outputs"] for cell in code))) >= len(shown)
    assert 0 < len(json.dumps(outputs)) < MAX_OUTPUT_BYTES
