import math

import pytest
import torch
from pydantic import ValidationError

from as2ray.losses.base import StepContext
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.outputs import PassageOutput

ONLY = {"passage_loss": False, "sentence_loss": False}


@pytest.fixture
def joint() -> PassageOutput:
    """Two passages of two and three sentences."""
    random = torch.Generator().manual_seed(0)
    return PassageOutput(
        torch.tensor([0.5, -0.2], requires_grad=True),
        torch.tensor([0.9, -0.4, 0.1, -0.8, 0.3], requires_grad=True),
        torch.randn(2, 4, generator=random),
        torch.randn(5, 4, generator=random).requires_grad_(),
    )


@pytest.fixture
def targets() -> dict[str, torch.Tensor]:
    return {
        "passage_label": torch.tensor([1.0, 0.0]),
        "label": torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]),
        "window": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]),
    }


def loss(joint, targets, **config) -> torch.Tensor:
    return TwoInOneLoss(**config).compute(joint, targets, StepContext())


def test_equation_1_equals_the_hand_computation(joint, targets):
    passages = 0.5**2 + 0.8**2
    sentences = 0.1**2 + 0.6**2 + 1.1**2 + 0.2**2 + 1.3**2
    assert loss(joint, targets).item() == pytest.approx(passages + sentences)
    assert loss(joint, targets, sentence_loss=False).item() == pytest.approx(passages)
    assert loss(joint, targets, passage_loss=False).item() == pytest.approx(sentences)
    mean = passages + (0.1**2 + 0.6**2) / 2 + (1.1**2 + 0.2**2 + 1.3**2) / 3
    assert loss(joint, targets, mean_over_sentences=True).item() == pytest.approx(mean)


def test_equation_2_equals_the_hand_computation(joint, targets):
    by_hand = (0.5 - 0.9) ** 2 + (-0.2 - 0.3) ** 2
    assert loss(joint, targets, consistency_loss=True, **ONLY).item() == pytest.approx(by_hand)


def test_equation_3_equals_the_hand_computation(joint, targets):
    targets["label"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    targets["passage_label"] = torch.tensor([1.0, 1.0])

    def d(passage, sentence):
        return math.dist(joint.passage_states[passage], joint.sentence_states[sentence].tolist())

    first = max(d(0, 0) - d(0, 1) + 1, 0)
    second = (max(d(1, 2) - d(1, 4) + 1, 0) + max(d(1, 3) - d(1, 4) + 1, 0)) / 2
    found = loss(joint, targets, similarity_loss=True, **ONLY)
    assert found.item() == pytest.approx(first + second, abs=1e-5)
    found.backward()
    assert joint.sentence_states.grad.isfinite().all()


def test_sentence_with_the_state_of_its_passage_has_a_gradient(joint, targets):
    with torch.no_grad():
        joint.sentence_states[0] = joint.passage_states[0]
    value = loss(joint, targets, similarity_loss=True, margin=5.0, **ONLY)
    distance = math.dist(joint.passage_states[0], joint.sentence_states[1].tolist())
    assert value.item() == pytest.approx(5.0 - distance, abs=1e-5)
    value.backward()
    assert joint.sentence_states.grad.isfinite().all()


def test_passage_of_one_kind_of_sentences_does_not_end_the_similarity_of_the_others(joint, targets):
    # The released code leaves its loop there, and the result depends on the batch's order.
    targets["passage_label"] = torch.tensor([1.0, 1.0])
    targets["label"] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    found = loss(joint, targets, similarity_loss=True, margin=5.0, **ONLY).item()
    turned = PassageOutput(
        joint.passage_scores,
        joint.sentence_scores,
        joint.passage_states.flip(0),
        joint.sentence_states,
    )
    targets["window"] = 1.0 - targets["window"]
    assert found > 0
    again = loss(turned, targets, similarity_loss=True, margin=5.0, **ONLY).item()
    assert again == pytest.approx(found)


def test_irrelevant_passages_have_no_similarity(joint, targets):
    targets["label"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    values = []
    for passage_label in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]):
        targets["passage_label"] = torch.tensor(passage_label)
        values.append(loss(joint, targets, similarity_loss=True, margin=9.0, **ONLY).item())
    both, first, second, none = values
    assert first != pytest.approx(second, abs=0.1)
    assert both == pytest.approx(first + second)
    assert none == 0.0
    state = joint.passage_states[0]
    distances = [math.dist(state, joint.sentence_states[i].tolist()) for i in (0, 1)]
    assert first == pytest.approx(distances[0] - distances[1] + 9.0, abs=1e-5)


