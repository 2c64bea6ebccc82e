import numpy as np
import pyarrow as pa
import pytest
import tiny
import torch
from pydantic import ValidationError

from as2ray.checkpoints.loading import load
from as2ray.corpora.sampling import sample_questions
from as2ray.errors import CheckpointError
from pipelines.few_shot import (
    FewShotConfig,
    best_bm25_weight,
    interpolate_on_dev,
    interpolate_weights,
    mix_scores,
)


def test_epochs_fall_from_32_on_32_questions():
    how = FewShotConfig()
    assert [how.epochs_of(n) for n in (8, 32, 128, 512, 2_048, 100_000)] == [32, 32, 16, 8, 4, 1]
    assert FewShotConfig(epoch_decay=1.0, min_epochs=2).epochs_of(512) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_questions": ()},
        {"num_questions": (0,)},
        {"num_samples": 0},
        {"epoch_decay": -1.0},
        {"interpolation_weights": ()},
        {"interpolation_weights": (0.5, 1.5)},
    ],
)
def test_impossible_protocol_is_refused(wrong):
    with pytest.raises(ValidationError):
        FewShotConfig(**wrong)


def test_nested_samples_hold_the_smaller_ones_and_independent_ones_do_not():
    table = tiny.candidates(60)

    def drawn(size: int, nested: bool) -> set[str]:
        return set(sample_questions(table, size, seed=4, nested=nested)["question_id"].to_pylist())

    assert drawn(8, True) < drawn(20, True) < drawn(40, True)
    assert len(drawn(20, True)) == 20
    assert not drawn(8, False) < drawn(20, False)


def rows() -> pa.Table:
    return pa.table(
        {
            "question_id": ["a"] * 3 + ["b"] * 2,
            "candidate_id": list("vwxyz"),
            "label": pa.array([0, 1, 0, 0, 1], pa.int8()),
        }
    )


def test_mixture_brings_both_to_one_scale_within_each_question():
    ranker, keywords = np.array([1.0, 2, 3, 5, 5]), np.array([30.0, 20, 10, 7, 9])
    half = mix_scores(rows(), ranker, keywords, 0.5)
    assert half[:3] == pytest.approx([0, 0, 0], abs=1e-9)
    assert half[3:] == pytest.approx([-0.5, 0.5])
    own = mix_scores(rows(), ranker, keywords, 0.0)
    assert own[:3] == pytest.approx(np.array([-1, 0, 1]) * np.sqrt(1.5))
    assert own[3:].tolist() == [0, 0]  # equal scores stay equal


def test_best_part_is_the_smallest_that_dev_likes_best():
    right, wrong = np.array([0.0, 1, 0, 0, 1]), np.array([1.0, 0, 1, 1, 0])
    assert best_bm25_weight(rows(), right, wrong, "RR", "raw") == 0.0
    assert best_bm25_weight(rows(), wrong, right, "RR", "raw") == 0.6
    assert best_bm25_weight(rows(), right, right, "RR", "raw") == 0.0


@pytest.fixture
def rankers(checkpoint):
    paths = [checkpoint("bert", 2, initializer_range=size) for size in (0.2, 0.3)]
    return [load(path, device="cpu", dtype="fp32") for path in paths]


def test_between_moves_every_weight_a_part_of_the_way(rankers):
    tuned, start = rankers
    ends = [{n: w.clone() for n, w in r.state_dict().items()} for r in rankers]
    interpolate_weights(tuned, start.state_dict(), 0.25)
    for name, weights in tuned.state_dict().items():
        expected = 0.75 * ends[0][name] + 0.25 * ends[1][name]
        np.testing.assert_allclose(weights.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(CheckpointError, match="of different kinds"):
        interpolate_weights(tuned, {}, 0.5)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_one_step_is_taken_whatever_dev_says(rankers, part):
    tuned, start = rankers
    own, other = ({n: w.clone() for n, w in r.state_dict().items()} for r in rankers)
    assert (
        interpolate_on_dev(tuned, start, tiny.candidates(4, seed=6), "RR", "raw", (part,)) == part
    )
    for name, weight in tuned.state_dict().items():
        assert torch.allclose(weight, torch.lerp(own[name], other[name], part))


def test_best_step_leaves_the_ranker_where_dev_likes_it_best(rankers):
    from as2ray.evaluation.measures import evaluate

    dev = tiny.candidates(20, seed=6)
    tuned, start = rankers
    worth = {
        0.0: evaluate(dev, tuned.predict_table(dev).sort_keys, ["RR"]).measures["RR"],
        1.0: evaluate(dev, start.predict_table(dev).sort_keys, ["RR"]).measures["RR"],
    }
    part = interpolate_on_dev(tuned, start, dev, "RR", "raw", (0.0, 1.0))
    assert worth[part] == max(worth.values())
    found = evaluate(dev, tuned.predict_table(dev).sort_keys, ["RR"]).measures["RR"]
    assert found == pytest.approx(worth[part])
