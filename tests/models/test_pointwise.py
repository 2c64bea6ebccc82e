import timeit
from functools import partial
from random import Random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tiny
import torch
import transformers

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.losses.base import StepContext
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.precision import resolve_dtype
from as2ray.models.ranker import Ranker, positive_probability
from as2ray.text.packing import pack_sequences
from as2ray.text.tokenization import PairTokenizer

QUESTION = "What is kovarin?"


@pytest.fixture
def ranker(checkpoint) -> Ranker:
    return load(checkpoint("bert"), dtype="fp32", max_length=60)


@pytest.fixture
def candidates(pairs) -> list[str]:
    return pairs[1]


@tiny.copied
def theirs(path) -> torch.nn.Module:
    return transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()


def of(checkpoint, published, family, labels) -> tuple[PointwiseRanker, torch.nn.Module]:
    """A ranker, and the same network left to transformers."""
    networks = [theirs(checkpoint(family, labels)) for _ in range(2)]
    definition = published(family).backend_tokenizer.to_str()
    return PointwiseRanker(networks[0], PairTokenizer(definition, 60, 24)).eval(), networks[1]


@pytest.mark.parametrize("labels", [1, 2])
def test_forward_equals_the_padded_logits_of_transformers(
    checkpoint, published, family, labels, packed, padded
):
    ranker, reference = of(checkpoint, published, family, labels)
    with torch.no_grad():
        expected = reference(**padded).logits
        torch.testing.assert_close(ranker(packed), expected, atol=2e-5, rtol=1e-5)
    assert expected.std(0).min() > 1e-3  # or anything would agree


@pytest.mark.parametrize("labels", [1, 2])
def test_rank_scores_are_the_probabilities_of_the_positive_class(
    checkpoint, published, family, labels, packed, padded, pairs
):
    ranker, reference = of(checkpoint, published, family, labels)
    ranker.dtype = "fp32"
    ranked = ranker.rank_many(zip(pairs[0], ([text] for text in pairs[1])))
    with torch.no_grad():
        logits = reference(**padded).logits
    expected = logits.softmax(-1)[:, 1] if labels == 2 else logits.sigmoid()[:, 0]
    scores = np.array([r[0].score for r in ranked])[packed.sequence_data["row"]]
    np.testing.assert_allclose(scores, expected, atol=2e-5)


def test_classifier_of_three_labels_is_refused(published):
    network = tiny.network_of("bert", len(published("bert")), 3)
    definition = published("bert").backend_tokenizer.to_str()
    with pytest.raises(CheckpointError, match="3 labels"):
        PointwiseRanker(network, PairTokenizer(definition))


def test_rank_gives_every_candidate_once_best_first(ranker, candidates):
    ranked = ranker.rank(QUESTION, candidates)
    assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)
    assert sorted(r.index for r in ranked) == list(range(len(candidates)))
    assert all(r.text == candidates[r.index] for r in ranked)
    assert all(0 < r.score < 1 and r.exit_layer is None for r in ranked)


def test_rank_equal_candidates_keep_their_order(ranker):
    ranked = ranker.rank(QUESTION, ["Lala ne.", "Badesso.", "Lala ne.", "Lala ne."])
    assert [r.index for r in ranked if r.text == "Lala ne."] == [0, 2, 3]


def test_rank_top_k_is_the_head_of_the_ranking(ranker, candidates):
    assert ranker.rank(QUESTION, candidates, top_k=3) == ranker.rank(QUESTION, candidates)[:3]
    assert len(ranker.rank(QUESTION, candidates, top_k=99)) == len(candidates)


@pytest.mark.parametrize("top_k", [0, -1, True])
def test_rank_top_k_out_of_range_is_refused(ranker, candidates, top_k):
    with pytest.raises(ConfigError, match=f"top_k={top_k}"):
        ranker.rank(QUESTION, candidates, top_k=top_k)


def test_rank_no_candidates_gives_an_empty_ranking(ranker):
    assert ranker.rank(QUESTION, []) == []
    assert ranker.rank_many([]) == []


