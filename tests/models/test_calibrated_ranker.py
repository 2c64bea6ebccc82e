import numpy as np
import pyarrow as pa
import pytest
import tiny
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError, EvaluationError
from as2ray.models.calibration import UNCHANGED
from as2ray.tables.reliability import measure_abstention, measure_reliability

QUESTION = "What is kovarin?"


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
@pytest.mark.parametrize("exits", [None, (1, 2, 3)])
def test_calibrated_ranker_keeps_its_order_and_comes_closer_to_the_labels(
    checkpoint, pairs, tmp_path, kind, exits
):
    path = checkpoint("bert", 2 if exits is None else None, initializer_range=0.5)
    ranker = init_ranker(path, max_length=60, exit_layers=exits)
    ranker.dtype = "fp32"
    before = ranker.rank(QUESTION, pairs[1], drop_ratios=0.5 if exits else None)
    dev = tiny.candidates(40, seed=4)
    result = ranker.calibrate(dev, kind)
    assert any(before.ece >= after.ece for before, after in zip(result.before, result.after))
    loaded = load(save(ranker, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    after = loaded.rank(QUESTION, pairs[1], drop_ratios=0.5 if exits else None)
    assert [(r.index, r.exit_layer) for r in after] == [(r.index, r.exit_layer) for r in before]
    assert [r.score for r in after] != [r.score for r in before]

    texts = (dev["question"].to_pylist(), dev["candidate"].to_pylist())
    for of_stage, calibration in zip(
        ranker.predict_exits(*texts).T, ranker.calibration, strict=True
    ):
        plain = measure_reliability(of_stage.astype(float), dev["label"].to_numpy())
        mended = measure_reliability(calibration(of_stage), dev["label"].to_numpy())
        assert mended.brier <= plain.brier + 1e-9
        assert np.isfinite(mended.ece)


def test_calibration_of_questions_whose_rows_are_not_adjacent_is_that_of_sorted_ones(checkpoint):
    ranker, table = (
        load(checkpoint("bert"), max_length=60, device="cpu"),
        tiny.candidates(8, seed=4),
    )
    expected = ranker.calibrate(table)
    calibration, threshold = ranker.calibration, ranker.threshold
    last = [0, *range(5, table.num_rows), *range(1, 5)]  # the first question ends the table
    result = ranker.calibrate(table.take(last))
    assert (result.num_questions, ranker.threshold) == (8, threshold)
    assert repr(result).split(";")[-1] == repr(expected).split(";")[-1]
    assert ranker.calibration == calibration


def test_calibration_does_not_outlive_the_weights_it_was_made_for(checkpoint, tmp_path):
    ranker = load(checkpoint("bert"), max_length=60, device="cpu")
    ranker.calibrate(tiny.candidates(60, seed=4), min_precision=0.01)
    assert ranker.threshold is not None
    folder = save(ranker, tmp_path / "saved")
    assert len(load(folder).calibration) == 1
    assert load(folder).threshold == ranker.threshold
    begun = init_ranker(folder, max_length=60)
    assert (begun.calibration, begun.threshold) == ((), None)
    cascade = init_ranker(folder, max_length=60, exit_layers=(1, 2))
    cascade.calibrate(tiny.candidates(10, seed=4))
    begun = init_ranker(save(cascade, tmp_path / "cascade"), max_length=60)
    assert (begun.calibration, begun.threshold) == ((), None)


@pytest.mark.parametrize("high_confidence", [True, False])
def test_threshold_gives_right_answers_often_enough_on_its_own_split(checkpoint, high_confidence):
    ranker = load(checkpoint("bert", 2, initializer_range=0.5), max_length=60, device="cpu")
    dev = tiny.candidates(60, seed=4)
    # The first candidates of the half of the questions with the highest scores are answers.
    best = ranker.predict_table(dev).scores.reshape(60, 5)
    is_best = best == best.max(1, keepdims=True)
    labels = (is_best & (best.max(1, keepdims=True) > np.median(best.max(1)))).astype(np.int8)
    dev = dev.set_column(4, "label", [labels.ravel()])
    ranker.calibrate(dev, min_precision=0.6, high_confidence=high_confidence)
    questions = {row["question_id"]: row["question"] for row in dev.to_pylist()}
    given, right = 0, 0
    for id, question in questions.items():
        rows = [row for row in dev.to_pylist() if row["question_id"] == id]
        best = ranker.rank(question, [row["candidate"] for row in rows], 1)[0]
        if best.score >= ranker.threshold:
            given, right = given + 1, right + rows[best.index]["label"]
    # Of 48, 30 may be too few elsewhere.
    assert (given, right) == ((38, 30) if high_confidence else (50, 30))


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibration_that_makes_held_out_scores_worse_is_not_stored(checkpoint, kind, monkeypatch):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=(1, 2, 3))
    dev = tiny.candidates(40, seed=4)
    labels = dev["label"].to_numpy()
    good, bad = np.where(labels, 0.99, 0.01), np.random.default_rng(0).random(len(labels))
    # Scores that tell the answers exactly need no calibration, or one that errs in other folds.
    exact = np.stack([bad, np.where(labels, 1.0, 0.0), good], 1).astype(np.float32)
    monkeypatch.setattr(ranker, "predict_exits", lambda *_: exact)
    result = ranker.calibrate(dev, kind)
    for calibration, before, after in zip(ranker.calibration, result.before, result.after):
        assert (calibration == UNCHANGED) == (after.ece > before.ece)
    assert ranker.calibration[0] != UNCHANGED


def test_threshold_that_is_not_precise_enough_is_not_stored(checkpoint):
    ranker = load(checkpoint("bert", 2, initializer_range=0.5), max_length=60, device="cpu")
    result = ranker.calibrate(tiny.candidates(10, seed=4), min_precision=1.0)
    assert ranker.threshold is None
    assert result.abstention.reachable_precision < 1


def test_calibration_does_not_outlive_exits_that_are_let_go(checkpoint):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=(1, 2, 3))
    ranker.calibrate(tiny.candidates(60, seed=4), min_precision=0.01)
    assert ranker.threshold is not None
    ranker.prune_exits([1, 3])
    assert (ranker.calibration, ranker.threshold) == ((), None)


