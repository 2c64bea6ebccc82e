"""Changes the code in small ways, one at a time, and counts the changes that tests notice.

python tests/mutants.py [FILES]
python tests/mutants.py --sample N [--seed S] [--seconds CPU_SECONDS] [FILES]

Without files: what differs from the last commit, else the files of that commit; with `--sample`,
all files of `PACKAGES`, and of each package N changes drawn at random. Of each package the tests
of its own folder and `RELATED_TESTS` run once on the unchanged code, but for those that start
Ray or processes that train; then each change is tried in a fork of that process, with the tests
that reach the changed function, until one fails; with `--seconds`, with the first of these tests
that take so long together, so that the share can only be too low. A test that fails in a fork of
unchanged code, too, is left out. A change that makes no difference to a user is listed in
`ACCEPTED` with the reason, and does not count. Ends with status 1 if a package is below `GOAL`, or,
with `--sample`, if the total is.

The changes are mutmut's. It does not run them, because it collects the tests and makes their shared
fixtures anew for each.
"""

import argparse
import concurrent.futures.thread
import contextlib
import functools
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol
from scheduling import starts_ray

if TYPE_CHECKING:
    from mutmut.mutation.file_mutation import MutatedFile

GOAL = 0.95
PACKAGES = (
    "cascade",
    "checkpoints",
    "corpora",
    "data",
    "evaluation",
    "experiments",
    "losses",
    "models",
    "retrieval",
    "serving",
    "tables",
    "text",
    "training",
)
"""Packages that compute something; others are not mutated."""

RELATED_TESTS = {
    "checkpoints": (
        "models/encoder/test_int8.py",
        "models/test_calibrated_ranker.py",
        "models/test_ensemble.py",
        "models/test_sequential.py",
    ),
    "corpora": ("cli/test_cli_fetch.py",),
    "experiments": ("cli/test_cli.py", "pipelines", "test_api.py"),
    "models": ("checkpoints/test_sentence_encoder.py",),
    "training": (
        "cli/test_cli_cascade.py",
        "experiments/test_encoder_stages.py",
        "pipelines/test_two_in_one_pipeline.py",
    ),
}
"""Files and folders beside a package's own with tests of its work."""

ACCEPTED = Path("tests/accepted_mutants.toml")
"""Changes that need not be noticed, by file and line."""

ENCODING = re.compile(r'(, )?encoding=(None|"utf-8")|, (?=\))', re.IGNORECASE)
"""The encoding of a file; a change to the default need not be noticed, which is the same here."""

MEMORY_BYTES = 6 * 2**30
"""What a process may allocate: a change can make an array too large for the machine."""

HANG_S = 120
"""Seconds, and 30 times those that it took before, after which a test counts as hanging."""

SETTINGS = """
[tool.mutmut]
source_paths = ["as2ray"]
# The wording of errors, descriptions and logs.
do_not_mutate_patterns = [
    '^ *(fix=)?f?".*"[,)]*$', "(fix|problem|message) ?=", "raise .*[Ee]rror", "_log[.]",
    " task[(]", "lookup[(]", "import_object[(]",
    # How a plot or a file looks.
    "indent=2", "(figsize|linewidth|fontsize|alpha|color|zorder|ncols|dpi)=",
]
"""
NOTICED = {"killed", "timeout"}
UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Count:
    """Changes of a package: how many there are, were tried, and were noticed."""

    package: str
    total: int
    tried: int
    killed: int

    @property
    def rate(self) -> float:
        """Share of the tried changes that were noticed."""
        return self.killed / max(1, self.tried)

    def __str__(self) -> str:
        from scipy.stats import binomtest

        tried = binomtest(self.killed, max(1, self.tried))
        low, high = tried.proportion_ci(method="wilson")
        return (
            f"{self.package}: {self.killed} of {self.tried} killed "
            f"({self.rate:.1%}, 95 % interval {low:.1%} to {high:.1%}), {self.total} mutants"
        )


