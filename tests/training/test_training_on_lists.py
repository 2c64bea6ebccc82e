import math

import numpy as np
import pytest
from training_runs import create_trainer, read_logged, read_losses

from as2ray.errors import TrainingError
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig


# Independent scores lose about the margin; of a list of five, the logarithm of five.
@pytest.mark.parametrize(
    ("loss", "at_first"), [("margin_ranking", 1.0), ("listwise_cross_entropy", math.log(5))]
)
def test_training_on_lists_learns_to_rank(checkpoint, corpus, tmp_path, loss, at_first):
    model = checkpoint("bert", None, num_hidden_layers=2, initializer_range=0.1)
    job = TrainingJob(
        ModelSpec(str(model), max_length=40),
        (str(corpus),),
        {"dev": str(corpus)},
        TrainingConfig(
            **{
                "epochs": 8,
                "global_batch_size": 16,
                "learning_rate": 3e-3,
                "head_learning_rate": 6e-3,
            },
            **{
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.2,
                "weight_decay": 1e-7,
                "precision": "fp32",
            },
            **{"max_batch_tokens": 640, "eval_steps": 20},
        ),
        loss,
        tracking=TrackingConfig(log_every_steps=1, tensorboard=False),
    )
    train(job, tmp_path)
    losses = read_losses(tmp_path)
    assert len(losses) == 8 * 5
    assert losses[0] == pytest.approx(at_first, abs=0.3)
    assert np.mean(losses[-5:]) < 0.3 * at_first
    assert read_logged(tmp_path, "dev/AP")[-1]["dev/AP"] > 0.85


def test_margin_over_plain_rows_is_refused(checkpoint, corpus, tmp_path):
    loop = create_trainer(
        checkpoint("bert", None), corpus, tmp_path, loss=MarginRankingLoss(), epochs=1
    )
    with pytest.raises(TrainingError, match="ListReader"):
        loop.fit()
