from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.losses.base import StepContext
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.packed_ranker import as_packed_ranker
from as2ray.models.two_in_one import TwoInOneRanker, merge_windows
from as2ray.outputs import PassageOutput
from as2ray.text.packing import TokenSequences
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.text.tokenization import PairTokenizer

QUESTIONS = ["What is kovarin?", "What is quintol?", "What is kovarin?"]
PASSAGES = [
    ["Badesso lala.", "Kovarin ne kovarin."],
    ["Muri."],
    ["Lala badesso kovarin.", "Ne.", "Kovarin quintol ne."],
]


@pytest.fixture
def tokenizer(published, family) -> PairTokenizer:
    return PairTokenizer(published(family).backend_tokenizer.to_str(), 60, 24)


@tiny.copied
def joint_ranker(path, **how) -> TwoInOneRanker:
    made = init_ranker(path, max_length=60, is_joint=True, **how)
    made.dtype = "fp32"
    return made.eval()


@pytest.fixture
def model(checkpoint, family) -> TwoInOneRanker:
    return joint_ranker(checkpoint(family, None, initializer_range=0.3))


def test_scores_come_from_the_first_token_and_from_the_markers(model, tokenizer):
    windows = encode_passages(tokenizer, QUESTIONS, PASSAGES)
    batch = windows.pack(np.arange(3))
    with torch.no_grad():
        joint = model(batch)
        assert joint.passage_scores.shape == (3,)
        assert joint.sentence_scores.shape == (6,)
        for number in range(3):  # one passage alone, through transformers itself
            alone = windows.pack(np.array([number]))
            ids = torch.from_numpy(alone.token_ids)[None].long()
            types = torch.from_numpy(alone.token_types)[None].long()
            body = model.network.body
            body.set_attn_implementation("eager")
            states = body(ids, token_type_ids=types).last_hidden_state[0]
            body.set_attn_implementation("as2ray_packed")
            place = batch.sequence_data["row"].tolist().index(number)
            torch.testing.assert_close(joint.passage_states[place], states[0], atol=1e-5, rtol=1e-5)
            own = torch.from_numpy(batch.marker_data["window"] == place)
            torch.testing.assert_close(
                joint.sentence_states[own], states[alone.markers], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("kind", ["model", "answering"])
def test_joint_loss_gives_every_weight_a_gradient(kind, tokenizer, request):
    model = request.getfixturevalue(kind)
    windows = encode_passages(tokenizer, QUESTIONS, PASSAGES)
    labeled = replace(
        windows,
        window_data={"passage_label": np.array([1.0, 0.0, 1.0])},
        sentence_data={"label": np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])},
    )
    batch = labeled.pack(np.arange(3))
    arrays = {**batch.sequence_data, **batch.marker_data}
    targets = {name: torch.from_numpy(values) for name, values in arrays.items()}
    model.train()
    loss = TwoInOneLoss(consistency_loss=True, similarity_loss=True)
    loss.compute(model(batch), targets, StepContext()).backward()
    unmoved = [n for n, w in model.named_parameters() if w.grad is None]
    assert unmoved == []


def test_windows_become_passages_and_sentences():
    # The first passage has two windows, which share its second sentence.
    ids = np.arange(3)
    sequences = TokenSequences(ids, ids, np.ones(3, np.int32))
    windows = PassageWindows(
        sequences, np.array([0, 0, 1]), np.array([0, 0, 1, 2]), ids, np.array([0, 1, 1, 2])
    )
    of_mark = np.array([0.5, 0.1, -0.4, 0.9], np.float32)
    passage, sentence = merge_windows(windows, np.array([0.1, -0.4, 0.9], np.float32), of_mark)
    assert passage.tolist() == pytest.approx([0.1, 0.9])
    assert sentence.tolist() == pytest.approx([0.5, -0.15, 0.9])


