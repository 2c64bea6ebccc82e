import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from mutant_run import order_tests
from mutants import (
    ACCEPTED,
    GOAL,
    RELATED_TESTS,
    Count,
    draw,
    mutate,
    read_accepted,
    weighted_rate,
)

CODE = """
from concurrent.futures import ThreadPoolExecutor
from functools import cache

POOL = ThreadPoolExecutor(1)


def add(a, b):
    return a + b


def untested(a, b=4):
    return a + 1


def forever(n):
    while n > 0:
        n = n - 1
    return n


def add_in_thread(a, b):
    return POOL.submit(add, a, b).result()


def twice(a):
    return 2 * a


@cache
def four():
    return twice(2)
"""
TESTS = """
import pytest
from as2ray.losses.sums import add, add_in_thread, forever, four


@pytest.fixture(scope="session")
def total():
    return add(1, 2)


def test_total(total):
    assert total == 3


def test_forever():
    assert forever(3) == 0


def test_thread():
    assert add_in_thread(1, 2) == 3


def test_cache():
    assert four() == 4


def test_fails_on_unchanged_code():
    assert False
"""


def test_sample_follows_its_seed_and_is_no_larger_than_the_whole():
    names = [f"m{number}" for number in range(50)]
    assert draw(names, 9, 1) == draw(names[::-1], 9, 1) != draw(names, 9, 2)
    assert len(set(draw(names, 9, 1))) == 9
    assert draw(names, 60, 1) == sorted(names)


def test_total_is_weighted_by_the_number_of_mutants():
    counts = [Count("a", 300, 10, 10), Count("b", 100, 20, 10)]
    assert weighted_rate(counts) == pytest.approx(0.875)
    assert weighted_rate([]) == Count("c", 0, 0, 0).rate == 0 < GOAL
    # Wilson's interval of 10 of 20.
    assert str(counts[1]) == "b: 10 of 20 killed (50.0%, 95 % interval 29.9% to 70.1%), 100 mutants"


def test_accepted_changes_are_of_lines_that_there_are():
    repository = Path(__file__).parents[1]
    accepted = read_accepted(repository / ACCEPTED)
    assert accepted
    for (file, old, new), reason in accepted.items():
        lines = [line.strip() for line in (repository / file).read_text().splitlines()]
        assert old in " ".join(lines), f"{file} has no lines {old}"
        assert old != new
        assert reason.endswith(".")


def test_tests_of_other_folders_are_there():
    names = [name for names in RELATED_TESTS.values() for name in names]
    assert [name for name in names if not (Path(__file__).parent / name).exists()] == []


def test_changes_that_tests_reach_are_killed_also_through_shared_fixtures(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("mutmut", reason="extra `mutation`")
    repository = Path(__file__).parent
    package, tests = tmp_path / "as2ray/losses", tmp_path / "tests/losses"
    for folder in (package, tests):
        folder.mkdir(parents=True)
    (package / "sums.py").write_text(CODE)
    (tests / "test_sums.py").write_text(TESTS)
    for name in ("mutant_run.py", "scheduling.py"):
        shutil.copy(repository / name, tests.parent)
    profile = "from hypothesis import settings\nsettings.register_profile('mutants')\n"
    (tests.parent / "conftest.py").write_text(profile)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    accepted = [
        ("return a + 1", "return a + 2"),
        ("def untested(a, b=4):", "def untested(a, b=5):"),
    ]
    entry = '[[mutant]]\nfile = "as2ray/losses/sums.py"\nreason = "Nobody looks."\n'
    entries = [f'{entry}old = "{old}"\nnew = "{new}"\n' for old, new in accepted]
    (tests.parent / ACCEPTED.name).write_text("".join(entries))
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    count = mutate("losses", ["as2ray/losses/sums.py"], Path("output"))
    status = json.loads(Path("output/status.json").read_text())
    by_function = {name.split(".x_")[1]: became for name, became in status.items()}
    assert by_function["add__mutmut_1"] == "killed"
    assert by_function["add_in_thread__mutmut_2"] == "killed"  # by a thread that the fork has not
    assert by_function["twice__mutmut_1"] == "killed"  # although its value was cached
    assert {by_function[f"untested__mutmut_{n}"] for n in (1, 2, 3)} == {"no tests"}
    assert "timeout" in by_function.values()  # `n = n + 1` never ends
    assert count.tried == len(status) - 2  # without those accepted
    assert count.killed == count.tried - 1
    output = capsys.readouterr().out
    assert "left out, fails on unchanged code: tests/losses/test_sums.py" in output
    assert "-    return a + 1\n+    return a - 1" in output


class Item(NamedTuple):
    path: Path
    nodeid: str


def test_tests_of_the_own_file_come_first_then_the_files_that_take_least():
    times = {
        "test_cascade": {"a[x]": 4, "a[y]": 2, "b": 1},
        "test_slow": {"a": 8, "b": 9},
        "test_fast": {"a": 1, "b": 3, "c": 2},
    }
    seconds = {
        Item(Path(f"tests/{name}.py"), f"tests/{name}.py::test_{test}"): cpu_seconds
        for name, tests in times.items()
        for test, cpu_seconds in tests.items()
    }
    change = "as2ray.models.cascade.xǁRankerǁscore__mutmut_3"
    expected = [
        *("test_cascade.py::test_b", "test_cascade.py::test_a[y]"),
        *("test_fast.py::test_a", "test_fast.py::test_c", "test_fast.py::test_b"),
        *("test_slow.py::test_a", "test_slow.py::test_b"),
        "test_cascade.py::test_a[x]",
    ]
    ordered = order_tests([*seconds], change, seconds)
    assert [item.nodeid.removeprefix("tests/") for item in ordered] == expected
    assert order_tests([*seconds], change, seconds, 4.5) == ordered[:4]
    ordered = order_tests([*seconds], "as2ray.models.slow.x_score__mutmut_3", seconds)
    assert ordered[0].path.stem == "test_slow"
