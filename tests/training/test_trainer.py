import errno
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from training_runs import (
    DEV,
    NO_DROPOUT,
    FunctionLoss,
    StopTrainingError,
    assert_close,
    create_trainer,
    read_logged,
    read_losses,
)

from as2ray.checkpoints.loading import load
from as2ray.errors import ConfigError, TrainingError
from as2ray.evaluation.measures import mean_average_precision
from as2ray.losses import get_loss
from as2ray.losses.exits import ExitLoss
from as2ray.losses.pointwise import cross_entropy
from as2ray.tables.parquet import ParquetTable
from as2ray.training import trainer as loop_module
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.validation import EvalSet, validate

LEARNING = {"num_hidden_layers": 2, "initializer_range": 0.1}
"""Of a network that learns the corpus in five epochs."""


@pytest.fixture
def small(tmp_path):
    """Makes a corpus of so many pairs."""

    def make(pairs: int):
        return tiny.write_corpus(tmp_path / f"pairs-{pairs}", tiny.candidates(80).slice(0, pairs))

    return make


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """64 pairs in two files."""
    folder, table = tmp_path_factory.mktemp("pairs"), tiny.candidates(80).slice(0, 64)
    return tiny.write_corpus(folder, table, files=2, row_group=20)


def weights_of(loop) -> dict[str, torch.Tensor]:
    return {name: weights.clone() for name, weights in loop.ranker.state_dict().items()}