def test_passages_are_ranked_with_their_sentences_above_the_threshold(model):
    passages, question = [*PASSAGES, []], "What is kovarin?"
    scores, of_each = model.predict_passages([question] * 3, PASSAGES)
    threshold = float(np.median(of_each))
    ranked = model.rank_passages(question, passages, threshold=threshold)
    assert [p.index for p in ranked] == [*np.argsort(-scores, kind="stable").tolist(), 3]
    assert ranked[-1].sentences == ()
    starts = np.cumsum([0, *map(len, PASSAGES)])
    for passage in ranked[:-1]:
        own = of_each[starts[passage.index] : starts[passage.index + 1]]
        assert {s.index for s in passage.sentences} == set(np.flatnonzero(own > threshold))
        assert [s.score for s in passage.sentences] == sorted(own[own > threshold], reverse=True)
        assert all(s.text == PASSAGES[passage.index][s.index] for s in passage.sentences)
    assert model.rank_passages(question, passages, top_k=2, threshold=threshold) == ranked[:2]


def test_fallback_selects_the_best_sentence_where_none_is_above(model):
    ranked = model.rank_passages("What is it?", PASSAGES, threshold=99.0)
    assert all(p.sentences == () for p in ranked)
    ranked = model.rank_passages("What is it?", PASSAGES, threshold=99.0, always_select_one=True)
    assert all(len(p.sentences) == 1 for p in ranked)


def test_long_passage_is_scored_by_all_its_windows(model):
    passage = [f"{word} lala badesso muri {word}." for word in ("kovarin", "ne", "quintol")] * 4
    narrow = model.rank_passages("What is kovarin?", [passage], threshold=-99.0)[0]
    assert {s.index for s in narrow.sentences} == set(range(12))
    windows = encode_passages(model.tokenizer, ["What is kovarin?"], [passage])
    assert len(windows.sequences) > 1


def test_joint_model_ranks_single_sentences_too(model):
    texts = ["Muri.", "Kovarin ne.", "Lala."]
    ranked = model.rank("What is kovarin?", texts)
    _, scores = model.predict_passages(["What is kovarin?"] * 3, [[text] for text in texts])
    assert [r.index for r in ranked] == np.argsort(-scores).tolist()
    assert all(0 < r.score < 1 for r in ranked)
    with pytest.raises(EvaluationError, match="non-text"):
        model.rank_passages("What?", [["Lala.", ""]])
    assert model.rank_passages("What?", []) == []


