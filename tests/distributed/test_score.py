"""Chunks of scores: what they hold, and that they do not depend on what makes them."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.margins import Margins
from as2ray.checkpoints.initialization import build_sequential, init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed import score
from as2ray.distributed.score import read_scores, score_table
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import CheckpointError, ConfigError, CorpusError, TrainingError
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.ranker import positive_probability
from as2ray.tables.filters import filter_table
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS, group_by_passage
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig

HERE = WorkersConfig(num_workers=0)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """The corpus of 400 pairs has four chunks."""
    monkeypatch.setattr(score, "CHUNK_SIZES", (101, 65_536))


@pytest.fixture(scope="session")
def ranker_of(checkpoint, tmp_path_factory) -> Callable[[str], Path]:
    """Writes a small ranker of a kind: `ranker_of("cascade")`."""
    root = tmp_path_factory.mktemp("rankers")
    encoder = partial(init_ranker, checkpoint("bert", None), max_length=40)

    @cache
    def make(kind: str) -> Path:
        if kind == "not saved":
            return checkpoint("bert", 2)
        if kind == "sequential":
            members = [load(checkpoint("bert", 2, num_hidden_layers=n)) for n in (1, 3)]
            return save(build_sequential(members), root / kind)
        if kind == "ensemble":
            members = [load(checkpoint(family, 2)) for family in ("bert", "roberta")]
            return save(EnsembleRanker(members, [0.25, 0.75]), root / kind)
        options = {
            "pointwise": {},
            "cascade": {"exit_layers": (1, 2, 3)},
            "cerberus": {"exit_layers": (2,), "num_ranking_heads": 2},
            "joint": {"is_joint": True, "extract_answers": True},
            "joint without answers": {"is_joint": True},
        }[kind]
        return save(encoder(**options), root / kind)

    return make


@pytest.fixture(scope="session")
def passage_corpus(tmp_path_factory) -> Path:
    """60 questions, each with a passage of two and one of three sentences."""
    table = tiny.candidates(60)
    position = np.arange(table.num_rows) % 5
    passage = (position > 1).astype(int)
    columns = {
        "passage_id": pa.array([f"p{n}" for n in passage]),
        "title": pa.array([f"Title {n}" for n in passage]),
        "sentence_index": pa.array(position - 2 * passage, pa.int16()),
        "passage_label": pa.array(np.zeros(table.num_rows), pa.int8()),
        "answer": pa.array([""] * table.num_rows),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return tiny.write_corpus(tmp_path_factory.mktemp("passages"), table, files=2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored_logits(folder: Path) -> np.ndarray:
    table = read_scores(folder)
    return np.stack([table[name].to_numpy() for name in LOGIT_COLUMNS], 1)


# Content of each kind


@pytest.mark.parametrize("kind", ["not saved", "pointwise"])
def test_stored_logits_are_the_ranker_s_row_for_row(ranker_of, corpus, tmp_path, kind):
    import torch

    summary = score_table(corpus, ranker_of(kind), tmp_path, HERE)
    assert (summary.num_pairs, summary.num_scored, summary.ranker) == (400, 400, {})
    assert summary.num_bytes == sum(map(len, files_of(tmp_path).values()))
    table, stored = ParquetTable.open(corpus).to_table(), read_scores(tmp_path)
    assert stored.column_names == ["candidate_id", *LOGIT_COLUMNS]
    assert stored["candidate_id"].equals(table["candidate_id"])
    expected = load(ranker_of(kind)).predict_table(table).scores
    scores = positive_probability(torch.from_numpy(stored_logits(tmp_path)))
    np.testing.assert_allclose(scores, expected, atol=0.01)


def test_stored_scores_of_a_cascade_with_bm25_are_those_of_the_whole_table(
    ranker_of, corpus, tmp_path
):
    ranker = load(ranker_of("cascade"))
    ranker.margins, ranker.bm25_margin = Margins((0.05, 0.05)), 0.1
    ranker.bm25_weights = (2.0, 1.0)
    save(ranker, tmp_path / "ranker")
    score_table(corpus, tmp_path / "ranker", tmp_path / "scores", HERE, "score")
    expected = ranker.predict_table(ParquetTable.open(corpus).to_table())
    assert -1 in expected.stage_index  # left by BM25
    stored = read_scores(tmp_path / "scores")["score"].to_numpy()
    np.testing.assert_array_equal(np.floor(stored), expected.stage_index)


@pytest.mark.parametrize("kind", ["pointwise", "cascade", "sequential", "ensemble", "joint"])
def test_stored_scores_are_those_of_the_whole_table(ranker_of, corpus, tmp_path, kind):
    drop_ratio = 0.4 if kind in ("cascade", "sequential") else None
    ranker = load(ranker_of(kind))
    score_table(corpus, ranker_of(kind), tmp_path, HERE, "score", drop_ratio=drop_ratio)
    table, stored = ParquetTable.open(corpus).to_table(), read_scores(tmp_path)
    for name in ("question_id", "candidate_id"):
        assert stored[name].equals(table[name])
    expected = ranker.predict_table(table, drop_ratio).sort_keys
    np.testing.assert_allclose(stored["score"].to_numpy(), expected, atol=0.01)
    if drop_ratio:
        # The digit before the point is the exit that scored last: as many of each question remain.
        assert len(np.unique(np.floor(expected))) == len(ranker.exit_layers)
        np.testing.assert_array_equal(np.floor(stored["score"]), np.floor(expected))


@pytest.mark.parametrize("kind", ["pointwise", "cascade", "sequential", "ensemble"])
def test_stored_exits_have_what_a_replay_needs(ranker_of, corpus, tmp_path, kind):
    ranker = load(ranker_of(kind))
    summary = score_table(corpus, ranker_of(kind), tmp_path, HERE, "exits")
    table, stored = ParquetTable.open(corpus).to_table(), read_scores(tmp_path)
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    layers = ranker.exit_layers or (3,)
    assert stored.column_names == ["tokens", *map(str, layers)]
    np.testing.assert_array_equal(stored["tokens"], ranker.tokenizer.encode(*texts).lengths)
    for layer, expected in zip(layers, ranker.predict_exits(*texts).T):
        np.testing.assert_allclose(stored[str(layer)].to_numpy(), expected, atol=0.01)
    assert summary.ranker["sequential"] == (kind == "sequential")
    if kind == "ensemble":
        assert summary.ranker["shape"] is None
    else:
        shape = EncoderShape(**summary.ranker["shape"])
        assert shape == EncoderShape.from_config(ranker.network.config)
    # Another attempt, which has nothing to score, still tells them.
    assert score_table(corpus, ranker_of(kind), tmp_path, HERE, "exits").ranker == summary.ranker


def test_stored_heads_average_to_the_score_of_the_last_exit(ranker_of, corpus, tmp_path):
    score_table(corpus, ranker_of("cerberus"), tmp_path, HERE, "heads")
    heads = read_scores(tmp_path)
    assert heads.column_names == ["head 0", "head 1"]
    table = ParquetTable.open(corpus).to_table()
    expected = load(ranker_of("cerberus")).predict_table(table).scores
    mean = (heads["head 0"].to_numpy() + heads["head 1"].to_numpy()) / 2
    np.testing.assert_allclose(mean, expected, atol=0.01)


def test_stored_passages_answer_any_selection_without_the_model(
    ranker_of, passage_corpus, tmp_path
):
    ranker = load(ranker_of("joint"))
    score_table(passage_corpus, ranker_of("joint"), tmp_path, HERE, "passages")
    stored = read_scores(tmp_path)
    passages = group_by_passage(ParquetTable.open(passage_corpus).to_table())
    assert stored.num_rows == passages.num_rows == 120
    for name in ("question_id", "passage_id"):
        assert stored[name].equals(passages[name])
    texts = (passages["question"].to_pylist(), passages["candidate"].to_pylist())
    scores, sentence_scores = ranker.predict_passages(*texts)
    np.testing.assert_allclose(stored["score"].to_numpy(), scores, atol=0.02)
    flat = pc.list_flatten(stored["sentence_scores"]).to_numpy()
    np.testing.assert_allclose(flat, sentence_scores, atol=0.02)
    answers, answer_scores = stored["answers"].to_pylist(), stored["answer_scores"].to_pylist()
    expected = ranker.extract_answers(*texts)
    assert len(expected) == len(flat) == 300
    same = [a.text == answers[a.passage_index][a.sentence_index] for a in expected]
    assert np.mean(same) > 0.95  # spans with almost equal scores may change with the batch
    np.testing.assert_allclose(
        [answer_scores[a.passage_index][a.sentence_index] for a in expected],
        [a.score for a in expected],
        atol=0.02,
    )


def test_sentence_without_tokens_has_no_answer(ranker_of, passage_corpus, tmp_path):
    table = ParquetTable.open(passage_corpus).to_table().slice(0, 5)
    candidates = pa.array(["\u200b", *table["candidate"].to_pylist()[1:]])
    table = table.set_column(table.column_names.index("candidate"), "candidate", candidates)
    corpus = tiny.write_corpus(tmp_path / "corpus", table)
    score_table(corpus, ranker_of("joint"), tmp_path / "scores", HERE, "passages")
    answers = read_scores(tmp_path / "scores")["answers"].to_pylist()
    assert [[answer is None for answer in row] for row in answers] == [[True, False], [False] * 3]


def test_joint_model_without_answers_stores_none(ranker_of, passage_corpus, tmp_path):
    score_table(passage_corpus, ranker_of("joint without answers"), tmp_path, HERE, "passages")
    columns = ["question_id", "passage_id", "score", "sentence_scores"]
    assert read_scores(tmp_path).column_names == columns


@pytest.mark.parametrize("question_filter", ["no_all_negative", "clean"])
def test_only_rows_of_questions_that_count_are_scored(
    ranker_of, make_table, tmp_path, question_filter
):
    table = make_table([[0, 0], [1, 0, 0], [1], [0], [0, 1]] * 30)
    corpus = tiny.write_corpus(tmp_path / "corpus", table, files=3, row_group=50)
    options = {"question_filter": question_filter}
    summary = score_table(corpus, ranker_of("pointwise"), tmp_path / "s", HERE, "score", **options)
    expected, stored = filter_table(table, question_filter), read_scores(tmp_path / "s")
    assert summary.num_pairs == summary.num_scored == expected.num_rows < table.num_rows
    assert stored["candidate_id"].equals(expected["candidate_id"])
    assert len(files_of(tmp_path / "s")) == 2


def test_chunks_end_where_questions_end_and_keep_many_actors_busy(tmp_path, monkeypatch):
    monkeypatch.undo()
    table = tiny.candidates(2_858, each=7)
    corpus = tiny.write_corpus(tmp_path / "corpus", table, files=2)
    files = ParquetTable.open(corpus)
    run = score._ScoringRun(files, tmp_path, tmp_path, "score", "raw", None)
    chunks = run.plan_chunks()
    assert len(chunks) in (64, 65)  # 20,006 pairs
    assert [chunk["begin"] for chunk in chunks[1:]] == [chunk["end"] for chunk in chunks[:-1]]
    assert (chunks[0]["begin"], chunks[-1]["end"]) == (0, 20_006)
    assert all(chunk["begin"] % 7 == 0 for chunk in chunks)


# Errors


def test_scores_that_are_not_finite_are_an_error(ranker_of, corpus, tmp_path):
    ranker = load(ranker_of("pointwise"), device="cpu")
    with_nan = ranker.network.classifier.bias.data
    with_nan[1] = float("nan")
    wrong = save(ranker, tmp_path / "wrong")
    for kind in ("logits", "score"):
        with pytest.raises(TrainingError, match="are not finite"):
            score_table(corpus, wrong, tmp_path / kind, HERE, kind)
        assert not files_of(tmp_path / kind)


@pytest.mark.parametrize(
    ("kind", "score_kind", "problem"),
    [
        ("ensemble", "logits", "scores text only"),
        ("pointwise", "heads", "no ranking heads"),
        ("cascade", "passages", "scores no passages"),
    ],
)
def test_ranker_without_scores_of_the_kind_is_refused(
    ranker_of, corpus, tmp_path, kind, score_kind, problem
):
    with pytest.raises(CheckpointError, match=problem):
        score_table(corpus, ranker_of(kind), tmp_path, HERE, score_kind)


# Attempts, threads and actors


def test_started_again_it_makes_the_missing_chunks_alone(ranker_of, corpus, tmp_path):
    score_table(corpus, ranker_of("cascade"), tmp_path, HERE, "score")
    before = files_of(tmp_path)
    paths = sorted(tmp_path.glob("*.parquet"))
    assert len(paths) == 4
    times = {path: path.stat().st_mtime_ns for path in paths}
    os.rename(paths[1], tmp_path / ".part-00001.parquet-1.part")  # as a killed run leaves it
    summary = score_table(corpus, ranker_of("cascade"), tmp_path, HERE, "score")
    assert (summary.num_pairs, summary.num_scored) == (400, 100)
    assert [path for path in paths if path.stat().st_mtime_ns != times[path]] == [paths[1]]
    (tmp_path / ".part-00001.parquet-1.part").unlink()
    assert files_of(tmp_path) == before


KINDS = [
    ("cascade", "score"),
    ("cascade", "exits"),
    ("ensemble", "score"),
    ("not saved", "logits"),
    ("cerberus", "heads"),
    ("joint", "passages"),
    ("pointwise", "score"),
    ("sequential", "score"),
]


@pytest.mark.parametrize(("kind", "score_kind"), KINDS)
def test_number_of_threads_changes_no_byte(ranker_of, passage_corpus, tmp_path, kind, score_kind):
    import torch

    drop_ratio = 0.4 if score_kind == "score" and kind in ("cascade", "sequential") else None
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            folder = tmp_path / str(threads)
            score_table(
                passage_corpus, ranker_of(kind), folder, HERE, score_kind, drop_ratio=drop_ratio
            )
        finally:
            torch.set_num_threads(1)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")


@pytest.mark.parametrize(("kind", "score_kind"), KINDS)
def test_what_tasks_and_actors_do_writes_the_bytes_of_this_process(
    ranker_of, passage_corpus, tmp_path, kind, score_kind
):
    drop_ratio = 0.4 if score_kind == "score" and kind in ("cascade", "sequential") else None
    here, there = tmp_path / "here", tmp_path / "there"
    score_table(passage_corpus, ranker_of(kind), here, HERE, score_kind, drop_ratio=drop_ratio)
    files = ParquetTable.open(passage_corpus)
    run = score._ScoringRun(files, ranker_of(kind), there, score_kind, "raw", drop_ratio)
    run = pickle.loads(pickle.dumps(run))
    scorer = score.ChunkScorer(run, num_threads=1)
    chunks = run.plan_chunks()
    assert len(chunks) == 3
    for chunk in reversed(chunks):  # actors score in any order
        batch = {name: np.array([value]) for name, value in chunk.items()}
        [content] = score._read_chunk(batch, run)
        [row] = scorer(content)
        assert row["busy_s"] > 0
    assert files_of(there) == files_of(here)


@pytest.mark.slow
def test_scoring_goes_on_with_the_least_actors_that_fit(ranker_of, corpus, tmp_path, ray_local):
    workers = WorkersConfig(
        num_workers=2, cpus_per_worker=1.5, num_data_cpus=0.5, min_workers=1
    )  # two CPUs hold one such actor
    summary = score_table(corpus, ranker_of("pointwise"), tmp_path / "there", workers)
    assert summary.num_scored == 400
    score_table(corpus, ranker_of("pointwise"), tmp_path / "here", HERE)
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


@pytest.mark.slow
def test_error_of_an_actor_is_raised_as_itself_and_frees_its_cpus(
    ranker_of, corpus, tmp_path, ray_local
):
    import ray

    workers = WorkersConfig(num_workers=1, num_data_cpus=0.5)
    free = ray.available_resources()["CPU"]
    with pytest.raises(ConfigError, match="need several stages"):
        score_table(corpus, ranker_of("pointwise"), tmp_path, workers, "score", drop_ratio=0.5)
    deadline = time.monotonic() + 90  # Ray Data keeps an actor whose error it raises for 150 s
    while ray.available_resources().get("CPU", 0.0) < free:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_actors_write_the_bytes_of_this_process_and_driver_and_readers_load_no_torch(
    ranker_of, corpus, tmp_path, ray_local
):
    import ray

    address = ray.get_runtime_context().gcs_address
    # With their share of data's CPUs two actors hold both CPUs of this Ray.
    code = f"""
