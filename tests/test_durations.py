"""What `make fast` leaves out."""

from types import SimpleNamespace

import durations
import pytest

TEST = "tests/a/test_b.py::test_c"


@pytest.fixture
def kept():
    """Durations as they are kept after reports of one test: `kept(*reports)`."""

    def keep(*reports) -> dict[str, float]:
        stored = {"tests/old.py::test_old": 0.5}
        cache = SimpleNamespace(get=lambda *_: stored, set=lambda _, values: stored.update(values))
        plugin = durations.Durations(cache)
        for duration_s, shared in reports:
            plugin.pytest_runtest_logreport(
                SimpleNamespace(nodeid=TEST, duration=duration_s, shared_fixtures=shared)
            )
        plugin.pytest_sessionfinish()
        return stored

    return keep


def test_test_has_its_own_seconds_and_not_those_of_fixtures_that_others_share(kept):
    ray, model = "::ray_local", "tests/a/test_b.py::model"
    seconds = kept((4.05, {ray: 3.0, model: 1.0}), (0.01, {}), (2.0, {ray: 2.0}))
    assert seconds[TEST] == pytest.approx(0.06)
    assert (seconds[ray], seconds[model], seconds["tests/old.py::test_old"]) == (3.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, False),
        ({TEST: 0.05}, False),
        ({TEST: 0.06}, True),
        ({"::model": 1.0, "tests/a/test_b.py::model": 0.9}, False),
        ({"::model": 1.1}, True),
        ({"tests/a/test_b.py::model": 1.1}, True),
        ({"tests/a/test_d.py::model": 1.1, "::other": 9.0}, False),
        ({"::_on_cpu": 9.0}, False),
    ],
)
def test_tests_that_took_long_or_share_a_long_fixture_are_left_out(seconds, expected):
    names = ["_on_cpu", "model", "tmp_path"]
    assert durations.is_long(TEST, names, seconds, 0.05) is expected


@pytest.fixture(scope="module")
def shared() -> None:
    """A fixture that tests share."""


@pytest.fixture
def noted(shared) -> dict[str, float]:
    """What is noted when the setup of the test is about to end."""
    return dict(durations._shared_fixtures)


def test_setup_of_a_test_notes_the_fixtures_that_it_shares(noted, request):
    name = f"{request.node.nodeid.partition('::')[0]}::shared"
    assert 0 <= noted[name] < 60
    assert not any(key.endswith("::noted") for key in noted)
    assert not durations._shared_fixtures  # they are in the report
