"""A user's program that trains on the cluster of RAY_ADDRESS; tests run it, and kill it.

python driver.py CHECKPOINT CORPUS DEV FOLDER EPOCHS WORKERS
"""

import json
import sys
from pathlib import Path

from as2ray.distributed.cluster import connected
from as2ray.distributed.plan import Workers
from as2ray.distributed.train import fit
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking


def job(checkpoint: Path, corpus: Path, dev: Path, epochs: int) -> Job:
    """A job whose result depends on nothing but rounding."""
    return Job(
        Model(str(checkpoint), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        Training(epochs=epochs, batch=16, learning_rate=1e-3, precision="fp32", validate_every=25),
        tracking=Tracking(every=1, tensorboard=False),
    )


if __name__ == "__main__":
    checkpoint, corpus, dev, folder, epochs, workers = sys.argv[1:]
    with connected():
        made = job(Path(checkpoint), Path(corpus), Path(dev), int(epochs))
        best = fit(made, folder, Workers(**json.loads(workers)))
    sys.stdout.write(f"{best}\n")
