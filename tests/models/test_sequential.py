import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.initialization import build_sequential, init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.sequential import SequentialRanker

QUESTION = "What is kovarin?"


@pytest.fixture
def members(checkpoint, family):
    """Independent rankers of 1, 2 and 3 layers."""
    return independent_rankers(checkpoint(family))


@tiny.copied
def independent_rankers(path):
    made = [init_ranker(path, max_length=60, num_layers=layers) for layers in (1, 2, 3)]
    with torch.no_grad():
        for member in made:
            for weights in member.parameters():
                weights.add_(torch.randn_like(weights) * 0.1)
    return made


@pytest.fixture
def ranker(members) -> SequentialRanker:
    made = build_sequential(members)
    made.dtype = "fp32"
    return made.eval()


def test_every_stage_scores_as_its_ranker_alone(ranker, members, pairs):
    scores = ranker.predict_exits([QUESTION] * 18, pairs[1])
    for member, of_stage in zip(members, scores.T, strict=True):
        member.dtype = "fp32"
        alone = member.predict_pairs([QUESTION] * 18, pairs[1], np.zeros(18, int)).scores
        np.testing.assert_allclose(of_stage, alone, atol=1e-6)
    assert np.ptp(scores, axis=1).max() > 1e-3


def test_each_ranker_drops_the_lowest_of_what_is_left(ranker, pairs):
    scores = ranker.predict_exits([QUESTION] * 18, pairs[1])
    ranked = ranker.rank(QUESTION, pairs[1], drop_ratios=(0.5, 2 / 3))
    lowest = np.argsort(-scores[:, 0], kind="stable")[9:]
    assert [r.index for r in ranked[9:]] == lowest.tolist()
    assert [r.exit_layer for r in ranked] == [3] * 3 + [2] * 6 + [1] * 9
    left = sorted(set(range(18)) - set(lowest))
    assert {r.index for r in ranked[:3]} == set(sorted(left, key=lambda i: -scores[i, 1])[:3])
    last = [r.index for r in ranked[:3]]
    assert last == sorted(last, key=lambda i: -scores[i, 2])


def test_nothing_dropped_equals_the_deepest_ranker(ranker, members, pairs):
    members[-1].dtype = "fp32"
    deepest = members[-1].rank(QUESTION, pairs[1])
    ranked = ranker.rank(QUESTION, pairs[1])
    assert [r.index for r in ranked] == [r.index for r in deepest]
    np.testing.assert_allclose([r.score for r in ranked], [r.score for r in deepest], atol=1e-6)


def test_saved_ranker_loads_and_ranks_the_same(ranker, pairs, tmp_path):
    ranker.drop_ratios = 0.4
    loaded = load(save(ranker, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    assert isinstance(loaded, SequentialRanker)
    assert loaded.rank(QUESTION, pairs[1]) == ranker.rank(QUESTION, pairs[1])


def test_rankers_not_of_growing_depth_or_of_several_encoders_are_refused(checkpoint, members):
    with pytest.raises(ConfigError, match=r"exit_layers=\[2, 1\]"):
        build_sequential([members[1], members[0]])
    other = init_ranker(checkpoint("bert", intermediate_size=40), max_length=60)
    with pytest.raises(CheckpointError, match="differ in more than their layers"):
        build_sequential([members[0], other])


def test_sequence_of_nothing_or_of_other_rankers_is_refused(checkpoint, members):
    cascade = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3])
    for wrong in ([], [members[0], cascade]):
        with pytest.raises(CheckpointError, match="pointwise"):
            build_sequential(wrong)
