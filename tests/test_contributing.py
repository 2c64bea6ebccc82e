"""The examples of CONTRIBUTING.md run as they are printed there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = (
    "as2ray",
    "tune_spaces",
    *(f"tests/{name}.py" for name in ("conftest", "durations", "patience", "scheduling", "tiny")),
    "pyproject.toml",
)
EXAMPLE = re.compile(r"^### (?P<title>.+?)\n(?P<text>.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"^`(?P<path>\S+)`:\n\n```(?P<language>python|diff)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def read_examples() -> dict[str, list[tuple[Path, str, str]]]:
    """Path, language and text of the files of each example, by its title."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {
        example["title"]: [
            (Path(file["path"]), file["language"], file["text"])
            for file in FILE.finditer(example["text"])
        ]
        for example in EXAMPLE.finditer(text)
    }


def apply_diff(text: str, diff: str) -> str:
    """The text after all hunks, which `@@` separates; each must match in exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, f"{text.count(before)} places match:\n{before}"
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy of what the examples need, with all of them applied."""
    copy = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        if (ROOT / name).is_dir():
            # With times and compiled modules, so that only changed files are compiled.
            shutil.copytree(ROOT / name, copy / name)
        else:
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for path, language, text in [file for files in read_examples().values() for file in files]:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        if language == "diff":
            text = apply_diff((copy / path).read_text(encoding="utf-8"), text)
        else:
            assert not (copy / path).exists(), f"{path} is not new"
        (copy / path).write_text(text, encoding="utf-8")
    return copy


def test_each_example_needs_at_most_two_files_beside_its_test():
    examples = read_examples()
    assert len(examples) == 5
    for files in examples.values():
        paths = [path for path, _, _ in files]
        tests = [path for path in paths if path.parts[0] == "tests"]
        assert len(tests) == 1
        assert 1 <= len(paths) - len(tests) <= 2


def test_examples_follow_the_rules_of_ruff(repository):
    ruff = Path(sys.executable).with_name("ruff")
    paths = [str(path) for files in read_examples().values() for path, _, _ in files]
    for command in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        process = subprocess.run(
            [ruff, *command, *paths], cwd=repository, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.slow
def test_examples_pass_their_own_tests(repository):
    tests = [
        str(path)
        for files in read_examples().values()
        for path, _, _ in files
        if path.parts[0] == "tests"
    ]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *tests],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
