"""How many examples a step of a run has."""

import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import _create_dataset


@pytest.fixture
def dataset(checkpoint, tmp_path):
    """Opens 60 pairs as a run does: `dataset(global_batch_size=8)`."""
    corpus = tiny.write_corpus(tmp_path / "train", tiny.candidates(12))
    model = checkpoint("bert", None)

    def make(**training):
        config = TrainingConfig(epochs=1, precision="fp32", **training)
        job = TrainingJob(ModelSpec(str(model), max_length=40), (str(corpus),), {}, config)
        return _create_dataset(job, init_ranker(model, max_length=40))

    return make


def test_a_batch_of_tokens_has_as_many_examples_of_mean_length(dataset):
    mean_length = dataset().mean_length()
    assert dataset(global_batch_tokens=round(10 * mean_length)).global_batch_size == 10
    assert dataset(global_batch_tokens=1).global_batch_size == 1


@pytest.mark.parametrize(("size", "is_told"), [(60, False), (61, True)])
def test_a_batch_larger_than_the_table_is_told(dataset, caplog, size, is_told):
    dataset(global_batch_size=size)
    assert ("larger than the 60 examples" in caplog.text) == is_told
