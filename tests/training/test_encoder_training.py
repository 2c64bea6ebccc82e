"""Training of a sentence encoder with in-batch negatives."""

import numpy as np
import pytest
import tiny

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.errors import ConfigError
from as2ray.training.config import TrainingConfig
from as2ray.training.encoder_training import run_encoder_job, train_encoder
from as2ray.training.job import EncoderJob

QUESTIONS = [f"what is {word}?" for word in tiny.WORDS[:16]]
ANSWERS = [f"{word} {tiny.WORDS[-n - 1]}." for n, word in enumerate(tiny.WORDS[:16])]
CONFIG = TrainingConfig(epochs=15, global_batch_size=8, learning_rate=3e-3, precision="fp32")


@pytest.fixture
def load(sentence_encoder):
    return lambda: load_sentence_encoder(sentence_encoder, dtype="fp32", device="cpu")


def share_found(encoder):
    """Share of the questions whose own answer is the most similar one."""
    similarities = encoder.encode_queries(QUESTIONS) @ encoder.encode_documents(ANSWERS).T
    return (similarities.argmax(1) == np.arange(len(QUESTIONS))).mean()


def test_trained_encoder_finds_the_answers(load):
    encoder, logged = load(), []
    before = share_found(encoder)
    train_encoder(
        encoder, QUESTIONS, ANSWERS, CONFIG, log_metrics=lambda _, metrics: logged.append(metrics)
    )
    assert share_found(encoder) > before + 0.3
    assert len(logged) == 15 * 2
    names = {"train/loss", "train/gradient_norm", "train/learning_rate"}
    assert all(metrics.keys() == names and min(metrics.values()) >= 0 for metrics in logged)
    losses = [metrics["train/loss"] for metrics in logged]
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    assert not encoder.training


def test_rate_rises_for_the_warmup_steps(load):
    rates = []
    config = TrainingConfig(epochs=2, global_batch_size=8, learning_rate=1e-3, warmup_steps=3)
    train_encoder(
        load(),
        QUESTIONS,
        ANSWERS,
        config,
        log_metrics=lambda _, metrics: rates.append(metrics["train/learning_rate"]),
    )
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[3] < 1e-3


def test_the_same_answer_is_no_negative(load):
    losses = []
    config = TrainingConfig(epochs=1, global_batch_size=2, learning_rate=1e-3, precision="fp32")
    train_encoder(
        load(),
        QUESTIONS[:2],
        [ANSWERS[0]] * 2,
        config,
        log_metrics=lambda _, m: losses.append(m["train/loss"]),
    )
    assert losses == [0.0]


def test_weights_follow_from_the_seed(load):
    embeddings = []
    for seed in (0, 0, 1):
        encoder = load()
        config = TrainingConfig(
            epochs=2, global_batch_size=8, learning_rate=1e-3, precision="fp32", seed=seed
        )
        train_encoder(encoder, QUESTIONS, ANSWERS, config)
        embeddings.append(encoder.encode_queries(QUESTIONS))
    np.testing.assert_allclose(embeddings[0], embeddings[1], atol=1e-5)
    assert np.abs(embeddings[0] - embeddings[2]).max() > 1e-3


def test_one_pair_has_no_negative(load):
    with pytest.raises(ConfigError, match="a batch of 1 pairs"):
        train_encoder(load(), QUESTIONS[:1], ANSWERS[:1], CONFIG)


def test_workers_that_start_again_replace_the_encoder_that_lost_ones_saved(
    sentence_encoder, tmp_path
):
    table = tiny.write_corpus(tmp_path / "table", tiny.candidates(1))
    job = EncoderJob(sentence_encoder, (str(table),), CONFIG)
    assert [run_encoder_job(job, tmp_path / "encoder") for _ in range(2)] == [1, 1]
    load_sentence_encoder(tmp_path / "encoder")
