"""Each test can fail: it asserts something, or calls what raises where something is wrong."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
CHECKS = ("assert", "call_and_validate", "check", "fail", "raises", "validate", "warns")
"""How the names of functions begin that raise where something is wrong."""


def find_functions(text: str) -> dict[str, tuple[bool, set[str]]]:
    """Whether each function has an assertion of more than constants, and what it calls."""
    functions = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [*ast.walk(node)]
            asserted = [part.test for part in inner if isinstance(part, ast.Assert)]
            is_named = [isinstance(n, ast.Name) for test in asserted for n in ast.walk(test)]
            calls = [part.func for part in inner if isinstance(part, ast.Call)]
            names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
            functions[node.name] = any(is_named), names
    return functions


def find_tests_that_cannot_fail(texts: dict[str, str]) -> list[str]:
    """File and name of each test that neither asserts nor calls a check, itself or by a helper."""
    functions = {file: find_functions(text) for file, text in texts.items()}
    helpers = [item for by_name in functions.values() for item in by_name.items()]
    checking: set[str] = set()
    num_checking = -1

    def can_fail(has_assertion: bool, calls: set[str]) -> bool:
        return has_assertion or any(n in checking or n.startswith(CHECKS) for n in calls)

    while num_checking < len(checking):
        num_checking = len(checking)
        checking |= {n for n, f in helpers if not n.startswith("test_") and can_fail(*f)}
    return [
        f"{file}: {name}"
        for file, by_name in functions.items()
        for name, function in by_name.items()
        if name.startswith("test_") and not can_fail(*function)
    ]


def test_tests_that_cannot_fail_are_found():
    text = """
def helper(): assert value == 1
def outer(): helper()
def test_by_helpers(): outer()
def test_by_check(): check_table(table)
def test_of_nothing(): load(table)
def test_of_constants(): assert 1 == 1
"""
    assert find_tests_that_cannot_fail({"a.py": text}) == [
        "a.py: test_of_nothing",
        "a.py: test_of_constants",
    ]


def test_all_tests_can_fail():
    texts = {str(path): path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    assert len(texts) > 100
    assert find_tests_that_cannot_fail(texts) == []
