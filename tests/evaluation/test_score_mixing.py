import numpy as np
import pyarrow as pa
import pytest

from as2ray.evaluation.score_mixing import best_bm25_weight, mix_scores


@pytest.fixture
def rows() -> pa.Table:
    return pa.table(
        {
            "question_id": ["a"] * 3 + ["b"] * 2,
            "candidate_id": list("vwxyz"),
            "label": pa.array([0, 1, 0, 0, 1], pa.int8()),
        }
    )


def test_mixture_brings_both_to_one_scale_within_each_question(rows):
    ranker, bm25 = np.array([1.0, 2, 3, 5, 5]), np.array([30.0, 20, 10, 7, 9])
    half = mix_scores(rows, ranker, bm25, 0.5)
    assert half[:3] == pytest.approx([0, 0, 0], abs=1e-9)
    assert half[3:] == pytest.approx([-0.5, 0.5])
    own = mix_scores(rows, ranker, bm25, 0.0)
    assert own[:3] == pytest.approx(np.array([-1, 0, 1]) * np.sqrt(1.5))
    assert own[3:].tolist() == [0, 0]  # equal scores stay equal


def test_best_weight_is_the_smallest_that_dev_likes_best(rows):
    right, wrong = np.array([0.0, 1, 0, 0, 1]), np.array([1.0, 0, 1, 1, 0])
    assert best_bm25_weight(rows, right, wrong, "RR") == 0.0
    assert best_bm25_weight(rows, wrong, right, "RR") == 0.6
    assert best_bm25_weight(rows, right, right, "RR") == 0.0
    assert best_bm25_weight(rows, wrong, right, "nDCG@5") == 0.6
