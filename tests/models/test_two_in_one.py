import numpy as np
import pytest
import tiny
import torch

from as2ray.models.two_in_one import TwoInOneModel, TwoInOneNetwork, of_passages, of_sentences
from as2ray.objectives.base import Moment
from as2ray.objectives.two_in_one import TwoInOne
from as2ray.text.passages import encode_passages
from as2ray.text.tokens import PairTokenizer

QUESTIONS = ["What is kovarin?", "What is quintol?", "What is kovarin?"]
PASSAGES = [
    ["Badesso lala.", "Kovarin ne kovarin."],
    ["Muri."],
    ["Lala badesso kovarin.", "Ne.", "Kovarin quintol ne."],
]


@pytest.fixture
def tokenizer(published, family) -> PairTokenizer:
    return PairTokenizer(published(family).backend_tokenizer.to_str(), 60, 24)


@pytest.fixture
def model(published, family) -> TwoInOneModel:
    body = tiny.network_of(family, len(published(family)), None, initializer_range=0.3)
    torch.manual_seed(0)
    return TwoInOneModel(TwoInOneNetwork.around(body)).eval()


def test_scores_come_from_the_first_token_and_from_the_markers(model, tokenizer):
    windows = encode_passages(tokenizer, QUESTIONS, PASSAGES)
    batch = windows.pack(np.arange(3))
    with torch.no_grad():
        joint = model(batch)
        assert joint.passage.shape == (3,)
        assert joint.sentence.shape == (6,)
        for number in range(3):  # one passage alone, through transformers itself
            alone = windows.pack(np.array([number]))
            ids = torch.from_numpy(alone.token_ids)[None].long()
            types = torch.from_numpy(alone.token_types)[None].long()
            body = model.network.body
            body.set_attn_implementation("eager")
            states = body(ids, token_type_ids=types).last_hidden_state[0]
            body.set_attn_implementation("as2ray_packed")
            place = batch.of_sequence["row"].tolist().index(number)
            torch.testing.assert_close(joint.passage_state[place], states[0], atol=1e-5, rtol=1e-5)
            own = torch.from_numpy(batch.of_mark["window"] == place)
            torch.testing.assert_close(
                joint.sentence_state[own], states[alone.marks], atol=1e-5, rtol=1e-5
            )


def test_joint_loss_trains_every_weight(model, tokenizer):
    windows = encode_passages(tokenizer, QUESTIONS, PASSAGES)
    batch = windows.pack(
        np.arange(3),
        {"passage_label": np.array([1.0, 0.0, 1.0])},
        {"label": np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])},
    )
    arrays = {**batch.of_sequence, **batch.of_mark}
    targets = {name: torch.from_numpy(values) for name, values in arrays.items()}
    model.train()
    task = TwoInOne(consistency=True, similarity=True).at(Moment())
    task.loss(model(batch), targets).backward()
    unmoved = [n for n, w in model.named_parameters() if w.grad is None]
    assert unmoved == []


def test_windows_become_passages_and_sentences():
    scores = torch.tensor([0.1, 0.9, -0.4])
    assert of_passages(scores, torch.tensor([1, 0, 1]), 2).tolist() == pytest.approx([0.9, 0.1])
    found = of_sentences(scores, torch.tensor([0, 1, 0]), 2)
    assert found.tolist() == pytest.approx([-0.15, 0.9])