@pytest.mark.parametrize("bad", ["", "  \n", None, 3])
def test_rank_text_that_is_none_is_refused_and_shown(ranker, bad):
    with pytest.raises(EvaluationError, match="empty or non-text") as error:
        ranker.rank(QUESTION, ["Badesso.", bad])
    assert repr(bad) in str(error.value)
    with pytest.raises(EvaluationError):
        ranker.rank(bad, ["Badesso."])


def test_rank_one_text_is_no_list_of_candidates(ranker):
    with pytest.raises(EvaluationError, match="not one text: 'Badesso"):
        ranker.rank(QUESTION, "Badesso.")


@pytest.mark.parametrize(
    "candidates",
    [
        *({"Badesso.": 1}, pd.DataFrame({"text": ["Badesso."]}), {"Badesso."}),
        *(None, 7, np.array("Badesso."), b"a"),
    ],
)
@pytest.mark.parametrize("budget_ms", [None, 1_000])
def test_rank_what_is_no_list_of_texts_is_refused(ranker, candidates, budget_ms):
    kind = (
        "one text" if isinstance(candidates, bytes) else f"of the type {type(candidates).__name__}"
    )
    with pytest.raises(EvaluationError, match=f"must be a list of sentences, not {kind}"):
        ranker.rank(QUESTION, candidates, budget_ms=budget_ms)


def test_rank_any_list_of_texts_is_taken(ranker):
    candidates = ["Badesso.", "Kovarin ne kovarin.", "Lala muri."]
    expected = ranker.rank(QUESTION, candidates)
    keys = dict.fromkeys(candidates).keys()
    columns = [
        pd.Series(candidates, [7, 8, 9]),
        pa.array(candidates),
        pa.chunked_array([candidates]),
    ]
    for texts in (iter(candidates), keys, np.array(candidates), *columns):
        ranked = ranker.rank(QUESTION, texts)
        assert ranked == expected
        assert {type(r.text) for r in ranked} == {str}


@pytest.mark.parametrize(
    "wrong", [(QUESTION,), (QUESTION, ["a"], 1), {"question": QUESTION, "candidates": ["a"]}, None]
)
def test_rank_many_items_that_are_no_pairs_are_refused(ranker, wrong):
    with pytest.raises(ConfigError, match=r"question and its candidates, not (\(|{|None)"):
        ranker.rank_many([wrong])


def test_rank_many_of_nothing_to_iterate_over_is_refused(ranker):
    with pytest.raises(ConfigError, match="a question and its candidates, not NoneType"):
        ranker.rank_many(None)


def test_rank_text_that_no_encoding_can_write_is_refused(ranker):
    with pytest.raises(EvaluationError, match="udce9"):
        ranker.rank(QUESTION, ["caf\udce9"])


def test_rank_many_equals_rank_question_by_question(ranker, candidates):
    asked = [(QUESTION, candidates[:5]), ("What is quintol?", []), ("muri?", candidates[5:])]
    together = ranker.rank_many(asked)
    for ranked, (question, texts) in zip(together, asked, strict=True):
        alone = ranker.rank(question, texts)
        assert [r.index for r in ranked] == [r.index for r in alone]
        np.testing.assert_allclose([r.score for r in ranked], [r.score for r in alone], atol=1e-6)


@pytest.mark.parametrize("alone", [{QUESTION: ["Badesso."]}, {"ab": []}, [QUESTION], "ab"])
def test_rank_many_questions_without_candidates_beside_them_are_refused(ranker, alone):
    with pytest.raises(ConfigError, match=r"a question alone: '.*\n.*items\(\)"):
        ranker.rank_many(alone)


def test_score_does_not_depend_on_what_shares_the_batch(ranker, candidates):
    whole = {r.index: r.score for r in ranker.rank(QUESTION, candidates)}
    ranker.max_batch_tokens = 60
    pieces = {r.index: r.score for r in ranker.rank(QUESTION, candidates)}
    alone = [ranker.rank(QUESTION, [text])[0].score for text in candidates]
    for index, score in enumerate(alone):
        assert whole[index] == pytest.approx(score, abs=1e-6)
        assert pieces[index] == pytest.approx(score, abs=1e-6)


def test_score_leaves_training_mode_and_gradients_as_they_were(ranker, candidates):
    ranker.train()
    first = ranker.rank(QUESTION, candidates)
    assert ranker.training
    assert ranker.rank(QUESTION, candidates) == first  # dropout was off
    ranker.eval()
    ranker.rank(QUESTION, candidates)
    assert not ranker.training
    assert all(p.requires_grad and p.grad is None for p in ranker.parameters())


