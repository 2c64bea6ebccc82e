import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.checkpoint import load
from as2ray.distributed.plan import Workers
from as2ray.distributed.score import score
from as2ray.errors import CorpusError
from as2ray.models.ranker import probability
from as2ray.objectives.distillation import Distillation
from as2ray.text.files import PairFiles
from as2ray.text.stream import LOGITS, TEACHERS, Stream
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking
from as2ray.training.train import train_here

HERE = Workers(count=0)


def stored(folder) -> np.ndarray:
    table = PairFiles.find(folder).table()
    return np.stack([table[name].to_numpy() for name in LOGITS], 1)


@pytest.mark.parametrize("labels", [1, 2])
def test_stored_logits_are_the_ranker_s_row_for_row(checkpoint, corpus, tmp_path, labels):
    rate = score(corpus, checkpoint("bert", labels), tmp_path / "logits", HERE, chunk=150)
    assert (rate.pairs, rate.scored) == (400, 400)
    table = PairFiles.find(corpus).table()
    found = PairFiles.find(tmp_path / "logits").table()
    assert found["candidate_id"].equals(table["candidate_id"])
    expected = load(checkpoint("bert", labels)).score_table(table).score
    logits = stored(tmp_path / "logits")
    import torch

    np.testing.assert_allclose(probability(torch.from_numpy(logits)), expected, atol=1e-5)


def test_started_again_it_makes_the_missing_chunks_alone(checkpoint, corpus, tmp_path):
    score(corpus, checkpoint(), tmp_path, HERE, chunk=150)
    paths = sorted(tmp_path.glob("*.parquet"))
    assert len(paths) == 3
    made = {path: path.stat().st_mtime_ns for path in paths}
    before = stored(tmp_path)
    os.rename(paths[1], tmp_path / "part-00001.99.part")  # as a killed run leaves it
    rate = score(corpus, checkpoint(), tmp_path, HERE, chunk=150)
    assert rate.scored == 150
    again = {path: path.stat().st_mtime_ns for path in paths}
    assert [path for path in paths if made[path] != again[path]] == [paths[1]]
    np.testing.assert_array_equal(stored(tmp_path), before)


@pytest.mark.slow
def test_actors_write_what_this_process_writes(checkpoint, corpus, tmp_path, ray_local):
    score(corpus, checkpoint(), tmp_path / "here", HERE, chunk=150)
    workers = Workers(count=2, cpus=0.5, data_cpus=0.5)
    rate = score(corpus, checkpoint(), tmp_path / "actors", workers, chunk=150)
    assert rate.scored == 400
    np.testing.assert_allclose(stored(tmp_path / "actors"), stored(tmp_path / "here"), atol=1e-6)


@pytest.mark.slow
def test_scoring_goes_on_with_the_least_actors_that_fit(checkpoint, corpus, tmp_path, ray_local):
    workers = Workers(count=2, cpus=1.5, data_cpus=0.5, least=1)  # two CPUs hold one such actor
    assert score(corpus, checkpoint(), tmp_path / "actors", workers, chunk=150).scored == 400


def stream_of(checkpoint, corpus, *teachers) -> Stream:
    tokenizer = load(checkpoint()).tokenizer
    files = tuple(PairFiles.find(teacher) for teacher in teachers)
    return Stream(PairFiles.find(corpus), tokenizer, batch=50, teachers=files)


def test_stream_brings_every_pair_its_teachers_logits(checkpoint, corpus, tmp_path):
    for labels in (1, 2):
        score(corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE, chunk=150)
    stream = stream_of(checkpoint, corpus, tmp_path / "1", tmp_path / "2")
    expected = np.concatenate([stored(tmp_path / "1"), stored(tmp_path / "2")], 1)
    seen = 0
    for micro in stream.epoch(0):
        rows = micro.batch.of_sequence["row"]
        np.testing.assert_array_equal(micro.batch.of_sequence[TEACHERS], expected[rows])
        seen += len(rows)
    assert seen == 400


def test_logits_of_fewer_pairs_or_of_another_table_are_refused(checkpoint, corpus, tmp_path):
    score(corpus, checkpoint(), tmp_path / "logits", HERE, chunk=150)
    whole = pq.read_table(tmp_path / "logits")
    other = tiny.write_corpus(tmp_path / "short", whole.slice(0, 399))
    with pytest.raises(CorpusError, match=r"\[399\] pairs for 400"):
        stream_of(checkpoint, corpus, other)
    moved = whole.take(np.roll(np.arange(400), 1))
    stream = stream_of(checkpoint, corpus, tiny.write_corpus(tmp_path / "moved", moved))
    with pytest.raises(CorpusError, match="stored logits of candidate"):
        next(iter(stream.epoch(0)))


def test_student_with_a_head_for_each_teacher_learns_from_stored_logits(
    checkpoint, corpus, tmp_path
):
    for labels in (1, 2):
        score(corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE)
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(10, seed=2))
    job = Job(
        Model(str(checkpoint("bert", None)), max_length=40, exits=(2,), heads=2),
        train=(str(corpus),),
        watched={"dev": str(dev)},
        training=Training(epochs=3, batch=32, learning_rate=5e-3, precision="fp32"),
        objective=Distillation(alpha=0.0, temperature=3.0),
        teachers=((str(tmp_path / "1"),), (str(tmp_path / "2"),)),
        tracking=Tracking(tensorboard=False, every=1),
    )
    student = load(train_here(job, tmp_path / "run"), precision="fp32")
    table = PairFiles.find(corpus).table()
    batch = student.tokenizer.encode(
        table["question"].to_pylist(), table["candidate"].to_pylist()
    ).pack(np.arange(400), {"row": np.arange(400)})
    import torch

    with torch.no_grad():
        heads = probability(student(batch)).numpy()
    for number, labels in enumerate((1, 2)):
        logits = torch.from_numpy(stored(tmp_path / str(labels)))
        teacher = probability(logits).numpy()[batch.of_sequence["row"]]
        own = np.abs(heads[:, number] - teacher).mean()
        assert own < 0.7 * np.abs(teacher - 0.5).mean()
