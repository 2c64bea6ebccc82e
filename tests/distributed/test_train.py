"""Training under Ray Train: several workers, one killed half-way, the same result."""

import threading
import time
from dataclasses import replace

import psutil
import pytest
import tiny
import torch

from as2ray.checkpoint import load
from as2ray.distributed.plan import Workers
from as2ray.distributed.train import fit
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking, read
from as2ray.training.train import train_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(corpus, checkpoint, tmp_path_factory):
    dev = tiny.write_corpus(tmp_path_factory.mktemp("dev"), tiny.candidates(20, seed=7))
    return Job(
        Model(str(checkpoint()), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        Training(epochs=2, batch=16, learning_rate=1e-3, precision="fp32", validate_every=10),
        tracking=Tracking(every=1, tensorboard=False),
    )


def _losses(folder):
    return {x["step"]: x["loss"] for x in read(folder / "metrics.jsonl") if "loss" in x}


def _maps(folder):
    return {x["step"]: x["dev/AP"] for x in read(folder / "metrics.jsonl") if "dev/AP" in x}


def _trains(process):
    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:  # gone between the listing and the look
        return False


def _weights(ranker):
    return torch.cat([p.flatten() for p in load(ranker, precision="fp32").parameters()])


@pytest.mark.cluster
def test_worker_killed_half_way_ends_with_the_same_result(ray_local, job, tmp_path):
    job = replace(job, training=replace(job.training, epochs=6))
    expected = train_here(job, tmp_path / "here")
    folder = tmp_path / "killed"
    killed = []

    def kill_once():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not killed:
            lines = read(folder / "metrics.jsonl")
            reported = [x for x in lines if "dev/AP" in x]
            if len(reported) >= 2:
                for worker in filter(_trains, psutil.Process().children(True)):
                    worker.kill()
                    killed.append(reported[-1]["step"])
            time.sleep(0.05)

    watcher = threading.Thread(target=kill_once)
    watcher.start()
    best = fit(job, folder, Workers(count=1, cpus=0.5, data_cpus=1))
    watcher.join()
    assert killed
    assert killed[0] < max(_maps(folder))
    assert _losses(folder) == pytest.approx(_losses(tmp_path / "here"), abs=1e-5)
    assert _maps(folder) == pytest.approx(_maps(tmp_path / "here"), abs=1e-6)
    # Workers have other thread counts; AdamW enlarges rounding where a gradient is almost 0.
    assert (_weights(best) - _weights(expected)).abs().mean() < 1e-5


def test_two_workers_train_as_one_process_does(ray_local, job, checkpoint, tmp_path):
    # Dropout differs between workers by intent; without it only rounding does.
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    job = replace(job, model=replace(job.model, path=str(still)))
    train_here(job, tmp_path / "one")
    fit(job, tmp_path / "two", Workers(count=2, cpus=0.5, data_cpus=1))
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), abs=2e-4)
    assert _maps(tmp_path / "two").keys() == _maps(tmp_path / "one").keys()
