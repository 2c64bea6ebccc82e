"""Training under Ray Train: two workers, killed half-way, the same result."""

import threading
import time

import psutil
import pytest
import tiny

from as2ray.checkpoint import load
from as2ray.distributed.plan import Workers
from as2ray.distributed.train import fit
from as2ray.text.files import PairFiles
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking, read
from as2ray.training.train import train_here
from as2ray.training.validation import Watched, validate

pytestmark = pytest.mark.slow


def _told(folder, name):
    return {x["step"]: x[name] for x in read(folder / "metrics.jsonl") if name in x}


def _trains(process):
    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:  # gone between the listing and the look
        return False


@pytest.mark.cluster
def test_two_workers_killed_half_way_end_as_one_process_does(
    ray_local, corpus, checkpoint, tmp_path
):
    # Dropout differs between workers by intent; without it only rounding does.
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(20, seed=7))
    job = Job(
        Model(str(still), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        Training(epochs=4, batch=16, learning_rate=1e-3, precision="fp32", validate_every=10),
        tracking=Tracking(every=1, tensorboard=False),
    )
    train_here(job, tmp_path / "here")
    folder = tmp_path / "killed"
    killed = []

    def kill_once():
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not killed:
            reported = _told(folder, "dev/AP")
            if len(reported) >= 2:
                for worker in filter(_trains, psutil.Process().children(True)):
                    worker.kill()
                    killed.append(max(reported))
            time.sleep(0.05)

    watcher = threading.Thread(target=kill_once)
    watcher.start()
    best = fit(job, folder, Workers(count=2, cpus=0.5, data_cpus=1))
    watcher.join()
    assert len(killed) == 2
    assert killed[0] < max(_told(folder, "dev/AP"))
    for name, apart in (("loss", 1e-5), ("dev/AP", 1e-6)):
        assert _told(folder, name) == pytest.approx(_told(tmp_path / "here", name), abs=apart)
    ranker = load(best, precision="fp32")
    found = validate(ranker, {"dev": Watched.pack(PairFiles.find(dev).table(), ranker, 400)})
    assert found["dev/AP"] == pytest.approx(max(_told(folder, "dev/AP").values()))