def mutate(
    package: str,
    files: list[str],
    folder: Path,
    sample: int | None = None,
    seed: int = 0,
    seconds: float | None = None,
) -> Count:
    """Tries the changes of a package's files, or a sample of them, in a copy of the repository."""
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)
    with (folder / "pyproject.toml").open("a") as project:
        project.write(SETTINGS)
    with contextlib.chdir(folder):  # mutmut reads its settings there
        from mutmut.configuration import reset_config
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.utils.format_utils import get_mutant_name

        reset_config()
        mutants, file_of = {}, {}
        for file in files:
            mutated = mutate_file_contents(file, Path(file).read_text())
            Path(file).write_text(mutated.code)
            for name in mutated.mutant_names:
                mutants[get_mutant_name(Path(file), name)] = mutated, name
                file_of[get_mutant_name(Path(file), name)] = file
        chosen = list(mutants) if sample is None else draw(list(mutants), sample, seed)
        status = _run_tests(package, chosen, seconds)
    accepted = read_accepted()
    for name in chosen.copy():
        if status[name] not in NOTICED:
            diff = _diff(*mutants[name])
            old, new = _changed_lines(diff)
            if (file_of[name], old, new) in accepted or ENCODING.sub("", old) == ENCODING.sub(
                "", new
            ):
                chosen.remove(name)
            else:
                sys.stdout.write(f"# {name}: {status[name]}\n{diff}\n")
    killed = sum(status[name] in NOTICED for name in chosen)
    count = Count(package, len(mutants), len(chosen), killed)
    sys.stdout.write(f"{count}\n")
    sys.stdout.flush()
    return count


def draw(names: list[str], sample: int, seed: int) -> list[str]:
    """At most `sample` of the names, drawn at random without replacement."""
    return sorted(random.Random(seed).sample(sorted(names), min(sample, len(names))))


def read_accepted(path: Path = ACCEPTED) -> dict[tuple[str, str, str], str]:
    """Reads the reason of each accepted change, by file, line, and the line that replaces it."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return {(entry["file"], entry["old"], entry["new"]): entry["reason"] for entry in entries}


def weighted_rate(counts: list[Count]) -> float:
    """Estimated share of all packages' changes that are noticed."""
    return sum(c.rate * c.total for c in counts) / max(1, sum(c.total for c in counts))


def changed_files() -> list[str]:
    """Files that differ from the last commit, or else those that it changed."""
    return _git("diff", "--name-only", "HEAD") or _git("diff", "--name-only", "HEAD~1")


def _diff(mutated: "MutatedFile", name: str) -> str:
    """What a change changes."""
    lines, function = mutated.code.splitlines(), name.partition("__mutmut_")[0]
    versions = []
    for version in (f"{function}__mutmut_orig", name):
        span = mutated.line_span_by_function_name[version]
        text = lines[span.start - 1 : span.end]
        versions.append([line.replace(version, plain_name(function)) for line in text])
    return "\n".join([*unified_diff(*versions, lineterm="", n=2)][2:])


def plain_name(function: str) -> str:
    """The name in the code of a function, which mutmut calls `x_name` or `xǁClassǁname`."""
    return function.rpartition("ǁ")[2].removeprefix("x_" if "ǁ" not in function else "")


def _changed_lines(diff: str) -> tuple[str, str]:
    """Returns the old and the new lines of a diff, without the blanks around them."""
    lines = diff.splitlines()
    old, new = ([line[1:].strip() for line in lines if line[:1] == sign] for sign in "-+")
    return " ".join(old), " ".join(new)


