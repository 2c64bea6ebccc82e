"""Training runs as trials."""

from dataclasses import replace

import pytest
import tiny

from as2ray.distributed.tune import search_training
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import TrackingConfig


def space(trial):
    trial.suggest_float("rate", 1e-4, 1e-3, log=True)


@pytest.mark.slow
def test_trials_whose_workers_fill_the_cluster_come_one_after_the_other(
    corpus, checkpoint, tmp_path, ray_local
):
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(20, seed=7))
    job = TrainingJob(
        ModelSpec(str(checkpoint()), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        TrainingConfig(epochs=1, global_batch_size=64, learning_rate=1e-3, precision="fp32"),
        tracking=TrackingConfig(tensorboard=False),
    )

    def chosen(config):
        training = replace(job.training, learning_rate=config["rate"])
        return replace(job, training=training)

    config, quality = search_training(
        chosen, space, tmp_path / "tune", WorkersConfig(), num_trials=2
    )
    assert 1e-4 <= config["rate"] <= 1e-3
    assert 0 < quality <= 1
    trials = sorted((tmp_path / "tune" / "runs").iterdir())
    assert len(trials) == 2
    assert all((trial / "metrics.jsonl").exists() for trial in trials)