def test_score_row_that_no_batch_holds_is_nan(ranker, pairs):
    batches = list(pack_sequences(ranker.tokenizer.encode(*pairs), 60))
    scores = ranker.predict_scores(batches[1:], num_rows=18)
    assert set(np.flatnonzero(np.isnan(scores))) == set(batches[0].sequence_data["row"])


def test_score_in_bf16_is_close_to_fp32(checkpoint, family, candidates):
    exact = load(checkpoint(family, 1), dtype="fp32").rank(QUESTION, candidates)
    rough = load(checkpoint(family, 1), dtype="bf16").rank(QUESTION, candidates)
    scores = {r.index: r.score for r in rough}
    assert max(abs(scores[r.index] - r.score) for r in exact) < 0.05
    assert any(scores[r.index] != r.score for r in exact)


def test_bf16_rounds_no_two_candidates_to_one_score(checkpoint, family):
    random = Random(2)
    texts = list({tiny.sentence(random, random.randint(4, 20)) for _ in range(400)})
    ranker = load(checkpoint(family, 2), dtype="bf16")
    torch.manual_seed(0)
    with torch.no_grad():  # of new weights all states are alike
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    scores = ranker.predict_pairs(
        [QUESTION] * len(texts), texts, np.zeros(len(texts), int)
    ).sort_keys
    assert len(np.unique(scores)) > 0.98 * len(texts)


def test_rank_scores_that_are_not_finite_are_refused(ranker, candidates):
    with torch.no_grad():
        ranker.network.classifier.bias.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="18 of 18 scores are not finite"):
        ranker.rank(QUESTION, candidates)


def test_dtype_unknown_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="'int4'"):
        load(checkpoint("bert"), dtype="int4")


def test_dtype_auto_on_a_cpu_is_the_faster_of_bf16_and_fp32():
    times_s = {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(512, 512, dtype=dtype)
        timer = timeit.Timer(partial(torch.mm, matrix, matrix))
        times_s[dtype] = min(timer.repeat(repeat=20, number=1))
    faster, slower = sorted(times_s, key=times_s.__getitem__)
    resolved = resolve_dtype("auto")
    assert resolved in times_s
    if times_s[slower] > 1.25 * times_s[faster]:
        assert resolved == faster
    assert resolve_dtype("fp16") is torch.float16


def test_probability_of_one_and_two_logits_agree():
    logits = torch.tensor([[0.3, 1.5], [2.0, -1.0]])
    difference = logits[:, 1:] - logits[:, :1]
    torch.testing.assert_close(positive_probability(logits), positive_probability(difference))


def test_attention_drops_weights_while_it_trains_and_only_then(checkpoint, family, packed):
    no_other = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    ranker = load(checkpoint(family, 2, initializer_range=0.3, **no_other), dtype="fp32")
    ranker.use_fused_layers = False
    with torch.no_grad():
        trained = [ranker.train()(packed) for _ in range(2)]
        ranked = [ranker.eval()(packed) for _ in range(2)]
    assert not torch.allclose(*trained, atol=1e-3)
    torch.testing.assert_close(*ranked)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_family_teaches_and_is_taught(checkpoint, family, side, packed, pairs):
    teacher = load(checkpoint(family if side == "teacher" else "bert", 1), dtype="fp32")
    student = init_ranker(checkpoint("bert" if side == "teacher" else family, None), max_length=60)
    sequences = teacher.tokenizer.encode(*pairs)
    logits = teacher.predict_logits(teacher.pack(sequences), len(sequences))
    assert np.isfinite(logits).all()
    sequences, rows = student.tokenizer.encode(*pairs), np.arange(18)
    batch = sequences.pack(rows, {"row": rows})
    teacher_logits = torch.from_numpy(logits[batch.sequence_data["row"]])
    targets = {"label": torch.zeros(18, dtype=torch.long), "teacher_logits": teacher_logits}
    loss, losses = DistillationLoss(alpha=0.0), []
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    for step in range(6):
        losses.append(loss.compute(student.eval()(batch), targets, StepContext(step)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
