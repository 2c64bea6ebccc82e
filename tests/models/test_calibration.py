import json
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from as2ray.errors import ConfigError, EvaluationError
from as2ray.models.calibration import Calibration, cross_fit, fit_calibration
from as2ray.tables.reliability import measure_abstention, measure_reliability


@pytest.fixture
def sure() -> tuple[np.ndarray, np.ndarray]:
    """20,000 scores whose logits are three times too large, and their labels."""
    random = np.random.default_rng(0)
    logits = random.normal(-1, 1.5, 20_000)
    labels = (random.random(len(logits)) < expit(logits)).astype(int)
    return expit(3 * logits), labels


def test_temperature_finds_by_how_much_the_scores_are_too_sure(sure):
    assert fit_calibration(*sure).temperature == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibrated_scores_are_closer_to_the_shares_on_other_data(sure, kind):
    scores, labels = sure
    made = fit_calibration(scores[:10_000], labels[:10_000], kind)
    before = measure_reliability(scores[10_000:], labels[10_000:])
    after = measure_reliability(made(scores[10_000:]), labels[10_000:])
    assert after.ece < 0.3 * before.ece
    assert after.brier < before.brier


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1)), min_size=2))
def test_isotonic_map_is_the_least_squares_one_at_the_scores_it_saw(pairs):
    scores, labels = (np.array(x) for x in zip(*pairs))
    if len(set(labels.tolist())) < 2:
        return
    made = fit_calibration(scores, labels, "isotonic")
    from scipy.optimize import isotonic_regression

    values = np.unique(scores)
    sizes = np.array([np.sum(scores == v) for v in values])
    shares = np.array([labels[scores == v].mean() for v in values])
    expected = isotonic_regression(shares, weights=sizes).x
    np.testing.assert_allclose(made(values), expected, atol=1e-9)
    assert np.all(np.diff(made(np.linspace(0, 1, 50))) >= -1e-12)


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibration_goes_through_json(sure, kind):
    made = fit_calibration(*sure, kind)
    again = Calibration(**json.loads(json.dumps(asdict(made))))
    assert again == made
    assert again(np.array([0.0, 0.3, 1.0])).tolist() == made(np.array([0.0, 0.3, 1.0])).tolist()


def test_scores_or_labels_that_make_no_sense_are_refused():
    with pytest.raises(EvaluationError, match=r"from 0.5 to 1.5"):
        fit_calibration(np.array([0.5, 1.5]), np.array([0, 1]))
    with pytest.raises(EvaluationError, match="all of 2 labels are 1"):
        fit_calibration(np.array([0.5, 0.6]), np.array([1, 1]))
    with pytest.raises(ConfigError, match="'platt'"):
        fit_calibration(np.array([0.5, 0.6]), np.array([0, 1]), "platt")
    with pytest.raises(EvaluationError, match="0 scores"):
        measure_reliability(np.array([]), np.array([]))


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_cross_fit_calibrates_each_fold_with_the_others(kind):
    random = np.random.default_rng(3)
    scores, labels = random.random(300), (random.random(300) < 0.3).astype(int)
    folds = random.integers(0, 3, 300)
    calibrated = cross_fit(scores, labels, folds, kind)
    for fold in range(3):
        others = fit_calibration(scores[folds != fold], labels[folds != fold], kind)
        np.testing.assert_array_equal(calibrated[folds == fold], others(scores[folds == fold]))
    alone = cross_fit(np.array([0.2, 0.9]), np.array([0, 1]), np.array([0, 1]), "isotonic")
    assert alone.tolist() == [0.2, 0.9]


@pytest.mark.parametrize("labels", [[0, 2], [-1, 1], [0, 1, 2], [0.5, 1]])
def test_labels_other_than_0_and_1_are_refused(labels):
    scores, labels = np.linspace(0, 1, len(labels)), np.array(labels)
    abstention = partial(measure_abstention, min_precision=0.5)
    for measure in (fit_calibration, measure_reliability, abstention):
        with pytest.raises(EvaluationError, match=r"labels must be 0 or 1, not \["):
            measure(scores, labels)
