"""Runs tests once, then again for each change of the code, in forks of their process.

A plugin of pytest, which `mutants.py` starts with `-p mutant_run --mutants FILE`.
"""

import concurrent.futures.thread
import functools
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from scheduling import starts_ray

HANG_S = 120
"""Seconds, and 30 times those that it took before, after which a test counts as hanging."""

NOTICED = {"killed", "timeout"}
UNCHANGED = "unchanged"


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
