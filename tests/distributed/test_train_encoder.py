"""A sentence encoder on workers of Ray Train."""

import numpy as np
import pytest
import tiny
from transformers import AutoModel

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder, save_sentence_encoder
from as2ray.distributed.train import train_encoder_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.models.sentence_encoder import EmbeddingSettings, SentenceEncoder
from as2ray.training.config import TrainingConfig
from as2ray.training.job import EncoderJob

pytestmark = pytest.mark.slow


def test_two_workers_train_the_encoder_of_one_process(ray_local, checkpoint, published, tmp_path):
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    network = AutoModel.from_pretrained(still, add_pooling_layer=False)
    encoder = SentenceEncoder("tiny", network, published("bert"), EmbeddingSettings(24))
    start = save_sentence_encoder(encoder, tmp_path / "start")
    table = tiny.write_corpus(tmp_path / "table", tiny.candidates(40))
    training = TrainingConfig(epochs=2, global_batch_size=8, learning_rate=1e-3, precision="fp32")
    job = EncoderJob(str(start), (str(table),), training)
    workers = WorkersConfig(num_workers=2, cpus_per_worker=0.5, num_data_cpus=0.2)
    assert train_encoder_on_ray(job, tmp_path / "there" / "encoder", workers) == 40
    train_encoder_on_ray(job, tmp_path / "here" / "encoder", WorkersConfig(num_workers=0))
    texts = [tiny.sentence(tiny.Random(seed), 5) for seed in range(8)]
    here, there, before = (
        load_sentence_encoder(path, dtype="fp32", device="cpu").encode_queries(texts)
        for path in (tmp_path / "here" / "encoder", tmp_path / "there" / "encoder", start)
    )
    np.testing.assert_allclose(here, there, atol=2e-4)
    assert np.abs(here - before).max() > 0.02
    assert not [*(tmp_path / "there").glob("*-train")]