import sys
import ray
from as2ray.distributed import score
from as2ray.distributed.workers_config import WorkersConfig
assert "ray.data" not in sys.modules
ray.init(address={address!r}, logging_level="ERROR")
workers = WorkersConfig(
    num_workers=1, num_scoring_actors=2, cpus_per_worker=0.5, num_data_cpus=0.5
)
score.CHUNK_SIZES = (101, 65_536)
paths = [score.Path(path) for path in sys.argv[1:]]
summary = score.score_table(*paths, workers, "score", drop_ratio=0.4)
assert summary.num_scored == 400
assert 0 < summary.busy_share <= 1

def read(run, chunk):
    run.read(chunk)
    return [name for name in ("torch", "transformers") if name in sys.modules]

files = score.ParquetTable.open(paths[0])
run = score._ScoringRun(files, *paths[1:], "score", "raw", None)
new = {{"env_vars": {{"TORCH_NEW": "1"}}}}  # not forked from a process that has imported torch
reader = ray.remote(num_cpus=0, max_calls=1, runtime_env=new)(read)
assert run.tokenizer is not None
assert ray.get(reader.remote(run, run.plan_chunks()[0])) == []
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    paths = (corpus, ranker_of("cascade"), tmp_path / "there")
    process = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    score_table(corpus, ranker_of("cascade"), tmp_path / "here", HERE, "score", drop_ratio=0.4)
    assert len(files_of(tmp_path / "here")) == 4
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_readers_tokenize_as_the_ranker_does(checkpoint, corpus, tmp_path, family):
    folder = save(load(checkpoint(family, max_position_embeddings=600)), tmp_path / "ranker")
    run = score._ScoringRun(ParquetTable.open(corpus), folder, tmp_path, "score", "raw", None)
    tokenizer = load(folder).tokenizer
    assert json.loads(run.tokenizer.tokenizer_json) == json.loads(tokenizer.tokenizer_json)
    lengths = (tokenizer.max_length, tokenizer.max_question_length)
    assert (run.tokenizer.max_length, run.tokenizer.max_question_length) == lengths


