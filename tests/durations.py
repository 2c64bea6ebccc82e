"""How long tests and the fixtures that they share take; a plugin of pytest."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

DURATIONS = "as2ray/durations"
"""Where pytest's cache keeps the seconds that tests and shared fixtures took when they ran last."""

SHARED_FIXTURE_FACTOR = 20
"""A shared fixture may take so many times `--at-most`; the tests of a longer one are skipped."""


class Durations:
    """Notes the seconds that each test takes, and each fixture that tests share.

    Args:
        cache: Where they are kept between runs.
    """

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache, self._seconds = cache, Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds what one phase of a test took, without the fixtures that later tests share."""
        shared = getattr(report, "shared_fixtures", {})
        self._seconds[report.nodeid] += report.duration - sum(shared.values())
        for name, duration_s in shared.items():  # of several processes
            self._seconds[name] = max(self._seconds[name], duration_s)

    def pytest_sessionfinish(self) -> None:
        """Keeps them."""
        self._cache.set(DURATIONS, {**self._cache.get(DURATIONS, {}), **self._seconds})


_shared_fixtures: dict[str, float] = {}
"""Seconds of the shared fixtures that the test at hand has set up."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Notes the seconds of a fixture that tests share."""
    started_at = time.perf_counter()
    result = yield
    if fixturedef.scope != "function":
        file = "" if fixturedef.scope == "session" else request.node.nodeid
        _shared_fixtures[f"{file}::{fixturedef.argname}"] = time.perf_counter() - started_at
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Gives the report of a test's setup the seconds of the shared fixtures that it set up."""
    report = yield
    if call.when == "setup":
        report.shared_fixtures = dict(_shared_fixtures)
        _shared_fixtures.clear()
    return report


def is_long(
    nodeid: str, fixture_names: Iterable[str], seconds: Mapping[str, float], limit_s: float
) -> bool:
    """Whether a test, or a fixture that it shares, took too long when it ran last.

    Fixtures whose names begin with `_` do not count, because all tests need them.

    Args:
        nodeid: Of the test.
        fixture_names: Of the test.
        seconds: What `Durations` has kept.
        limit_s: Limit of a test; that of a fixture is `SHARED_FIXTURE_FACTOR` times as much.
    """
    file = nodeid.partition("::")[0]
    names = [name for name in fixture_names if not name.startswith("_")]
    fixtures = (f"{scope}::{name}" for name in names for scope in ("", file))
    max_fixture_s = max((seconds.get(name, 0.0) for name in fixtures), default=0.0)
    return seconds.get(nodeid, 0.0) > limit_s or max_fixture_s > SHARED_FIXTURE_FACTOR * limit_s