def selected(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the ranker that a run selected."""
    return load(folder / "best" / "ranker").state_dict()


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_training_on_a_learnable_corpus_lowers_the_loss_and_ranks(checkpoint, corpus, tmp_path):
    model = checkpoint("bert", None, **LEARNING)
    progress = create_trainer(model, corpus, tmp_path, epochs=5, learning_rate=5e-3).fit()
    losses = read_losses(tmp_path)
    assert np.mean(losses[-13:]) < 0.5 * np.mean(losses[:13])
    measured = [x["dev/AP"] for x in read_logged(tmp_path, "dev/AP")]
    assert measured[-1] > 0.9 > measured[0]
    assert progress.global_step == len(losses) == 5 * 13
    ranked = load(tmp_path / "best" / "ranker").rank("What is kovarin?", ["Muri ne.", "Kovarin."])
    assert ranked[0].text == "Kovarin."


@pytest.mark.parametrize("max_steps", [5, 17])  # an epoch has 13
def test_run_of_so_many_steps_ends_inside_an_epoch(checkpoint, corpus, tmp_path, max_steps):
    model, settings = checkpoint("bert", None), {"max_steps": max_steps, "warmup_steps": 4}
    trainer = create_trainer(model, corpus, tmp_path / "whole", epochs=1, **settings)
    progress = trainer.fit()
    assert (progress.global_step, progress.has_ended) == (max_steps, True)
    rate = "train/learning_rate"
    rates = [x[rate] for x in read_logged(tmp_path / "whole", rate)]
    assert rates.index(max(rates)) == 3
    assert (tmp_path / "whole" / "best" / "ranker").is_dir()


@pytest.mark.parametrize("family", [x for x in tiny.FAMILIES[1:] if x not in tiny.DECODERS])
def test_training_any_family_lowers_the_loss(checkpoint, small, tmp_path, family):
    create_trainer(
        checkpoint(family, None), small(160), tmp_path, epochs=2, gradient_checkpointing=True
    ).fit()
    losses = read_losses(tmp_path)
    assert np.mean(losses[5:]) < np.mean(losses[:5]) - 0.02  # dropout alone changes it by 0.001


def test_accumulation_in_small_batches_gives_the_same_weights(checkpoint, small, tmp_path):
    corpus = small(130)
    model, weights = checkpoint("bert", 2, **NO_DROPOUT), []
    for max_tokens in (8192, 60):
        folder = tmp_path / str(max_tokens)
        loop = create_trainer(
            model, corpus, folder, epochs=1, global_batch_size=64, max_batch_tokens=max_tokens
        )
        loop.fit()
        weights.append(weights_of(loop))
    assert_close(*weights)
    assert not equal(weights[0], weights_of(create_trainer(model, corpus, tmp_path / "untrained")))


def test_gradient_checkpointing_with_dropout_trains_the_same_weights(checkpoint, small, tmp_path):
    weights = []
    for on in (False, True):
        loop = create_trainer(
            checkpoint("bert"), small(96), tmp_path / str(on), epochs=1, gradient_checkpointing=on
        )
        loop.fit()
        weights.append(weights_of(loop))
    assert_close(*weights)


MIDWAY = {"epochs": 2, "global_batch_size": 8, "eval_steps": 3, "log_every_steps": 2}
MIDWAY |= {"save_every_steps": 3}
"""Of a run that is interrupted, and of one that is not."""


@pytest.fixture(scope="module")
def whole(checkpoint, pairs, tmp_path_factory):
    """A run that nothing interrupts, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    loop = create_trainer(checkpoint("bert"), pairs, folder, **MIDWAY)
    loop.fit()
    return loop, folder


@pytest.mark.parametrize(
    "stop_before",
    [(0, 2), (0, 5), (1, 0), (1, 3), (1, 7)],
    ids=["before-any-checkpoint", "mid-epoch", "between-epochs", "second-epoch", "last-step"],
)
def test_interrupted_run_with_dropout_goes_on_as_if_it_had_not_been(
    checkpoint, pairs, tmp_path, whole, stop_before
):
    model, (loop, folder) = checkpoint("bert"), whole
    with pytest.raises(StopTrainingError):
        create_trainer(model, pairs, tmp_path, stop_before=stop_before, **MIDWAY).fit()
    again = create_trainer(model, pairs, tmp_path, **MIDWAY)
    assert again.fit() == loop.state
    for names in (["train/loss", "train/learning_rate"], ["dev/AP", "epoch"]):
        assert read_logged(tmp_path, *names) == read_logged(folder, *names)
    assert equal(weights_of(again), weights_of(loop))
    assert equal(*(selected(run) for run in (folder, tmp_path)))


def test_run_interrupted_again_and_again_goes_on_as_if_it_had_not_been(checkpoint, pairs, tmp_path):
    model, settings = checkpoint("bert"), {"epochs": 3, "global_batch_size": 16}
    settings["save_every_steps"] = 3
    whole = create_trainer(model, pairs, tmp_path / "whole", **settings)
    whole.fit()
    for stop_before in [(0, 4), (1, 2), (1, 4), (2, 0), (2, 1)]:
        with pytest.raises(StopTrainingError):
            create_trainer(
                model, pairs, tmp_path / "cut", stop_before=stop_before, **settings
            ).fit()
    again = create_trainer(model, pairs, tmp_path / "cut", **settings)
    again.fit()
    assert equal(weights_of(again), weights_of(whole))
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")


LEARN_THEN_UNLEARN = {
    "epochs": 6,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
}


def unlearn_after(num_steps: int) -> FunctionLoss:
    """A loss that is minimized in so many steps, and maximized afterwards."""
    calls = iter(range(1000))

    def loss(logits, targets):
        return cross_entropy(logits, targets) * (1 if next(calls) < num_steps else -1)

    return FunctionLoss(loss)


@pytest.fixture(scope="module")
def unlearnt(checkpoint, corpus, tmp_path_factory):
    """The folder of a run that gets worse at its end, and the files before each report of a MAP."""
    folder, written = tmp_path_factory.mktemp("unlearnt"), {}

    class Store(LocalCheckpointStore):
        def report(self, metrics):
            written[metrics["dev/AP"]] = {path.name for path in self.folder.rglob("*")}

    model, loss = checkpoint("bert", None, **LEARNING), unlearn_after(4 * 13)
    loop = create_trainer(model, corpus, folder, loss=loss, **LEARN_THEN_UNLEARN)
    loop.checkpoint_store = Store(folder)
    loop.fit()
    return folder, written


def test_validation_that_is_neither_better_nor_due_writes_nothing(unlearnt):
    folder, written = unlearnt
    *_, before, after = written.values()
    assert max(written) > list(written)[-2]
    assert before == after
    assert "optimizer.pt" not in {path.name for path in folder.rglob("*")}


def test_weights_written_after_a_resume_state_are_valid_only_if_the_repeated_steps_give_them(
    checkpoint, corpus, tmp_path
):
    model = checkpoint("bert", None, **LEARNING)
    # Validations every 4 steps, resume states every 7 steps; the run is killed after step 12.
    how = {"epochs": 2, "max_steps": 15, "eval_steps": 4, "learning_rate": 5e-3}
    how["save_every_steps"] = 7
    create_trainer(model, corpus, tmp_path / "whole", **how).fit()
    with pytest.raises(StopTrainingError):
        create_trainer(model, corpus, tmp_path / "cut", stop_before=(0, 13), **how).fit()
    maps = [x["dev/AP"] for x in read_logged(tmp_path / "cut", "dev/AP")]
    assert maps == sorted(maps)  # steps 8 and 12 were better, after the state of step 7
    assert {path.name for path in (tmp_path / "cut").glob("best-*")} == {"best-4", "best-12"}
    again = create_trainer(model, corpus, tmp_path / "cut", **how)
    assert (again.state.global_step, again.state.best_step) == (7, 4)
    assert {path.name for path in (tmp_path / "cut").glob("best-*")} == {"best-4"}
    again.fit()
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")
    assert equal(selected(tmp_path / "cut"), selected(tmp_path / "whole"))
    assert not list((tmp_path / "cut").glob("*best-*"))


def test_weights_of_the_state_before_are_kept_while_a_state_may_still_be_lost(
    checkpoint, corpus, tmp_path
):
    class LosingStore(LocalCheckpointStore):
        """Completes a resume state when the next one is saved, as a slow upload does."""

        pending = None

        def save(self, checkpoint):
            super().save(self.pending)
            self.pending = checkpoint

    model = checkpoint("bert", None, **LEARNING)
    how = {"epochs": 2, "max_steps": 15, "eval_steps": 2, "learning_rate": 5e-3}
    how["save_every_steps"] = 3
    create_trainer(model, corpus, tmp_path / "whole", **how).fit()
    loop = create_trainer(model, corpus, tmp_path / "cut", stop_before=(0, 13), **how)
    loop.checkpoint_store = LosingStore(tmp_path / "cut", 1e-9, 3)
    with pytest.raises(StopTrainingError):
        loop.fit()
    shutil.rmtree(loop.checkpoint_store.pending)
    again = create_trainer(model, corpus, tmp_path / "cut", **how)
    assert again.state.global_step == 9
    assert (tmp_path / "cut" / f"best-{again.state.best_step}" / "ranker").exists()
    again.fit()
    assert equal(selected(tmp_path / "cut"), selected(tmp_path / "whole"))


def test_run_stops_with_a_resume_state_before_a_node_is_lost(checkpoint, pairs, tmp_path):
    class LeavingStore(LocalCheckpointStore):
        calls = 0

        def is_node_leaving(self):
            self.calls += 1
            return self.calls == 3

    model, settings = checkpoint("bert"), {"epochs": 2, "global_batch_size": 5}  # 13 steps each
    create_trainer(model, pairs, tmp_path / "whole", **settings).fit()
    loop = create_trainer(model, pairs, tmp_path / "cut", **settings)
    loop.checkpoint_store = LeavingStore(tmp_path / "cut", 600.0, 5)
    state = loop.fit()
    assert (state.global_step, state.has_ended) == (15, False)
    again = create_trainer(model, pairs, tmp_path / "cut", **settings)
    assert again.state == state  # no step is repeated
    assert again.fit().has_ended
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")


def test_share_outside_steps_has_the_time_of_validations(checkpoint, small, tmp_path):
    class SlowEvalSet:
        def evaluate(self, ranker):
            time.sleep(0.5)
            return {"AP": 0.5}

    loop = create_trainer(checkpoint("bert"), small(64), tmp_path, epochs=2)
    loop.eval_sets = {"dev": SlowEvalSet()}
    started_at = time.perf_counter()
    loop.fit()
    duration_s = time.perf_counter() - started_at
    share = read_logged(tmp_path, "speed/share_outside_steps")[-1]["speed/share_outside_steps"]
    assert 2 * 0.5 / duration_s < share < 1


THREE_EPOCHS = {"epochs": 3, "global_batch_size": 16, "save_every_steps": 4}
"""Of a run over `pairs`."""


@pytest.fixture(scope="module")
def on_free_disk(checkpoint, pairs, tmp_path_factory):
    """A run whose disk has room."""
    folder = tmp_path_factory.mktemp("free")
    loop = create_trainer(checkpoint("bert"), pairs, folder, **THREE_EPOCHS)
    loop.fit()
    return loop


@pytest.mark.cluster
@pytest.mark.parametrize("failing", ["weights", "moments", "taken over"])
def test_full_disk_at_a_checkpoint_ends_the_run_and_keeps_the_one_before(
    checkpoint, pairs, on_free_disk, tmp_path, monkeypatch, failing
):
    model, data, settings = checkpoint("bert"), pairs, THREE_EPOCHS
    (tmp_path / "rooms").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "rooms"))
    loop = create_trainer(model, data, tmp_path / "full", **settings)
    place, name = {
        "weights": (loop_module, "save"),
        "moments": (torch, "save"),
        "taken over": (shutil, "move"),
    }[failing]
    real = getattr(place, name)

    def full(content, path, *rest):
        if loop.state.epoch == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(content, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(
            TrainingError, match=r"after 8 steps(.|\n)*No space left(.|\n)*--workers"
        ):
            loop.fit()
    assert list((tmp_path / "rooms").iterdir()) == []
    again = create_trainer(model, data, tmp_path / "full", **settings)
    assert again.state.global_step == 4
    assert again.fit() == on_free_disk.state
    assert equal(weights_of(again), weights_of(on_free_disk))


def test_early_stopping_ends_after_as_many_validations_without_a_gain(checkpoint, small, tmp_path):
    settings = {"epochs": 9, "global_batch_size": 32, "eval_steps": 2, "early_stopping_patience": 3}
    stuck = {"learning_rate": 1e-12, **settings}
    progress = create_trainer(checkpoint("bert"), small(160), tmp_path / "run", **stuck).fit()
    assert progress.has_ended
    assert progress.global_step == 2 * (1 + 3)
    again = create_trainer(checkpoint("bert"), small(160), tmp_path / "run", **stuck)
    assert again.fit() == progress


def test_selected_checkpoint_is_that_of_the_best_validation(unlearnt):
    folder, _ = unlearnt
    measured = [x["dev/AP"] for x in read_logged(folder, "dev/AP")]
    assert measured[-1] < max(measured)
    ranker = load(folder / "best" / "ranker", dtype="fp32")
    found = validate(ranker, {"dev": EvalSet.from_table(DEV, ranker, 400)})
    assert found["dev/AP"] == pytest.approx(max(measured))


def test_every_pair_is_trained_on_once_an_epoch_the_remainder_too(checkpoint, small, tmp_path):
    seen: list[int] = []

    def noting(logits, targets):
        seen.extend(targets["row"].tolist())
        return cross_entropy(logits, targets)

    loop = create_trainer(
        checkpoint("bert"), small(65), tmp_path, loss=FunctionLoss(noting), epochs=2
    )
    before = weights_of(loop)
    loop.fit()
    assert sorted(seen) == sorted([*range(65), *range(65)])
    lines = read_logged(tmp_path, "train/learning_rate")
    assert all(line["train/learning_rate"] > 0 for line in lines)
    assert not equal(before, weights_of(loop))


def test_run_of_one_step_trains(checkpoint, small, tmp_path):
    loop = create_trainer(checkpoint("bert"), small(8), tmp_path, epochs=1)
    before = weights_of(loop)
    assert loop.fit().global_step == 1
    assert not equal(before, weights_of(loop))


def test_loss_of_a_step_is_the_mean_over_its_pairs(checkpoint, small, tmp_path):
    model, data = checkpoint("bert", 2, **NO_DROPOUT), small(30)
    loop = create_trainer(
        model, data, tmp_path, epochs=1, global_batch_size=30, max_batch_tokens=50
    )
    table = ParquetTable.open(data).take(np.arange(30), ["question", "candidate", "label"])
    ranker = load(model, dtype="fp32", max_length=40)
    texts = zip(table["question"].to_pylist(), ([t] for t in table["candidate"].to_pylist()))
    score = np.array([ranked[0].score for ranked in ranker.rank_many(texts)])
    label = table["label"].to_numpy()
    expected = -np.log(np.where(label == 1, score, 1 - score)).mean()
    loop.fit()
    assert read_losses(tmp_path)[0] == pytest.approx(expected, rel=1e-4)


def test_losses_told_less_often_are_means_that_leave_no_step_out(checkpoint, small, tmp_path):
    model, data = checkpoint("bert"), small(40)
    settings = {"epochs": 4, "global_batch_size": 8, "eval_steps": 20}  # 5 steps an epoch
    for every in (1, 4):
        create_trainer(model, data, tmp_path / str(every), log_every_steps=every, **settings).fit()
    single = read_losses(tmp_path / "1")
    means = read_logged(tmp_path / "4", "train/loss")
    assert [x["step"] for x in means] == [4, 8, 12, 16, 20]
    expected = np.array(single).reshape(-1, 4).mean(1)
    assert [x["train/loss"] for x in means] == pytest.approx(expected, rel=1e-5)


def test_validation_scores_all_rows_as_ranking_does(checkpoint):
    ranker = load(checkpoint("bert"), dtype="fp32", max_length=40)
    watched = EvalSet.from_table(DEV, ranker, 100)
    assert len(watched.batches) > 3
    texts = zip(DEV["question"].to_pylist(), ([t] for t in DEV["candidate"].to_pylist()))
    expected = [ranked[0].score for ranked in ranker.rank_many(texts)]
    np.testing.assert_allclose(watched.compute_scores(ranker)[:, 0], expected, atol=1e-6)


def test_training_in_bf16_stays_close_to_fp32(checkpoint, small, tmp_path):
    losses = []
    for precision in ("fp32", "bf16"):
        folder = tmp_path / precision
        create_trainer(checkpoint("bert"), small(96), folder, epochs=1, precision=precision).fit()
        losses.append(read_losses(folder))
    assert losses[1] == pytest.approx(losses[0], abs=0.1)
    assert losses[0] != losses[1]


def test_loop_without_a_dev_table_is_refused_before_it_trains(checkpoint, small, tmp_path):
    loop = create_trainer(checkpoint("bert"), small(8), tmp_path)
    parts = (loop.ranker, loop.loss, loop.batch_source, loop.config, loop.checkpoint_store)
    with pytest.raises(ConfigError, match="dev"):
        type(loop)(*parts, {"test": loop.eval_sets["dev"]}, tmp_path)


def test_loop_that_keeps_its_last_checkpoint_needs_no_dev_table(checkpoint, small, tmp_path):
    loop = create_trainer(checkpoint("bert"), small(8), tmp_path, epochs=2, select_by="epoch")
    parts = (loop.ranker, loop.loss, loop.batch_source, loop.config, loop.checkpoint_store)
    state = type(loop)(*parts, {}, tmp_path).fit()
    assert (state.has_ended, state.best_step) == (True, state.global_step)
    weights = load(tmp_path / "best" / "ranker").network.state_dict()
    assert_close(weights, loop.ranker.network.state_dict())
    impatient = replace(loop.config, early_stopping_patience=1)
    with pytest.raises(ConfigError, match="none named 'dev'"):
        type(loop)(*parts[:3], impatient, parts[4], {}, tmp_path)


@pytest.mark.parametrize(
    "name", ["uniform_exit", "round_robin_exit", "early_biased_exit", "all_exits"]
)
def test_training_a_cascade_makes_every_exit_rank(checkpoint, corpus, tmp_path, name):
    model = checkpoint("bert", None, **LEARNING)
    how = {"exit_layers": (1, 2), "loss": get_loss(name), "epochs": 8, "learning_rate": 5e-3}
    create_trainer(model, corpus, tmp_path, **how).fit()
    ranker = load(tmp_path / "best" / "ranker")
    scores = ranker.predict_exits(DEV["question"].to_pylist(), DEV["candidate"].to_pylist())
    for of_exit in scores.T:
        assert scores_ap(of_exit) > 0.85


def scores_ap(scores) -> float:
    return mean_average_precision(DEV["question_id"].to_numpy(), DEV["label"].to_numpy(), scores)


def test_step_of_a_low_exit_leaves_the_layers_above_as_they_were(checkpoint, small, tmp_path):
    model, how = checkpoint("bert", None), {"exit_layers": (1, 3), "epochs": 1}
    loop = create_trainer(
        model, small(32), tmp_path, loss=ExitLoss(lambda _: [0]), global_batch_size=32, **how
    )
    before = weights_of(loop)
    loop.fit()
    changed = {n for n, w in weights_of(loop).items() if not torch.equal(w, before[n])}
    assert any("embeddings.word" in n for n in changed)
    assert any("layer.0." in n for n in changed)
    assert any("heads.0." in n for n in changed)
    assert not any(part in n for n in changed for part in ("layer.1.", "layer.2.", "heads.1."))


def test_interrupted_cascade_run_goes_on_as_if_it_had_not_been(checkpoint, pairs, tmp_path):
    model = checkpoint("bert", None)
    how = {"exit_layers": (1, 2, 3), "loss": get_loss("uniform_exit"), "global_batch_size": 16}
    how |= {"epochs": 2, "eval_steps": 1, "save_every_steps": 1}
    whole = create_trainer(model, pairs, tmp_path / "whole", **how)
    whole.fit()
    for stop_before in [(0, 1), (0, 3), (1, 2)]:  # before some exit has learnt at all, too
        with pytest.raises(StopTrainingError):
            create_trainer(model, pairs, tmp_path / "cut", stop_before=stop_before, **how).fit()
    again = create_trainer(model, pairs, tmp_path / "cut", **how)
    again.fit()
    assert equal(weights_of(again), weights_of(whole))


def test_objective_that_does_not_fit_the_ranker_is_refused(checkpoint, small, tmp_path):
    for exits, name in ((None, "uniform_exit"), ((1, 2), "cross_entropy")):
        with pytest.raises(ConfigError, match="exits"):
            create_trainer(
                checkpoint("bert", None),
                small(32),
                tmp_path,
                exit_layers=exits,
                loss=get_loss(name),
            )


def test_head_rate_and_restart_by_epoch_follow_the_schedule(checkpoint, small, tmp_path):
    how = {
        "epochs": 2,
        "global_batch_size": 32,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.2,
        "restart_every": "epoch",
    }
    loop = create_trainer(
        checkpoint("bert", None),
        small(160),
        tmp_path,
        learning_rate=1e-3,
        head_learning_rate=1e-2,
        **how,
    )
    loop.fit()
    rates = [x["train/learning_rate"] for x in read_logged(tmp_path, "train/learning_rate")]
    expected = [5 / 6, 5 / 6, 5 / 8, 5 / 12, 5 / 24]
    assert rates == pytest.approx([1e-3 * part for part in expected] * 2)
    body, head = (loop.optimizer.param_groups[number]["lr"] for number in (0, -1))
    assert head == pytest.approx(10 * body)
    steps = {int(held["step"]) for held in loop.optimizer.state.values()}
    assert steps == {5}  # of the second epoch alone


def test_gradient_of_a_step_is_clipped_to_the_configured_norm(checkpoint, small, tmp_path):
    loop = create_trainer(checkpoint("bert"), small(8), tmp_path, epochs=1, max_grad_norm=0.01)
    loop.fit()
    moments = [held["exp_avg"].norm() for held in loop.optimizer.state.values()]
    beta = loop.optimizer.defaults["betas"][0]  # after one step the moments are 1 - beta of it
    assert torch.stack(moments).norm() == pytest.approx((1 - beta) * 0.01, rel=1e-3)


def test_gradient_of_a_step_is_whole_without_a_norm(checkpoint, small, tmp_path):
    """Mokrii et al. do not clip."""
    norms = []
    for max_norm in (0.0, 1e9):
        folder = tmp_path / str(max_norm)
        loop = create_trainer(
            checkpoint("bert"), small(8), folder, epochs=1, max_grad_norm=max_norm
        )
        loop.fit()
        moments = [held["exp_avg"].norm() for held in loop.optimizer.state.values()]
        norms.append(float(torch.stack(moments).norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) != 0


def test_last_step_is_validated_whatever_the_interval(checkpoint, small, tmp_path):
    settings = {"epochs": 1, "global_batch_size": 32, "eval_steps": 3}
    create_trainer(checkpoint("bert"), small(160), tmp_path, **settings).fit()
    assert [line["step"] for line in read_logged(tmp_path, "dev/AP")] == [3, 5]
