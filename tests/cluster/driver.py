"""A user's program that trains on the cluster of RAY_ADDRESS; tests run it, and kill it.

python driver.py CHECKPOINT CORPUS DEV FOLDER EPOCHS WORKERS
"""

import json
import sys
from pathlib import Path

from as2ray.distributed.cluster import ray_session
from as2ray.distributed.train import train_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import TrackingConfig


def job(checkpoint: Path, corpus: Path, dev: Path, epochs: int) -> TrainingJob:
    """A job whose result depends on nothing but rounding."""
    return TrainingJob(
        ModelSpec(str(checkpoint), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        TrainingConfig(
            epochs=epochs, global_batch_size=16, learning_rate=1e-3, precision="fp32", eval_steps=25
        ),
        tracking=TrackingConfig(log_every_steps=1, tensorboard=False),
    )


if __name__ == "__main__":
    checkpoint, corpus, dev, folder, epochs, workers = sys.argv[1:]
    with ray_session():
        made = job(Path(checkpoint), Path(corpus), Path(dev), int(epochs))
        best = train_on_ray(made, folder, WorkersConfig(**json.loads(workers)))
    sys.stdout.write(f"{best}\n")