# What reads logits


def create_dataset(checkpoint, corpus, *teachers) -> PackedDataset:
    tokenizer = load(checkpoint()).tokenizer
    files = tuple(ParquetTable.open(teacher) for teacher in teachers)
    reader = PairReader(ParquetTable.open(corpus), tokenizer, teachers=files)
    return PackedDataset(reader, global_batch_size=50)


def test_stream_brings_every_pair_its_teachers_logits(checkpoint, corpus, tmp_path):
    for labels in (1, 2):
        score_table(corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE)
    dataset = create_dataset(checkpoint, corpus, tmp_path / "1", tmp_path / "2")
    expected = np.concatenate([stored_logits(tmp_path / "1"), stored_logits(tmp_path / "2")], 1)
    seen = 0
    for micro in dataset.epoch(0):
        rows = micro.batch.sequence_data["row"]
        np.testing.assert_array_equal(micro.batch.sequence_data[TEACHER_LOGITS], expected[rows])
        seen += len(rows)
    assert seen == 400


def test_logits_of_fewer_pairs_or_of_another_table_are_refused(checkpoint, corpus, tmp_path):
    score_table(corpus, checkpoint(), tmp_path / "logits", HERE)
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
        score_table(corpus, checkpoint("bert", labels), tmp_path / str(labels), HERE)
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
        logits = torch.from_numpy(stored_logits(tmp_path / str(labels)))
        teacher = positive_probability(logits).numpy()[batch.sequence_data["row"]]
        error = np.abs(heads[:, number] - teacher).mean()
        assert error < 0.7 * np.abs(teacher - 0.5).mean()
