"""Names that were replaced by the field's terms appear in no public name, flag, key or page."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MODULES = [p for top in ("as2ray", "pipelines", "tune_spaces") for p in (ROOT / top).rglob("*.py")]
YAML_FILES = [
    p for top in ("pipelines/recipes", "serve_configs") for p in (ROOT / top).glob("*.yaml")
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs" / name for name in ("design.md", "guide.md", "cluster.md")),
]

REPLACED = {
    "Asked", "Contrasts", "Desk", "Facts", "Flat", "Guard", "Joint", "Library", "Line",
    "Moment", "Objective", "Observed", "Outline", "PairFiles", "Placed", "Refused", "Seen",
    "Watched", "WithSettings", "at_rest", "around", "came", "drawn", "falling", "lanes",
    "lesson", "likeness", "made_up", "mend", "moments", "of_mark", "of_sequence", "outlines",
    "refuse_drop", "refuse_gaps", "relief", "relief_drop", "relief_from", "relieved",
    "resemblance", "resting", "side_by_side", "steps_a_window", "survivors", "tell",
    "text_only", "told", "two_logits", "uncollected", "unrounded", "waiting_tokens",
}  # fmt: skip
"""Words that had one private meaning and no other."""

KEYS = {
    "batches", "bad", "curves", "elsewhere", "grace", "leaks", "objective",
    "searched", "selecting", "selects", "timed", "unlabelled", "gateways", "busy",
    "least", "most",
}  # fmt: skip
"""Keys of recipes and service settings that have other names now; as words they are common."""


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names of definitions, fields and parameters that do not start with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg))
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id
                if isinstance(statement, ast.Assign):
                    yield from (t.id for t in statement.targets if isinstance(t, ast.Name))


def yaml_keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield str(key)
            yield from yaml_keys(child)
    if isinstance(value, list):
        for child in value:
            yield from yaml_keys(child)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_modules_define_no_replaced_name():
    names = {
        relative(path): set(public_names(ast.parse(path.read_text(encoding="utf-8"))))
        for path in MODULES
    }
    assert [
        (path, sorted(each & REPLACED)) for path, each in names.items() if each & REPLACED
    ] == []


@pytest.mark.parametrize("path", YAML_FILES, ids=relative)
def test_recipe_or_config_has_no_replaced_key(path):
    documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    keys = {key for document in documents for key in yaml_keys(document)}
    assert sorted(keys & (REPLACED | KEYS)) == []


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_page_names_no_replaced_word_in_code(path):
    text = path.read_text(encoding="utf-8")
    code = re.findall(r"`[^`\n]+`", text) + re.findall(r"^    .*$", text, re.MULTILINE)
    code += re.findall(r"```.*?```", text, re.DOTALL)
    words = {word for piece in code for word in re.findall(r"[A-Za-z_]+", piece)}
    assert sorted(words & REPLACED) == []


def test_demo_page_reads_no_replaced_field():
    script = (ROOT / "as2ray/serving/static/index.html").read_text(encoding="utf-8")
    fields = set(re.findall(r"\.([a-z_]+)\b", script))
    assert sorted(fields & REPLACED) == []
