from random import Random
from threading import Event, current_thread

import numpy as np
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from as2ray.cascade.pruning import num_kept
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError, EvaluationError
from as2ray.losses import get_loss
from as2ray.losses.base import StepContext
from as2ray.models import packed_ranker
from as2ray.models.cascade import CascadeRanker, PartialClassifier
from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.ranker import BEFORE_BATCH
from as2ray.text.tokenization import PairTokenizer

QUESTION = "What is kovarin?"


@pytest.fixture
def ranker(checkpoint, family) -> CascadeRanker:
    return cascade(checkpoint(family, None))


@pytest.fixture
def bert(checkpoint) -> CascadeRanker:
    return cascade(checkpoint("bert", None))


@tiny.copied
def cascade(path, exits=(1, 2, 3), **how) -> CascadeRanker:
    """A cascade of random weights whose scores differ."""
    ranker = init_ranker(path, max_length=60, exit_layers=exits, **how)
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    ranker.dtype = "fp32"
    return ranker.eval()


def by_hand(ranker, question, texts, ratios):
    """The ranking that follows from all exits' scores: (index, score, exit layer), best first."""
    scores = ranker.predict_exits([question] * len(texts), texts)
    left, gone = list(range(len(texts))), []
    for stage, layer in enumerate(ranker.exit_layers):
        best = sorted(left, key=lambda i: -scores[i, stage])
        stays = num_kept(len(left), ratios[stage]) if stage < len(ratios) else 0
        gone = [(i, scores[i, stage], layer) for i in best[stays:]] + gone
        left = sorted(best[:stays])
    return gone


def test_passes_side_by_side_score_as_one_after_the_other(bert, monkeypatch):
    bert.max_pass_tokens = 50
    questions = [f"Who is {number}?" for number in range(40) for _ in range(6)]
    texts = [f"{' '.join('abc'[: i % 3 + 1])} {i}." for i in range(240)]
    question_index = np.repeat(np.arange(40), 6)
    expected = bert.predict_pairs(questions, texts, question_index, 0.5)

    threads = set()
    monkeypatch.setattr(CascadeRanker, "num_pass_threads", 2)
    reset_token = BEFORE_BATCH.set(lambda: threads.add(current_thread()))
    try:
        staged = bert.predict_pairs(questions, texts, question_index, 0.5)
    finally:
        BEFORE_BATCH.reset(reset_token)
    assert len(threads) == 2
    assert current_thread() not in threads
    np.testing.assert_allclose(staged.scores, expected.scores, atol=1e-6)
    np.testing.assert_array_equal(staged.stage_index, expected.stage_index)


def test_nothing_dropped_equals_the_plain_forward_of_every_pair(ranker, pairs):
    ranked = ranker.rank(QUESTION, pairs[1])
    plain = ranker.predict_exits([QUESTION] * 18, pairs[1])[:, -1]
    assert {r.exit_layer for r in ranked} == {3}
    assert [r.score for r in ranked] == [plain[r.index] for r in ranked]
    assert [r.score for r in ranked] == sorted(plain.tolist(), reverse=True)


