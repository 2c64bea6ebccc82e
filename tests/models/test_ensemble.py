import numpy as np
import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.packed_ranker import as_packed_ranker

QUESTION = "What is kovarin?"


@pytest.fixture
def members(checkpoint):
    """Rankers of two families, with a tokenizer each."""
    kinds = (("bert", 2), ("roberta", 1), ("albert", 2))
    return [load(checkpoint(*kind), dtype="fp32", max_length=60) for kind in kinds]


def test_score_is_the_weighted_mean_of_the_members(members, pairs):
    weights = (0.5, 0.3, 0.2)
    ranked = EnsembleRanker(members, weights).rank(QUESTION, pairs[1])
    alone = [{r.index: r.score for r in m.rank(QUESTION, pairs[1])} for m in members]
    for r in ranked:
        by_hand = sum(w * scores[r.index] for w, scores in zip(weights, alone))
        assert r.score == pytest.approx(by_hand, abs=1e-6)
    assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)


def test_saved_ensemble_loads_and_ranks_the_same(members, pairs, tmp_path):
    ensemble = EnsembleRanker(members, (0.2, 0.2, 0.6))
    ensemble.calibrate(tiny.candidates(60, seed=3), min_precision=0.01)
    loaded = load(save(ensemble, tmp_path / "saved"), dtype="fp32")
    assert isinstance(loaded, EnsembleRanker)
    assert loaded.weights == (0.2, 0.2, 0.6)
    assert loaded.threshold == ensemble.threshold is not None
    found, expected = (r.rank(QUESTION, pairs[1]) for r in (loaded, ensemble))
    assert [r.index for r in found] == [r.index for r in expected]
    np.testing.assert_allclose([r.score for r in found], [r.score for r in expected], atol=1e-6)


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5, 0.5), (1.2, -0.2, 0.0), (0, 0, 0)])
def test_weights_that_make_no_mean_are_refused(members, weights):
    with pytest.raises(ConfigError, match="weights"):
        EnsembleRanker(members, weights)
    with pytest.raises(ConfigError, match="0 members"):
        EnsembleRanker([])


def test_tokens_or_drop_ratios_for_an_ensemble_are_refused(members):
    ensemble = EnsembleRanker(members)
    with pytest.raises(CheckpointError, match="scores text only"):
        as_packed_ranker(ensemble)
    with pytest.raises(ConfigError, match="EnsembleRanker"):
        ensemble.rank(QUESTION, ["Lala."], drop_ratios=0.3)


def test_weight_that_is_no_number_is_refused(members):
    with pytest.raises(ConfigError, match="nan"):
        EnsembleRanker(members, (0.5, 0.5, float("nan")))


def test_saved_ensemble_of_many_members_keeps_whose_each_weight_is(checkpoint, pairs, tmp_path):
    members = [load(checkpoint("bert"), dtype="fp32", max_length=20 + n) for n in range(11)]
    ensemble = EnsembleRanker(members, [n / 55 for n in range(11)])
    loaded = load(save(ensemble, tmp_path / "saved"), dtype="fp32")
    assert [member.tokenizer.max_length for member in loaded.members] == [*range(20, 31)]


def test_settings_of_an_ensemble_are_its_members_too(members):
    ensemble = EnsembleRanker(members)
    ensemble.dtype, ensemble.use_fused_layers, ensemble.max_batch_tokens = "bf16", False, 512
    assert {(m.dtype, m.use_fused_layers, m.max_batch_tokens) for m in members} == {
        ("bf16", False, 512)
    }


def test_cascade_in_an_ensemble_counts_with_its_last_exit(checkpoint, members, pairs):
    cascade = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3])
    cascade.dtype = "fp32"
    found = EnsembleRanker([cascade, members[0]]).predict_exits(*pairs)
    last, whole = (ranker.predict_exits(*pairs)[:, -1] for ranker in (cascade, members[0]))
    np.testing.assert_allclose(found[:, 0], (last + whole) / 2, atol=1e-6)
