import math

import numpy as np
import pytest
from training_runs import loop_of, told

from as2ray.errors import TrainingError
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig


# Independent scores lose about the margin; of a list of five, the logarithm of five.
@pytest.mark.parametrize(("objective", "at_first"), [("margin", 1.0), ("listwise", math.log(5))])
def test_training_on_lists_learns_to_rank(checkpoint, corpus, tmp_path, objective, at_first):
    model = checkpoint("bert", None, num_hidden_layers=2, initializer_range=0.1)
    job = TrainingJob(
        ModelSpec(str(model), max_length=40),
        (str(corpus),),
        {"dev": str(corpus)},
        TrainingConfig(
            **{"epochs": 8, "batch": 16, "learning_rate": 3e-3, "head_learning_rate": 6e-3},
            **{"schedule": "constant", "warmup": 0.2, "weight_decay": 1e-7, "precision": "fp32"},
            **{"max_tokens": 640, "validate_every": 20},
        ),
        objective,
        tracking=TrackingConfig(log_every_steps=1, tensorboard=False),
    )
    train(job, tmp_path)
    losses = [x["loss"] for x in told(tmp_path, "loss")]
    assert len(losses) == 8 * 5
    assert losses[0] == pytest.approx(at_first, abs=0.3)
    assert np.mean(losses[-5:]) < 0.3 * at_first
    assert told(tmp_path, "dev/AP")[-1]["dev/AP"] > 0.85


def test_margin_over_plain_rows_is_refused(checkpoint, corpus, tmp_path):
    loop = loop_of(
        checkpoint("bert", None), corpus, tmp_path, objective=MarginRankingLoss(), epochs=1
    )
    with pytest.raises(TrainingError, match="ListStream"):
        loop.fit()
