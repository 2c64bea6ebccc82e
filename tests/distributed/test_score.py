import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.checkpoints.loading import load
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed.score import store_logits
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import CorpusError
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.ranker import positive_probability
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig

HERE = WorkersConfig(num_workers=0)


def stored(folder) -> np.ndarray:
    table = ParquetTable.open(folder).to_table()
    return np.stack([table[name].to_numpy() for name in LOGIT_COLUMNS], 1)


@pytest.mark.parametrize("labels", [1, 2])
def test_stored_logits_are_the_ranker_s_row_for_row(checkpoint, corpus, tmp_path, labels):
    summary = store_logits(
        corpus, checkpoint("bert", labels), tmp_path / "logits", HERE, chunk_size=150
    )
    assert (summary.num_pairs, summary.num_scored) == (400, 400)
    table = ParquetTable.open(corpus).to_table()
    found = ParquetTable.open(tmp_path / "logits").to_table()
    assert found["candidate_id"].equals(table["candidate_id"])
    expected = load(checkpoint("bert", labels)).predict_table(table).scores
    logits = stored(tmp_path / "logits")
    import torch

    np.testing.assert_allclose(positive_probability(torch.from_numpy(logits)), expected, atol=1e-5)


def test_started_again_it_makes_the_missing_chunks_alone(checkpoint, corpus, tmp_path):
    store_logits(corpus, checkpoint(), tmp_path, HERE, chunk_size=150)
    paths = sorted(tmp_path.glob("*.parquet"))
    assert len(paths) == 3
    made = {path: path.stat().st_mtime_ns for path in paths}
    before = stored(tmp_path)
    os.rename(paths[1], tmp_path / ".part-00001.parquet-1.part")  # as a killed run leaves it
    summary = store_logits(corpus, checkpoint(), tmp_path, HERE, chunk_size=150)
    assert summary.num_scored == 150
    again = {path: path.stat().st_mtime_ns for path in paths}
    assert [path for path in paths if made[path] != again[path]] == [paths[1]]
    np.testing.assert_array_equal(stored(tmp_path), before)


@pytest.mark.slow
def test_actors_write_what_this_process_writes(checkpoint, corpus, tmp_path, ray_local):
    store_logits(corpus, checkpoint(), tmp_path / "here", HERE, chunk_size=150)
    workers = WorkersConfig(num_workers=2, cpus_per_worker=0.5, num_data_cpus=0.5)
    summary = store_logits(corpus, checkpoint(), tmp_path / "actors", workers, chunk_size=150)
    assert summary.num_scored == 400
    np.testing.assert_allclose(stored(tmp_path / "actors"), stored(tmp_path / "here"), atol=1e-6)


@pytest.mark.slow
def test_scoring_goes_on_with_the_least_actors_that_fit(checkpoint, corpus, tmp_path, ray_local):
    workers = WorkersConfig(
        num_workers=2, cpus_per_worker=1.5, num_data_cpus=0.5, min_workers=1
    )  # two CPUs hold one such actor
    assert (
        store_logits(corpus, checkpoint(), tmp_path / "actors", workers, chunk_size=150).num_scored
        == 400
    )


def create_dataset(checkpoint, corpus, *teachers) -> PackedDataset:
    tokenizer = load(checkpoint()).tokenizer
    files = tuple(ParquetTable.open(teacher) for teacher in teachers)
    reader = PairReader(ParquetTable.open(corpus), tokenizer, teachers=files)
    return PackedDataset(reader, global_batch_size=50)


def test_stream_brings_every_pair_its_teachers_logits(checkpoint, corpus, tmp_path):
    for labels in (1, 2):
        store_logits(
            corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE, chunk_size=150
        )
    dataset = create_dataset(checkpoint, corpus, tmp_path / "1", tmp_path / "2")
    expected = np.concatenate([stored(tmp_path / "1"), stored(tmp_path / "2")], 1)
    seen = 0
    for micro in dataset.epoch(0):
        rows = micro.batch.sequence_data["row"]
        np.testing.assert_array_equal(micro.batch.sequence_data[TEACHER_LOGITS], expected[rows])
        seen += len(rows)
    assert seen == 400


def test_logits_of_fewer_pairs_or_of_another_table_are_refused(checkpoint, corpus, tmp_path):
    store_logits(corpus, checkpoint(), tmp_path / "logits", HERE, chunk_size=150)
    whole = pq.read_table(tmp_path / "logits")
    other = tiny.write_corpus(tmp_path / "short", whole.slice(0, 399))
    with pytest.raises(CorpusError, match=r"\[399\] pairs, the table has 400"):
        create_dataset(checkpoint, corpus, other)
    moved = whole.take(np.roll(np.arange(400), 1))
    dataset = create_dataset(checkpoint, corpus, tiny.write_corpus(tmp_path / "moved", moved))
    with pytest.raises(CorpusError, match="its logits are of"):
        next(iter(dataset.epoch(0)))


def test_student_with_a_head_for_each_teacher_learns_from_stored_logits(
    checkpoint, corpus, tmp_path
):
    for labels in (1, 2):
        store_logits(corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE)
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(10, seed=2))
    job = TrainingJob(
        ModelSpec(
            str(checkpoint("bert", None)), max_length=40, exit_layers=(2,), num_ranking_heads=2
        ),
        train_tables=(str(corpus),),
        eval_tables={"dev": str(dev)},
        training=TrainingConfig(
            epochs=3, global_batch_size=32, learning_rate=5e-3, precision="fp32"
        ),
        loss=DistillationLoss(alpha=0.0, temperature=3.0),
        teacher_logits=((str(tmp_path / "1"),), (str(tmp_path / "2"),)),
        tracking=TrackingConfig(tensorboard=False, log_every_steps=1),
    )
    student = load(train(job, tmp_path / "run"), dtype="fp32")
    table = ParquetTable.open(corpus).to_table()
    batch = student.tokenizer.encode(
        table["question"].to_pylist(), table["candidate"].to_pylist()
    ).pack(np.arange(400), {"row": np.arange(400)})
    import torch

    with torch.no_grad():
        heads = positive_probability(student(batch)).numpy()
    for number, labels in enumerate((1, 2)):
        logits = torch.from_numpy(stored(tmp_path / str(labels)))
        teacher = positive_probability(logits).numpy()[batch.sequence_data["row"]]
        error = np.abs(heads[:, number] - teacher).mean()
        assert error < 0.7 * np.abs(teacher - 0.5).mean()
