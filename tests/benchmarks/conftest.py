"""Checkpoints of the benchmarks' small runs."""

from pathlib import Path

import pytest

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError


@pytest.fixture(scope="module")
def encoder() -> Path:
    """The packaged encoder; where it is not installed the test is skipped."""
    try:
        return packaged_minilm()
    except CheckpointError as error:
        pytest.skip(error.problem)


@pytest.fixture(scope="module")
def cascade(encoder, tmp_path_factory) -> str:
    """A checkpoint that drops half of the candidates after its first layer."""
    made = init_ranker(encoder, exit_layers=[1, 2])
    made.drop_ratios = 0.5
    return str(save(made, tmp_path_factory.mktemp("cascade") / "ranker"))