def test_saved_joint_model_loads_and_ranks_the_same(model, tmp_path):
    loaded = load(save(model, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    found, expected = (r.rank_passages("What is kovarin?", PASSAGES) for r in (loaded, model))
    assert [p.index for p in found] == [p.index for p in expected]
    np.testing.assert_allclose([p.score for p in found], [p.score for p in expected], atol=1e-6)


@pytest.fixture
def answering(checkpoint, family) -> TwoInOneRanker:
    path = checkpoint(family, None, initializer_range=0.3)
    return joint_ranker(path, extract_answers=True)


def test_answer_is_cut_out_of_a_selected_sentence(answering, tmp_path):
    asked = "What is kovarin?"
    answer = answering.extract_answer(asked, PASSAGES, top_k=2, threshold=-99.0)
    top = {p.index for p in answering.rank_passages(asked, PASSAGES, top_k=2)}
    assert answer.passage_index in top
    assert answer.text in PASSAGES[answer.passage_index][answer.sentence_index]
    assert answering.extract_answer(asked, PASSAGES, threshold=99.0) is None
    loaded = load(save(answering, tmp_path / "saved"), dtype="fp32", device="cpu")
    loaded.use_fused_layers = False
    assert loaded.extract_answer(asked, PASSAGES, top_k=2, threshold=-99.0).text == answer.text


def test_model_without_answers_says_so(model):
    with pytest.raises(CheckpointError, match="not trained to extract answers"):
        model.extract_answers(QUESTIONS, PASSAGES)


def test_answer_loss_is_the_cross_entropy_of_first_and_last_token_in_each_passage():
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    window = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    state = torch.zeros(2, 4)
    joint = PassageOutput(torch.zeros(2), torch.zeros(3), state, state[[0, 0, 1]], logits, window)
    targets = {
        "passage_label": torch.tensor([0.0, 1.0]),
        "label": torch.tensor([0.0, 0.0, 1.0]),
        "window": torch.tensor([0, 0, 1]),
        "answer_first": torch.tensor([-1, -1, 4]),
        "answer_last": torch.tensor([-1, -1, 5]),
    }
    losses = (TwoInOneLoss(answer_loss=False), TwoInOneLoss(answer_loss=True))
    plain, answers = (loss.compute(joint, targets, StepContext()) for loss in losses)
    expected = [
        torch.nn.functional.cross_entropy(logits[3:, end], torch.tensor(place))
        for end, place in ((0, 1), (1, 2))
    ]
    assert float(answers - plain) == pytest.approx(float(sum(expected)) / 2, abs=1e-5)


def test_fused_layers_score_passages_as_plain_ones_do(model, answering):
    for ranker in (model, answering):
        plain = ranker.predict_passages(QUESTIONS, PASSAGES)
        ranker.use_fused_layers = True
        for found, expected in zip(ranker.predict_passages(QUESTIONS, PASSAGES), plain):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_joint_model_is_no_ranker_of_token_sequences(model):
    with pytest.raises(CheckpointError, match="TwoInOneRanker scores text only"):
        as_packed_ranker(model)


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_passages_or_all_but_the_last_are_not_returned(model, top_k):
    with pytest.raises(ConfigError, match=f"top_k={top_k}"):
        model.rank_passages("What is kovarin?", PASSAGES, top_k=top_k)


def test_one_text_in_place_of_a_passage_s_sentences_is_refused(model):
    for passages in (["ab", "c"], "ab"):
        with pytest.raises(EvaluationError, match="one text"):
            model.rank_passages("What?", passages)


@pytest.fixture
def bert_answering(checkpoint) -> TwoInOneRanker:
    return joint_ranker(checkpoint("bert", None, initializer_range=0.3), extract_answers=True)


def test_answer_comes_from_a_sentence_above_the_threshold_and_from_no_other(bert_answering):
    asked, passage = "What is kovarin?", [text for passage in PASSAGES for text in passage]
    _, scores = bert_answering.predict_passages([asked], [passage])
    answers = bert_answering.extract_answers([asked], [passage])
    assert max(answers, key=lambda answer: answer.score).sentence_index != scores.argmax()
    for threshold in scores.tolist():
        above = [answer for answer in answers if scores[answer.sentence_index] > threshold]
        found = bert_answering.extract_answer(asked, [passage], threshold=threshold)
        expected = max((answer.score for answer in above), default=None)
        assert (found and found.score) == pytest.approx(expected, abs=1e-5)
        assert (found is None) == (threshold == scores.max())


def test_sentence_of_two_windows_has_the_better_of_its_two_spans(bert_answering):
    words = ("kovarin", "ne", "quintol", "muri")
    passage = [f"{word} lala badesso muri {word} lala." for word in words * 3]
    windows = encode_passages(bert_answering.tokenizer, ["What is kovarin?"], [passage])
    shared = [s for s in range(12) if (windows.marker_sentence == s).sum() == 2]
    assert shared
    numbers, found = range(len(windows.sequences)), []
    for batches in ([numbers], [numbers[::-1]], *([[n]] for n in numbers)):
        spans = {}
        packed = [windows.pack(np.array([n])) for n in batches[0]]
        bert_answering.predict_windows(windows, packed, spans)
        found.append(spans)
    for sentence in shared:
        alone = [spans[sentence][0] for spans in found[2:] if sentence in spans]
        assert len(set(alone)) == 2
        for spans in found[:2]:
            assert spans[sentence][0] == pytest.approx(max(alone), abs=1e-5)