def _run_tests(package: str, names: list[str], seconds: float | None) -> dict[str, str]:
    """Tries changes in a process of pytest; what became of each."""
    Path("run.json").write_text(json.dumps({"names": names, "seconds": seconds}))
    Path("status.json").write_text("{}")
    command = [sys.executable, "-m", "pytest", "-p", "mutants", "--mutants=run.json"]
    options = ["--hypothesis-profile=mutants", "-p", "no:xdist", "--tb=no"]
    places = ["--rootdir=.", "--basetemp=tmp", "-o", "tmp_path_retention_policy=none"]
    paths = os.pathsep.join(str(Path(path).resolve()) for path in (".", "tests"))
    tests = [f"tests/{name}" for name in (package, *RELATED_TESTS.get(package, ()))]
    ran = subprocess.run(
        [*command, *options, *places, *tests],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    if ran.returncode:
        sys.exit(f"{ran.stdout}\npytest ended with status {ran.returncode}")
    sys.stdout.write("".join(line for line in ran.stdout.splitlines(True) if "left out" in line))
    return json.loads(Path("status.json").read_text())


def _clear_caches() -> None:
    """Lets cached functions run again, whose values would hide changes and which tests reach."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("as2ray."):
            for value in [*vars(module).values()]:
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _find_pools() -> list[ThreadPoolExecutor]:
    """Finds all thread pools; then freezes all objects, so that forks do not copy them."""
    gc.unfreeze()  # a frozen object is not listed
    gc.collect()
    pools = [each for each in gc.get_objects() if type(each) is ThreadPoolExecutor]
    gc.freeze()
    return pools


def _restart_pools(pools: list[ThreadPoolExecutor]) -> None:
    """Lets thread pools start threads anew in a fork, which does not have those of its parent."""
    for pool in pools:
        pool.__init__(
            pool._max_workers, pool._thread_name_prefix, pool._initializer, pool._initargs
        )


def _other_threads() -> list[threading.Thread]:
    """Threads, such as a server, that a fork does not have, but that fixtures may need.

    Those of pools are started anew, and tqdm's only draws bars.
    """
    others = {threading.main_thread(), *concurrent.futures.thread._threads_queues}
    return [t for t in threading.enumerate() if t not in others and t.name != "tqdm_monitor"]


def order_tests(
    items: list[pytest.Item],
    name: str,
    cpu_seconds: Mapping[pytest.Item, float],
    limit_s: float | None = None,
) -> list[pytest.Item]:
    """Orders the tests of a change, and leaves out the last ones over a limit of seconds.

    Of a test with many parameters one comes first, the others after all other tests. The file of
    the change's module comes before the files that take least. Otherwise the tests of a file stay
    together, whose fixtures are made once.
    """
    own_file = f"test_{name.partition('.x')[0].rpartition('.')[2]}"
    total, number, num_variants = Counter(), {}, Counter()
    for item in sorted(items, key=lambda item: cpu_seconds[item]):
        test = item.path, item.nodeid.partition("[")[0]
        number[item] = num_variants[test]
        num_variants[test] += 1
        total[item.path] += cpu_seconds[item]

    def rank(item: pytest.Item) -> tuple[bool, bool, float, str, float]:
        place = total[item.path], str(item.path), cpu_seconds[item]
        return number[item] > 0, item.path.stem != own_file, *place

    ordered = sorted(items, key=rank)
    if limit_s is None:
        return ordered
    starts = accumulate((cpu_seconds[item] for item in ordered), initial=0.0)
    return [item for item, start in zip(ordered, starts) if start < limit_s]


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.splitlines()


class MutantRun:
    """Runs tests once, noting which functions each reaches, then tries each change in a fork."""

    def __init__(self, names: list[str], seconds: float | None) -> None:
        self.names = names
        self.fixture_functions: dict[str, set[str]] = defaultdict(set)
        """Functions that the setup of a shared fixture reaches."""
        self.shared_fixtures: dict[str, pytest.FixtureDef] = {}
        self.seconds = seconds
        """CPU seconds of the tests that a change is tried with, at most."""
        self.duration: Counter[pytest.Item] = Counter()
        """Seconds that each test took."""
        self.cpu_seconds: Counter[pytest.Item] = Counter()
        self._reached: set[str] = set()
        self._pools: list[ThreadPoolExecutor] = []
        self._failed = Path("failed.txt").resolve()
        """Name of the test that failed in a fork."""
        self._fails_unchanged: dict[str, bool] = {}
        """Whether a test that failed in a fork does so on unchanged code, too."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """Notes the functions that a shared fixture reaches, which all its tests reach by it."""
        outer, self._reached = self._reached, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.fixture_functions[fixturedef.argname] |= self._reached
                self.shared_fixtures[fixturedef.argname] = fixturedef
            self._reached |= outer

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out tests that start Ray or processes that train, which fail in a fork."""
        items[:] = [
            item
            for item in items
            if not starts_ray(item.path) and item.path.stem != "test_parallel"
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs all tests, then the changes; writes what became of each."""
        from mutmut.mutation import trampoline

        trampoline.record_trampoline_hit = lambda name, caller: self._reached.add(name)
        trampoline.set_mutant_under_test("stats")
        functions = {}
        for item, following in zip(session.items, [*session.items[1:], session.items[0]]):
            self._reached = set()
            _clear_caches()
            started_at, cpu_started_at = time.perf_counter(), time.process_time()
            if any(report.failed for report in runtestprotocol(item, False, following)):
                sys.stdout.write(f"\nleft out, fails on unchanged code: {item.nodeid}\n")
                continue
            self.duration[item] = time.perf_counter() - started_at
            self.cpu_seconds[item] = time.process_time() - cpu_started_at
            shared = [self.fixture_functions[name] for name in item.fixturenames]
            functions[item] = self._reached.union(*shared)
        self._pools = _find_pools()
        status = {}
        for name in self.names:
            function = name.partition("__mutmut_")[0]
            reaching = [item for item in functions if function in functions[item]]
            reaching = order_tests(reaching, name, self.cpu_seconds, self.seconds)
            status[name] = self._try_change(name, reaching)
            Path("status.json").write_text(json.dumps(status))  # also of a run that is interrupted
        trampoline.set_mutant_under_test("")
        return True

    def _try_change(self, name: str, items: list[pytest.Item]) -> str:
        """Returns what became of a change; a test that fails without it, too, does not count."""
        while items := [item for item in items if not self._fails_unchanged.get(item.nodeid)]:
            self._failed.write_text("")
            status, failed = self._try(name, items), self._failed.read_text()
            if status not in NOTICED or self._fails_unchanged.get(failed) is False:
                return status
            # Without the name of a test the fork has ended in some other way.
            suspects = [item for item in items if failed in ("", item.nodeid)]
            fails = self._try(UNCHANGED, suspects) != "survived"
            if failed:
                self._fails_unchanged[failed] = fails
            if not fails:
                return status
            if not failed:
                raise RuntimeError(f"unchanged code ends the fork: {suspects}")
            sys.stdout.write(f"\nleft out, fails in a fork: {failed}\n")
        return "no tests"

    def _try(self, name: str, items: list[pytest.Item]) -> str:
        limit_s = round(5 + 10 * sum(self.duration[item] for item in items))
        has_threads = bool(_other_threads())
        if not (process := os.fork()):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            self._run_mutant(name, items, has_threads)
        deadline = time.monotonic() + 3 * limit_s
        while time.monotonic() < deadline:
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                timeouts = (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM)
                exit_code = os.waitstatus_to_exitcode(code)
                return {0: "survived"}.get(
                    exit_code, "timeout" if exit_code in timeouts else "killed"
                )
            time.sleep(0.01)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return "timeout"

    def _run_mutant(self, name: str, items: list[pytest.Item], make_fixtures: bool) -> None:
        """Runs tests on changed code and ends the process, with status 1 if one fails."""
        from mutmut.mutation.trampoline import set_mutant_under_test

        try:
            set_mutant_under_test(name)
            if torch := sys.modules.get("torch"):
                # OpenMP's threads do not survive a fork, and would be waited for.
                torch.set_num_threads(1)
                torch.set_num_threads = lambda number: None
            _restart_pools(self._pools)
            _clear_caches()
            changed = self._changed_fixtures(name.partition("__mutmut_")[0])
            fixtures = [*self.shared_fixtures.values()] if make_fixtures else changed
            # Without a reference to it a fixture would end, and wait for threads of the parent.
            self._kept = [(f.cached_result, [*f._finalizers]) for f in fixtures]
            for fixture in fixtures:
                fixture.cached_result = None
                fixture._finalizers.clear()
            for item, following in zip(items, [*items[1:], items[0]]):
                signal.alarm(HANG_S + round(30 * self.duration[item]))  # ends the process
                if any(report.failed for report in runtestprotocol(item, False, following)):
                    self._failed.write_text(item.nodeid)
                    os._exit(1)
            os._exit(0)
        except BaseException:
            os._exit(1)

    def _changed_fixtures(self, function: str) -> list[pytest.FixtureDef]:
        """Shared fixtures that reach a function, or take one that does."""
        names = {name for name, reached in self.fixture_functions.items() if function in reached}
        changed: list[pytest.FixtureDef] = []
        for name, fixture in self.shared_fixtures.items():  # in the order of their setups
            if name in names or names.intersection(fixture.argnames):
                names.add(name)
                changed.append(fixture)
        return changed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--mutants FILE`."""
    parser.addoption("--mutants", help="file with the names of changes to try, and the seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Tries the changes in place of running the tests."""
    run = json.loads(Path(config.getoption("mutants")).read_text())
    config.pluginmanager.register(MutantRun(run["names"], run["seconds"]))


def main() -> bool:
    """Runs the command line; whether too few changes were noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, metavar="S")
    options = parser.parse_args()
    by_package = defaultdict(list)
    names = options.files or (changed_files() if options.sample is None else _git("ls-files"))
    for name in names:
        match Path(name).parts:
            case ("as2ray", package, *_) if package in PACKAGES and name.endswith(".py"):
                by_package[package].append(name)
    counts = [
        mutate(
            *(package, sorted(files), Path("output/mutants") / package),
            *(options.sample, options.seed, options.seconds),
        )
        for package, files in sorted(by_package.items())
    ]
    if options.sample is None:
        return any(count.rate < GOAL for count in counts)
    sys.stdout.write(f"all, weighted by mutants: {weighted_rate(counts):.1%} killed\n")
    return weighted_rate(counts) < GOAL


if __name__ == "__main__":
    sys.exit(main())