def test_answers_have_the_cross_entropy_of_their_first_and_last_token(joint, targets):
    # Three tokens of the first passage, four of the second, where two sentences have the answer.
    logits = torch.tensor([[1.0, 0.5], [2.0, -1], [0, 3], [4, 1], [-2, 2], [0.5, 0], [1, 90]])
    joint = joint._replace(span_logits=logits, token_passage=torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    targets["answer_first"] = torch.tensor([0, -1, 3, 5, -1])
    targets["answer_last"] = torch.tensor([0, -1, 4, 6, -1])
    first, second = logits[:3].log_softmax(0), logits[3:].log_softmax(0)
    firsts = first[0, 0] + second[0, 0] + second[2, 0]
    lasts = first[0, 1] + second[1, 1] + second[3, 1]
    value = loss(joint, targets, answer_loss=True, **ONLY)
    assert value.item() == pytest.approx(-(firsts + lasts).item() / 2)


def test_terms_are_logged_by_name(joint, targets):
    token_passage = torch.tensor([0, 0, 1, 1, 1])
    joint = joint._replace(span_logits=torch.zeros(5, 2), token_passage=token_passage)
    targets["answer_first"] = targets["answer_last"] = torch.tensor([0, -1, -1, -1, -1])
    names = ("passage", "sentence", "consistency", "similarity", "answer")
    context = StepContext()
    config = {f"{name}_loss": True for name in names}
    total = TwoInOneLoss(**config).compute(joint, targets, context)
    for name in names:
        others = {f"{other}_loss": other == name for other in names}
        assert context.parts.pop(name).item() == pytest.approx(
            loss(joint, targets, **others).item()
        )
    assert not context.parts
    sums = [loss(joint, targets, **{f"{n}_loss": n == name for n in names}) for name in names]
    assert total.item() == pytest.approx(sum(sums).item())


def test_every_head_has_a_gradient(joint, targets):
    joint = joint._replace(span_logits=torch.zeros(5, 2, requires_grad=True))
    loss(joint, targets, consistency_loss=True, **ONLY).backward()
    assert joint.span_logits.grad.tolist() == [[0.0, 0.0]] * 5


def test_loss_is_the_sum_over_passages(joint, targets):
    config = {"consistency_loss": True, "similarity_loss": True}
    first = PassageOutput(
        joint.passage_scores[:1],
        joint.sentence_scores[:2],
        joint.passage_states[:1],
        joint.sentence_states[:2],
    )
    second = PassageOutput(
        joint.passage_scores[1:],
        joint.sentence_scores[2:],
        joint.passage_states[1:],
        joint.sentence_states[2:],
    )
    parts = [
        loss(
            part,
            {
                "passage_label": targets["passage_label"][i : i + 1],
                "label": targets["label"][2 * i : 2 + 3 * i],
                "window": torch.zeros(2 + i),
            },
            **config,
        )
        for i, part in enumerate((first, second))
    ]
    torch.testing.assert_close(loss(joint, targets, **config), parts[0] + parts[1])


def test_loss_without_any_term_is_refused():
    with pytest.raises(ValidationError, match="no term"):
        TwoInOneLoss(passage_loss=False, sentence_loss=False)
