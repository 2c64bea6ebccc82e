"""Tables and rankers of the command line's tests."""

import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.saving import save


@pytest.fixture
def prepared(tmp_path):
    return tiny.write_corpus(tmp_path / "table", tiny.candidates(12, seed=3))


@pytest.fixture
def cascade(checkpoint, tmp_path) -> str:
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    return str(save(ranker, tmp_path / "cascade"))