@pytest.mark.parametrize(
    ("label", "precision", "error", "message"),
    [(0, 0.5, EvaluationError, "labels"), (None, 1.5, ConfigError, "less than or equal to 1")],
)
def test_wrong_labels_or_precision_are_refused_before_scoring(
    checkpoint, monkeypatch, label, precision, error, message
):
    ranker, table = load(checkpoint("bert")), tiny.candidates(6)
    monkeypatch.setattr(ranker, "predict_exits", None)
    if label is not None:
        table = table.set_column(4, "label", pa.array([label] * table.num_rows, pa.int8()))
    with pytest.raises(error, match=message):
        ranker.calibrate(table, min_precision=precision)


@pytest.mark.parametrize("precision", [0.01, 0.05])
def test_threshold_is_set_on_calibrated_scores_of_the_first_of_each_ranking(checkpoint, precision):
    dev = tiny.candidates(40, seed=4)
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=(1, 2, 3))
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    ranker.dtype, ranker.drop_ratios = "fp32", 0.5
    ranker.calibrate(dev, min_precision=precision)
    scores, labels, is_lower = [], [], []
    for id in dev["question_id"].unique().to_pylist():
        rows = [row for row in dev.to_pylist() if row["question_id"] == id]
        ranked = ranker.rank(rows[0]["question"], [row["candidate"] for row in rows])
        scores.append(ranked[0].score)
        labels.append(rows[ranked[0].index]["label"])
        is_lower.append(ranked[0].score < max(one.score for one in ranked))
    assert any(is_lower)  # what was dropped early may have a higher score
    expected = measure_abstention(np.array(scores), np.array(labels), precision)
    assert ranker.threshold == pytest.approx(expected.threshold, abs=1e-6)
