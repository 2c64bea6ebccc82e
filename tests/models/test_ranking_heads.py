import numpy as np
import pytest
import tiny
import torch
import transformers

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.encoder.families import FAMILIES
from as2ray.models.ranker import CONFIG_KEY, positive_probability
from as2ray.text.packing import pack_sequences

QUESTION = "What is kovarin?"


@pytest.fixture(params=[name for name in FAMILIES if FAMILIES[name].final_norm is None])
def family(request) -> str:
    """Name of each family whose layers can be the first of a head."""
    return request.param


def test_heads_of_a_family_with_a_final_norm_are_refused_by_name(checkpoint):
    with pytest.raises(ConfigError, match="model_type='modernbert' cannot be the first of a head"):
        cerberus(checkpoint("modernbert"))


@tiny.copied
def cerberus(path, exits=(2,), heads=3, **how) -> CascadeRanker:
    ranker = init_ranker(path, max_length=60, exit_layers=exits, num_ranking_heads=heads, **how)
    ranker.dtype = "fp32"
    return ranker.eval()


@pytest.fixture
def ranker(checkpoint, family) -> CascadeRanker:
    """B2_3H1 whose heads differ."""
    made = cerberus(checkpoint(family))
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    return made


def test_every_head_starts_as_the_ranker_it_was_made_from(checkpoint, family, packed):
    whole = load(checkpoint(family), dtype="fp32", max_length=60, device="cpu")
    with torch.no_grad():
        expected = whole(packed)
        found = cerberus(checkpoint(family))(packed)
    assert found.shape == (18, 3, 2)
    for of_head in found.unbind(1):
        torch.testing.assert_close(of_head, expected, atol=1e-5, rtol=1e-5)


def test_heads_on_a_pretrained_encoder_have_classifiers_of_their_own(checkpoint, family, packed):
    with torch.no_grad():
        logits = cerberus(checkpoint(family, None))(packed)
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_score_is_the_average_of_the_heads(checkpoint, packed, pairs, average):
    ranker = cerberus(checkpoint("bert", None), score_averaging=average)
    ranked = ranker.rank(QUESTION, pairs[1])
    with torch.no_grad():
        batch = ranker.tokenizer.encode([QUESTION] * 18, pairs[1]).pack(np.arange(18), {})
        logits = ranker(batch)
    by_hand = positive_probability(logits.mean(1) if average == "logits" else logits)
    by_hand = by_hand if average == "logits" else by_hand.mean(1)
    np.testing.assert_allclose(
        [r.score for r in ranked], sorted(by_hand.tolist(), reverse=True), atol=1e-6
    )


def test_loss_of_one_head_leaves_the_others_and_moves_the_body(ranker, packed):
    ranker(packed)[:, 1].sum().backward()
    heads = ranker.network.heads[-1].networks
    moved = [any(w.grad is not None and w.grad.any() for w in h.parameters()) for h in heads]
    assert moved == [False, True, False]
    assert all(w.grad is not None for w in ranker.encoder.layers[0].parameters())


def test_saved_ranker_loads_and_ranks_the_same(ranker, pairs, tmp_path):
    loaded = load(save(ranker, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    assert loaded.rank(QUESTION, pairs[1]) == ranker.rank(QUESTION, pairs[1])


def test_fused_layers_of_heads_score_as_transformers_own_do(ranker, pairs):
    own = ranker.rank(QUESTION, pairs[1])
    ranker.use_fused_layers = True
    fused = {r.index: r.score for r in ranker.rank(QUESTION, pairs[1])}
    np.testing.assert_allclose([fused[r.index] for r in own], [r.score for r in own], atol=1e-5)


def test_body_with_exits_prunes_and_the_heads_score_the_survivors(checkpoint, family, pairs):
    ranker = cerberus(checkpoint(family, None, initializer_range=0.3), exits=(1, 2))
    scores = ranker.predict_exits([QUESTION] * 18, pairs[1])
    ranked = ranker.rank(QUESTION, pairs[1], drop_ratios=0.5)
    assert [r.exit_layer for r in ranked] == [2] * 9 + [1] * 9
    assert {r.index for r in ranked[:9]} == set(np.argsort(-scores[:, 0], kind="stable")[:9])
    np.testing.assert_allclose(
        [r.score for r in ranked[:9]], [scores[r.index, 1] for r in ranked[:9]], atol=1e-5
    )


@pytest.mark.parametrize(("body", "millions"), [(11, 124.8), (10, 139.0), (8, 167.4), (6, 195.7)])
def test_parameters_of_electra_base_follow_from_its_layers(body, millions):
    # The paper prints 124, 139, 169 and 199. A layer of ELECTRA-base has 7.09M weights, so its
    # last two cannot be: from 139 to 169 there are four layers more, 28.4M.
    config = transformers.ElectraConfig(
        embedding_size=768, hidden_size=768, intermediate_size=3_072, num_attention_heads=12
    )
    settings = {"exit_layers": [body], "drop_ratios": [], "pooling": "first"}
    settings |= {"num_ranking_heads": 3, "layers_per_head": 12 - body}
    settings["score_averaging"] = "probabilities"
    config.num_hidden_layers = body
    setattr(config, CONFIG_KEY, settings)
    with torch.device("meta"):
        network = CascadeNetwork(config)
    assert sum(w.numel() for w in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_logits_of_a_student_that_is_sure_are_finite(checkpoint, pairs):
    ranker = cerberus(checkpoint("bert"))
    with torch.no_grad():
        for network in ranker.network.heads[-1].networks:
            network.classifier.bias.copy_(torch.tensor([-60.0, 60.0]))
    found = ranker.predict_logits(pack_sequences(ranker.tokenizer.encode(*pairs), 8_192), 18)
    assert np.isfinite(found).all()
    assert (found[:, 1] > found[:, 0]).all()


def test_heads_without_layers_or_exits_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="num_ranking_heads=3 needs layers above the last exit"):
        cerberus(checkpoint("bert"), exits=[3])
    with pytest.raises(ConfigError, match="num_ranking_heads=3 needs exit_layers"):
        cerberus(checkpoint("bert"), exits=None)
    with pytest.raises(ConfigError, match="'sum'"):
        cerberus(checkpoint("bert"), score_averaging="sum")


def test_heads_on_a_classifier_of_one_label_have_classifiers_of_their_own(
    checkpoint, family, packed
):
    with torch.no_grad():
        logits = cerberus(checkpoint(family, 1))(packed)
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-4


def test_scores_of_heads_are_those_of_the_last_exit(checkpoint, pairs):
    ranker = cerberus(checkpoint("bert", None), exits=(1, 2))
    sequences = ranker.tokenizer.encode(*pairs)
    found = ranker.predict_heads(sequences)
    assert found.shape == (18, 3)
    np.testing.assert_allclose(
        found.mean(1), ranker.predict_sequence_exits(sequences)[:, -1], atol=1e-6
    )


def test_heads_are_averaged_as_probabilities_or_as_logits(checkpoint):
    logits = torch.tensor([[[0.0, 4.0], [0.0, -2.0], [0.0, -2.0]]])
    for average, expected in (
        ("probabilities", logits[0, :, 1].sigmoid().mean()),
        ("logits", torch.tensor(0.0).sigmoid()),
    ):
        ranker = cerberus(checkpoint("bert", None), score_averaging=average)
        torch.testing.assert_close(ranker.network.heads[-1].score(logits)[0], expected)
