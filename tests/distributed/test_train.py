"""Where runs under Ray Train keep their checkpoints; `tests/cluster` loses nodes."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import ray.train
import tiny
import torch
from ray.train import Checkpoint

from as2ray.checkpoints.loading import load
from as2ray.distributed import train as train_module
from as2ray.distributed.train import open_checkpoint, run_name, train_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import DivergedError
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig, read_metrics

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_runs_on_one_storage_have_each_their_name_and_keep_it(tmp_path):
    # A pipeline's runs are all called alike, and Ray resumes whatever has the name.
    folders = [tmp_path / "rankers" / f"step-seed{n}" / "scratch" / "run" for n in range(2)]
    names = [run_name(folder, tmp_path / "storage") for folder in folders]
    assert len(set(names)) == 2
    assert names == [run_name(folder, tmp_path / "storage") for folder in folders]
    assert all(name.startswith(f"step-seed{n}-") for n, name in enumerate(names))
    # What was thrown away is not gone on with.
    shutil.rmtree(folders[0])
    assert run_name(folders[0], tmp_path / "storage") not in names


def test_checkpoint_is_read_where_it_lies_or_as_a_copy_that_goes(tmp_path):
    (tmp_path / "weights").write_text("here")
    with open_checkpoint(Checkpoint.from_directory(str(tmp_path))) as folder:
        assert (folder / "weights").read_text() == "here"
    with open_checkpoint(None) as folder:
        assert folder is None


def test_run_in_its_own_folder_has_the_folder_s_name(tmp_path):
    assert run_name(tmp_path / "x.part" / "run", tmp_path / "x.part") == "run"


def train_and_die(config):
    """The function of a worker; rank 1 is killed once while its second resume state is uploaded."""
    folder, report, num_states = Path(config["folder"]), ray.train.report, 0
    rank = ray.train.get_context().get_world_rank()
    with open_checkpoint(ray.train.get_checkpoint()) as state:
        files = sorted(path.name for path in (state / "optimizer").iterdir()) if state else []
        steps = json.loads((state / "progress.json").read_text())["global_step"] if state else 0
    with (folder.parent / f"starts-{rank}").open("a") as file:
        file.write(f"{steps} {' '.join(files)}\n")
    torch.set_num_threads(3)  # as OMP_NUM_THREADS may say

    def upload_half(checkpoint, name):
        (Path(ray.train.get_context().get_storage().experiment_fs_path) / name).mkdir(exist_ok=True)
        (folder.parent / "uploading").touch()
        time.sleep(600)

    def report_and_die(metrics, checkpoint=None, **how):
        nonlocal num_states
        num_states += checkpoint is not None
        is_fatal = rank == 1 and not steps and num_states == 2
        (folder.parent / f"num_threads-{rank}").write_text(str(torch.get_num_threads()))
        started_at = time.perf_counter()
        report(metrics, checkpoint, checkpoint_upload_fn=upload_half if is_fatal else None, **how)
        duration_s = time.perf_counter() - started_at
        if is_fatal:
            while not (folder.parent / "uploading").exists():
                time.sleep(0.01)
            (folder.parent / "report_s").write_text(str(duration_s))
            os.kill(os.getpid(), signal.SIGKILL)

    ray.train.report = report_and_die
    return train_module._train_worker(config)


# Workers cannot import a module of tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_sharded_run_killed_while_it_uploads_a_state_ends_as_if_it_had_lived(
    checkpoint, corpus, tmp_path, ray_local, monkeypatch
):
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(20, seed=7))
    settings = {"epochs": 1, "global_batch_size": 16, "learning_rate": 3e-3, "precision": "fp32"}
    model = checkpoint("bert", None, num_hidden_layers=2, **NO_DROPOUT)
    job = TrainingJob(
        ModelSpec(str(model), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        TrainingConfig(**settings, eval_steps=5, fsdp=True),
        tracking=TrackingConfig(log_every_steps=1, tensorboard=False),
    )
    alone = train(job, tmp_path / "alone")
    monkeypatch.setattr(train_module, "_train_worker", train_and_die)
    workers = WorkersConfig(
        num_workers=2,
        cpus_per_worker=0.5,
        resume_interval_s=0.001,
        preemption_check_steps=6,
        storage_path=str(tmp_path / "storage"),
    )
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    before = ray.util.placement_group_table()
    selected = train_on_ray(job, folder, workers)
    # A worker holds the CPUs of its data. If they were outside of its bundle, two runs could hold a
    # worker each and wait for ever for the CPUs that the other one has.
    groups = ray.util.placement_group_table()
    assert [groups[name]["bundles"] for name in groups.keys() - before.keys()] == [
        {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}
    ] * 2
    # The first state is complete, with the parts of all workers, and the second is not.
    for rank in range(2):
        starts = (folder.parent / f"starts-{rank}").read_text().splitlines()
        assert starts == ["0 ", "6 .metadata __0_0.distcp __1_0.distcp"]
        # A worker has the threads of its bundle.
        assert (folder.parent / f"num_threads-{rank}").read_text() == "1"
    assert float((folder.parent / "report_s").read_text()) < 60
    losses, expected = (
        {
            line["step"]: line["train/loss"]
            for line in read_metrics(run / "metrics.jsonl")
            if "train/loss" in line
        }
        for run in (folder, tmp_path / "alone")
    )
    assert losses == pytest.approx(expected, abs=1e-4)
    found, whole = (load(path).state_dict() for path in (selected, alone))
    for name, weights in whole.items():
        torch.testing.assert_close(found[name], weights, atol=1e-4, rtol=1e-3)
    # Nothing is left on the storage, and the complete run is not started again.
    assert not list((tmp_path / "storage").iterdir())
    assert train_on_ray(job, folder, workers) == selected == folder / "best" / "ranker"
    assert (folder.parent / "starts-0").read_text().count("\n") == 2


def test_checkpoints_of_a_run_killed_at_its_end_are_removed(tmp_path):
    folder, storage = tmp_path / "run", tmp_path / "storage"
    (folder / "best" / "ranker").mkdir(parents=True)
    run_folder = storage / run_name(folder, storage)
    (run_folder / "checkpoint").mkdir(parents=True)
    job = TrainingJob(ModelSpec("unused"), ("unused",), {}, TrainingConfig(epochs=1))
    workers = WorkersConfig(storage_path=str(storage))
    assert train_on_ray(job, folder, workers) == folder / "best" / "ranker"
    assert not list(storage.iterdir())


def train_and_count(config):
    """The function of a worker; writes a line for each start."""
    with (Path(config["folder"]).parent / "starts").open("a") as file:
        file.write("start\n")
    return train_module._train_worker(config)


@pytest.mark.slow
def test_run_whose_loss_is_not_finite_is_not_repeated(
    checkpoint, corpus, tmp_path, ray_local, monkeypatch
):
    job = TrainingJob(
        ModelSpec(str(checkpoint("bert", None)), max_length=32),
        (str(corpus),),
        {"dev": str(corpus)},
        TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e30, precision="fp32"),
        tracking=TrackingConfig(log_every_steps=1, tensorboard=False),
    )
    monkeypatch.setattr(train_module, "_train_worker", train_and_count)
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    workers = WorkersConfig(num_workers=1, cpus_per_worker=1)
    with pytest.raises(DivergedError, match=r"the loss is nan after \d steps"):
        train_on_ray(job, folder, workers)
    assert (folder.parent / "starts").read_text() == "start\n"