def test_exits_after_few_layers_equal_an_encoder_of_so_many_layers(ranker, packed):
    with torch.no_grad():
        whole = ranker(packed)
        for number in range(3):
            torch.testing.assert_close(ranker(packed, [number])[:, 0], whole[:, number])
    assert whole.shape == (18, 3, 2)
    assert (whole[:, 0] - whole[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("exit_indices", [[2], [0, 1, 2]])
def test_stopped_gradient_of_an_exit_ends_at_the_exit_below_it(bert, pairs, exit_indices):
    (packed,), ranker = bert.pack(bert.tokenizer.encode(*pairs)), bert
    kwargs = get_loss("uniform_exit_stop_gradient").forward_kwargs(StepContext(exit_layers=(1, 2)))
    assert kwargs["stop_gradient"]
    logits = ranker(packed, exit_indices, stop_gradient=True)
    torch.testing.assert_close(logits, ranker(packed, exit_indices))
    logits[:, -1].sum().backward()
    has_gradient = [
        any(weight.grad is not None and weight.grad.any() for weight in layer.parameters())
        for layer in ranker.encoder.layers
    ]
    assert has_gradient == [False, False, True]
    assert all(weight.grad is not None for weight in ranker.network.heads[2].parameters())
    logits = ranker(packed, [0], stop_gradient=True)
    logits.sum().backward()
    assert ranker.network.get_input_embeddings().weight.grad.any()


@pytest.mark.parametrize("max_tokens", [60, 8_192])
@pytest.mark.parametrize("drop", [0.3, (0.5, 0.2), (0.0, 0.9)])
def test_dropped_stand_below_survivors_by_exit_then_score(ranker, pairs, drop, max_tokens):
    ranker.max_batch_tokens = max_tokens
    ratios = [drop, drop] if isinstance(drop, float) else drop
    expected = by_hand(ranker, QUESTION, pairs[1], ratios)
    ranked = ranker.rank(QUESTION, pairs[1], drop_ratios=drop)
    assert [(r.index, r.exit_layer) for r in ranked] == [(i, layer) for i, _, layer in expected]
    np.testing.assert_allclose([r.score for r in ranked], [s for _, s, _ in expected], atol=1e-6)
    assert len({r.exit_layer for r in ranked}) > 1


def test_each_question_drops_its_own_candidates_by_its_own_ratios(bert, pairs):
    asked = [(QUESTION, pairs[1][:9]), ("What is quintol?", pairs[1][4:])]
    together = bert.rank_many(asked, np.array([[0.5, 0.0], [0.2, 0.7]]))
    for ranked, (question, texts), drop in zip(together, asked, ([0.5, 0.0], [0.2, 0.7])):
        alone = bert.rank(question, texts, drop_ratios=drop)
        assert [(r.index, r.exit_layer) for r in ranked] == [(r.index, r.exit_layer) for r in alone]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_result_does_not_depend_on_the_questions_that_share_the_batch(checkpoint, data):
    ranker = cascade(checkpoint("bert", None))
    texts = st.lists(st.sampled_from(tiny.WORDS).map(lambda w: f"{w} {w}."), max_size=12)
    asked = [
        (f"What is {topic}?", [*data.draw(texts), "Badesso."])
        for topic in data.draw(st.lists(st.sampled_from(tiny.TOPICS), min_size=1, max_size=4))
    ]
    ranker.max_pass_tokens = data.draw(st.sampled_from([1, 100, 65_536]))
    together = ranker.rank_many(asked, drop_ratios=0.4)
    for ranked, (question, candidates) in zip(together, asked, strict=True):
        alone = {r.index: r for r in ranker.rank(question, candidates, drop_ratios=0.4)}
        assert [r.exit_layer for r in ranked] == [alone[r.index].exit_layer for r in ranked]
        np.testing.assert_allclose(
            [r.score for r in ranked], [alone[r.index].score for r in ranked], atol=1e-6
        )


def test_in_bf16_scores_are_within_a_hundredth_of_fp32(ranker, pairs):
    exact = ranker.predict_exits([QUESTION] * 18, pairs[1])
    ranker.dtype = "bf16"
    rough = ranker.predict_exits([QUESTION] * 18, pairs[1])
    assert 0 < np.abs(exact - rough).max() < 0.01


def test_in_bf16_no_exit_rounds_two_candidates_to_one_score(ranker):
    random = Random(2)
    texts = list({tiny.sentence(random, random.randint(4, 20)) for _ in range(400)})
    ranker.dtype = "bf16"
    for scores in ranker.predict_exits([QUESTION] * len(texts), texts).T:
        assert len(np.unique(scores)) > 0.98 * len(texts)


def test_in_bf16_sharing_a_batch_moves_a_score_by_less_than_a_hundredth(ranker, pairs):
    ranker.dtype = "bf16"
    questions = [f"What is {topic}?" for topic in tiny.TOPICS]
    together = ranker.rank_many([(question, pairs[1]) for question in questions], drop_ratios=0.0)
    for question, ranked in zip(questions, together):
        alone = {r.index: r.score for r in ranker.rank(question, pairs[1], drop_ratios=0.0)}
        assert max(abs(alone[r.index] - r.score) for r in ranked) < 0.01


def test_sensible_answers_to_few_or_equal_candidates(bert):
    assert bert.rank(QUESTION, [], drop_ratios=0.5) == []
    assert bert.rank_many([], drop_ratios=0.5) == []
    assert [r.exit_layer for r in bert.rank(QUESTION, ["Lala."], drop_ratios=0.9)] == [3]
    twins = bert.rank(QUESTION, ["Lala ne."] * 6, drop_ratios=0.5)
    assert sorted(r.index for r in twins) == list(range(6))
    assert [r.exit_layer for r in twins] == [3, 3, 2, 1, 1, 1]
    bert.rounding = "nearest"
    twins = bert.rank(QUESTION, ["Lala ne."] * 6, drop_ratios=0.5)
    assert [r.exit_layer for r in twins] == [3, 2, 2, 1, 1, 1]
    long = bert.rank(QUESTION, ["lala " * 10_000, "Lala."], drop_ratios=0.5)
    assert [r.exit_layer for r in long] == [3, 1]
    with pytest.raises(EvaluationError, match="non-text"):
        bert.rank(QUESTION, ["Lala.", 7], drop_ratios=0.5)


@pytest.mark.parametrize("drop", [1.0, -0.1, float("nan"), (0.1, 0.2, 0.3), (0.1,)])
def test_drop_ratios_that_make_no_sense_are_refused(bert, drop):
    with pytest.raises(ConfigError, match="drop ratios"):
        bert.rank(QUESTION, ["Lala.", "Ne."], drop_ratios=drop)
    with pytest.raises(ConfigError, match="drop ratios"):
        bert.drop_ratios = drop


def test_drop_ratios_for_a_ranker_of_one_piece_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="PointwiseRanker"):
        load(checkpoint("bert")).rank(QUESTION, ["Lala."], drop_ratios=0.3)


@pytest.mark.parametrize("exits", [[], [0, 2], [2, 2], [3, 1], [1, 4]])
def test_exits_that_the_encoder_does_not_have_are_refused(checkpoint, exits):
    with pytest.raises(ConfigError, match="exit_layers"):
        init_ranker(checkpoint("bert", None), max_length=60, exit_layers=exits)


def test_layers_above_the_last_exit_are_left_out(checkpoint, family):
    ranker = cascade(checkpoint(family, None), exits=[1, 2])
    assert len(ranker.encoder) == 2
    assert ranker.network.config.num_hidden_layers == 2


def test_saved_cascade_loads_and_ranks_the_same(ranker, pairs, tmp_path):
    ranker.drop_ratios = [0.3, 0.5]
    loaded = load(save(ranker, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    assert isinstance(loaded, CascadeRanker)
    assert (loaded.exit_layers, loaded.drop_ratios) == ((1, 2, 3), [0.3, 0.5])
    assert loaded.rank(QUESTION, pairs[1]) == ranker.rank(
        QUESTION, pairs[1], drop_ratios=[0.3, 0.5]
    )


def test_cascade_goes_on_from_a_cascade_as_it_was(ranker, pairs, tmp_path):
    folder = save(ranker, tmp_path / "saved")
    again = init_ranker(folder, max_length=60, seed=9, exit_layers=(1, 2, 3))
    again.dtype = "fp32"
    assert again.rank(QUESTION, pairs[1]) == ranker.rank(QUESTION, pairs[1])
    with pytest.raises(ConfigError, match="keep their layers, exits and heads"):
        init_ranker(folder, max_length=60, exit_layers=[1, 3])


def test_cascade_from_a_ranker_has_its_body_and_new_heads(checkpoint, family):
    whole = load(checkpoint(family), max_length=60, device="cpu")
    made = init_ranker(checkpoint(family), max_length=60, exit_layers=[2, 3])
    body = dict(whole.network.base_model.named_parameters())
    found = dict(made.network.body.named_parameters())
    assert found
    assert all(torch.equal(body[name], weights) for name, weights in found.items())


def test_partial_classifier_sees_the_mean_of_all_tokens_or_the_first():
    hidden, layout = torch.randn(7, 8), SequenceLayout.from_lengths([4, 3], torch.device("cpu"))
    inside = hidden.clone()
    inside[1:4] = torch.randn(3, 8)  # not the first token of either sequence
    first, mean = (PartialClassifier(8, pooling, 0.1).eval() for pooling in ("first", "mean"))
    assert torch.equal(first(hidden, layout), first(inside, layout))
    assert not torch.allclose(mean(hidden, layout)[0], mean(inside, layout)[0])
    torch.testing.assert_close(mean(hidden, layout)[0, 0], mean.layers(hidden[:4].mean(0)))


def test_partial_classifier_of_the_paper_leaves_out_the_start_symbol(checkpoint):
    """1/m sum over l = 1..m of h_l (section 4.3); h_0 is the start symbol."""
    hidden, layout = torch.randn(7, 8), SequenceLayout.from_lengths([4, 3], torch.device("cpu"))
    rest = PartialClassifier(8, "mean_of_rest", 0.1).eval()
    expected = rest.layers(torch.stack([hidden[1:4].mean(0), hidden[5:].mean(0)]))
    torch.testing.assert_close(rest(hidden, layout)[:, 0], expected)
    heads = cascade(checkpoint("bert", None)).network.heads
    assert {head.pooling for head in heads} == {"mean_of_rest"}


def test_question_without_candidates_may_stand_anywhere_among_others(bert, pairs):
    drop = np.array([[0.9, 0.0], [0.2, 0.7], [0.9, 0.9], [0.5, 0.5]])
    asked = [(QUESTION, []), (QUESTION, pairs[1]), (QUESTION, []), (QUESTION, [])]
    for number in range(1, 5):
        found = bert.rank_many(asked[:number], drop[:number])
        assert [len(ranked) for ranked in found] == [0, 18, 0, 0][:number]
    assert [(r.index, r.exit_layer) for r in found[1]] == [
        (r.index, r.exit_layer) for r in bert.rank(QUESTION, pairs[1], drop_ratios=[0.2, 0.7])
    ]


def test_next_questions_are_tokenized_while_a_gpu_scores_those_before(bert, pairs, monkeypatch):
    question_index = np.repeat([1, 0, 3], 6)
    ratios = np.array([[0.5, 0.0], [0.2, 0.7], [0.0, 0.0], [0.9, 0.9]])
    expected = bert.predict_pairs(*pairs, question_index, ratios)
    num_tokenized, two_are_tokenized = 0, Event()
    encode, predict_sequences = PairTokenizer.encode, CascadeRanker.predict_sequences

    def count_tokenized(*args):
        nonlocal num_tokenized
        sequences, num_tokenized = encode(*args), num_tokenized + 1
        if num_tokenized == 2:
            two_are_tokenized.set()
        return sequences

    def wait_for_two(*args):
        assert two_are_tokenized.wait(10)
        return predict_sequences(*args)

    monkeypatch.setattr(packed_ranker, "SLICE_PAIRS", 6)
    monkeypatch.setattr(CascadeRanker, "tokenizes_ahead", True)
    monkeypatch.setattr(CascadeRanker, "predict_sequences", wait_for_two)
    monkeypatch.setattr(PairTokenizer, "encode", count_tokenized)
    scores = bert.predict_pairs(*pairs, question_index, ratios)
    assert num_tokenized == 3
    np.testing.assert_array_equal(scores.stage_index, expected.stage_index)
    np.testing.assert_allclose(scores.scores, expected.scores, atol=1e-6)


def test_partial_classifiers_have_the_dropout_of_the_encoder_s_dense_layers(checkpoint):
    path = checkpoint("bert", None, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    ranker = init_ranker(path, max_length=60, exit_layers=[1, 2])
    dropouts = [m.p for m in ranker.network.heads.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts == [0.3] * 6


def test_fewer_exits_drop_nothing_until_they_are_told_to(bert):
    bert.drop_ratios = 0.5
    bert.prune_exits([bert.exit_layers[0], bert.exit_layers[-1]])
    assert bert.drop_ratios == [0.0]


def test_logits_of_a_cascade_are_the_log_odds_of_its_score(bert, pairs):
    sequences = bert.tokenizer.encode(*pairs)
    not_answer, answer = bert.predict_logits(bert.pack(sequences), len(sequences)).T
    scores = bert.predict_sequence_exits(sequences)[:, -1]
    np.testing.assert_allclose(answer - not_answer, np.log(scores / (1 - scores)), atol=1e-4)
    np.testing.assert_allclose(np.exp(answer) + np.exp(not_answer), 1.0, atol=1e-5)
