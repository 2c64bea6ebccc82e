"""What training logs of its steps and its evaluations."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from training_runs import DEV, NO_DROPOUT, FunctionLoss, create_trainer, read_logged

from as2ray.cascade.cost import EncoderShape
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.data.packed_dataset import PackedDataset
from as2ray.evaluation.measures import mean_average_precision
from as2ray.losses import get_loss
from as2ray.losses.pointwise import cross_entropy
from as2ray.training.step_metrics import StepMetrics
from as2ray.training.validation import EvalSet


@dataclass
class SlowSource:
    """A source whose every packed batch takes 20 ms."""

    dataset: PackedDataset

    @property
    def steps(self) -> int:
        return self.dataset.steps

    def epoch(self, epoch: int, start: int = 0):
        for micro_batch in self.dataset.epoch(epoch, start):
            time.sleep(0.02)
            yield micro_batch


@pytest.fixture
def model(checkpoint):
    return checkpoint("bert", None, **NO_DROPOUT)


def test_parts_of_the_loss_are_means_over_the_steps_in_which_their_exit_was_trained(
    model, corpus, tmp_path
):
    settings = {"epochs": 1, "global_batch_size": 16, "exit_layers": (1, 2)}
    loss = get_loss("round_robin_exit")
    for every in (1, 5):
        folder = tmp_path / str(every)
        create_trainer(model, corpus, folder, loss=loss, log_every_steps=every, **settings).fit()
    first, second = (read_logged(tmp_path / "1", f"train/loss/exit_{n}") for n in (1, 2))
    assert [line["step"] for line in first[:3]] == [1, 3, 5]
    assert [line["step"] for line in second[:2]] == [2, 4]
    means = read_logged(tmp_path / "5", "train/loss/exit_1", "train/loss/exit_2")[0]
    expected = [np.mean([line["train/loss/exit_1"] for line in first[:3]])]
    expected.append(np.mean([line["train/loss/exit_2"] for line in second[:2]]))
    found = [means["train/loss/exit_1"], means["train/loss/exit_2"]]
    assert found == pytest.approx(expected, rel=1e-5)


def test_norm_of_the_gradient_is_that_before_clipping(model, corpus, tmp_path):
    norms = []
    for scale in (1.0, 4.0):
        loss = FunctionLoss(lambda logits, targets: scale * cross_entropy(logits, targets))  # noqa: B023
        folder = tmp_path / str(scale)
        create_trainer(model, corpus, folder, loss=loss, epochs=1, max_grad_norm=1e-3).fit()
        norms.append(read_logged(folder, "train/gradient_norm")[0]["train/gradient_norm"])
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-4)
    assert norms[0] > 1e-3


def test_speed_has_pairs_tokens_fill_operations_and_the_time_that_data_took(
    model, corpus, tmp_path
):
    trainer = create_trainer(
        model, corpus, tmp_path, epochs=1, global_batch_size=16, max_batch_tokens=400
    )
    micro_batches = [m for m in trainer.batch_source.epoch(0) if m.step == 0]
    trainer.batch_source = SlowSource(trainer.batch_source)
    trainer.fit()
    lines = read_logged(
        tmp_path, *(f"speed/{n}" for n in ("pairs_per_second", "tokens_per_second", "batch_fill"))
    )
    lengths = np.concatenate([m.batch.lengths for m in micro_batches])
    assert len(lengths) == 16
    first = lines[0]
    ratio = first["speed/tokens_per_second"] / first["speed/pairs_per_second"]
    assert ratio == pytest.approx(lengths.mean())
    assert first["speed/batch_fill"] == pytest.approx(lengths.sum() / len(micro_batches) / 400)
    waits = [x["speed/data_wait_s"] for x in read_logged(tmp_path, "speed/data_wait_s")]
    assert sum(waits) > 0.02 * trainer.batch_source.steps
    operations = read_logged(tmp_path, "speed/teraflops")[0]["speed/teraflops"]
    shape = EncoderShape.from_config(trainer.ranker.network.config)
    per_pair = 3 * shape.num_layers * shape.layer_flops(lengths).mean() / 1e12
    assert operations == pytest.approx(per_pair * first["speed/pairs_per_second"])
    assert read_logged(tmp_path, "speed/host_memory_gb")[0]["speed/host_memory_gb"] > 0.05
    assert not read_logged(tmp_path, "speed/mfu")  # no peak is known of a CPU


def test_operations_of_a_step_end_at_the_last_exit_that_was_run(model, corpus, tmp_path):
    settings = {"exit_layers": (1, 2), "loss": get_loss("all_exits")}
    trainer = create_trainer(model, corpus, tmp_path, **settings)
    micro_batch = next(iter(trainer.batch_source.epoch(0)))
    counted = []
    for exit_indices in ([0], [0, 1]):
        metrics = StepMetrics(trainer.ranker, 400)
        metrics.add_batch(micro_batch, torch.tensor(1.0), {}, exit_indices)
        counted.append(metrics.batches[0][1])
    assert counted == [1, 2]


def test_placeholder_counts_for_no_metric(model, corpus, tmp_path):
    trainer = create_trainer(model, corpus, tmp_path)
    micro_batch = next(iter(trainer.batch_source.epoch(0)))
    metrics = StepMetrics(trainer.ranker, 400)
    parts = {"exit_1": torch.tensor(32.0)}
    metrics.add_batch(micro_batch, torch.tensor(64.0), parts, None)
    metrics.add_batch(micro_batch.emptied(), torch.tensor(64.0), parts, None)
    metrics.end_step(parts, None)
    assert len(metrics.batches) == 1
    reduced = metrics.reduce()
    assert reduced["train/loss"] == 64.0 / micro_batch.num_examples
    assert reduced["train/loss/exit_1"] == 32.0 / micro_batch.num_examples


def test_evaluation_measures_every_exit_and_head(checkpoint, corpus, tmp_path):
    settings = {"loss": get_loss("all_exits"), "epochs": 1, "exit_layers": (1, 2)}
    create_trainer(checkpoint("bert", None), corpus, tmp_path, **settings).fit()
    names = ["dev/AP/exit_1", "dev/AP/exit_2", "dev/AP", "dev/share_predicted_positive"]
    [line] = read_logged(tmp_path, *names)
    ranker = load(tmp_path / "best" / "ranker", dtype="fp32")
    scores = ranker.predict_exits(DEV["question"].to_pylist(), DEV["candidate"].to_pylist())
    columns = DEV["question_id"].to_numpy(), DEV["label"].to_numpy()
    precisions = [mean_average_precision(*columns, column) for column in scores.T]
    expected = [*precisions, precisions[-1], (scores[:, -1] > 0.5).mean()]
    assert [line[name] for name in names] == pytest.approx(expected)


def test_evaluation_of_a_cascade_with_heads_measures_each(checkpoint):
    model = checkpoint("bert", None, num_hidden_layers=3)
    ranker = init_ranker(model, max_length=40, exit_layers=(1, 2), num_ranking_heads=3)
    measures = EvalSet.from_table(DEV, ranker, 400).evaluate(ranker)
    exits = ["AP/exit_1", "AP/head_1", "AP/head_2", "AP/head_3"]
    assert list(measures) == ["AP", "RR", "P@1", "nDCG@10", *exits, "share_predicted_positive"]
    texts = (DEV["question"].to_pylist(), DEV["candidate"].to_pylist())
    heads = ranker.predict_heads(ranker.tokenizer.encode(*texts))
    columns = DEV["question_id"].to_numpy(), DEV["label"].to_numpy()
    assert measures["AP/head_2"] == pytest.approx(mean_average_precision(*columns, heads[:, 1]))
    score = ranker.predict_exits(*texts)[:, -1]
    assert measures["AP"] == pytest.approx(mean_average_precision(*columns, score))
