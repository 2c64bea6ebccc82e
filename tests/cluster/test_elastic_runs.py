"""Nodes that come and go: training goes on with the same losses."""

import pytest
from running import workers

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TOLERANCE = 1e-4
"""Of the losses: a sum over other shares of a step rounds otherwise."""

EPOCHS = 25
"""Of the run that grows and shrinks: three seconds each, and Ray looks for nodes every twenty."""


def test_run_grows_with_a_node_that_comes_and_goes_on_without_one_that_is_lost(
    cluster, start, expected
):
    first = cluster.add_node(num_cpus=2)
    run = start(
        EPOCHS, pace=3, num_workers=2, num_data_cpus=2, min_workers=1, elastic_resize_interval_s=1
    )
    run.until(lambda: len(run.maps()) >= 2)
    assert len(workers()) == 1
    cluster.add_node(num_cpus=2)
    run.until(lambda: len(workers()) == 2)
    grown = max(run.maps())
    run.until(lambda: max(run.maps()) > grown)
    cluster.remove_node(first, allow_graceful=False)
    lost = max(run.maps())
    # A run that began anew would have no MAP at all for a while.
    run.until(lambda: max(run.maps()) > lost and len(workers()) == 1)
    undisturbed = expected(EPOCHS)
    found = run.losses()
    assert found == pytest.approx({step: undisturbed[step] for step in found}, abs=TOLERANCE)
