import numpy as np
import pytest
import tiny
import torch
import transformers

from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder, truncate
from as2ray.models.encoder.families import FAMILIES
from as2ray.models.encoder.packed_attention import copy_to_device
from as2ray.text.packing import PackedBatch


def fresh(published, family, **changes):
    """Two equal plain encoders: one to pack, one to leave as transformers runs it."""
    changes = {"initializer_range": 0.2, **changes}
    made = (tiny.network_of(family, len(published(family)), None, **changes) for _ in range(2))
    return tuple(made)


def run(base, batch: PackedBatch) -> torch.Tensor:
    """Hidden states of the packed batch after all layers."""
    encoder = Encoder(base)
    return encoder.run_layers(*encoder.embed(batch))


def at_tokens(states: torch.Tensor, padded) -> torch.Tensor:
    """Padded states [sequences, tokens, hidden] without the padding, [tokens, hidden]."""
    return states[padded["attention_mask"].bool()]


def close(one, other):
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_run_packed_batch_equals_the_padded_forward(published, family, packed, padded):
    base, reference = fresh(published, family)
    with torch.no_grad():
        close(run(base, packed), at_tokens(reference(**padded).last_hidden_state, padded))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_run_truncated_encoder_equals_the_reference_hidden_states(
    published, family, packed, padded, layers
):
    base, reference = fresh(published, family)
    base = truncate(base, layers)
    assert len(Encoder(base)) == layers
    with torch.no_grad():
        states = reference(**padded, output_hidden_states=True).hidden_states[layers]
        if layers < 3 and FAMILIES[family].final_norm:  # the last states are behind the norm
            states = getattr(reference, FAMILIES[family].final_norm)(states)
        close(run(base, packed), at_tokens(states, padded))


def test_run_electra_of_equal_embedding_and_hidden_size_equals_the_padded_forward(published):
    base, reference = fresh(published, "electra", embedding_size=32)
    batch = _batch(published("electra"))
    ids = torch.from_numpy(batch.token_ids).long()[None]
    with torch.no_grad():
        close(run(base, batch), reference(input_ids=ids).last_hidden_state[0])


def test_run_albert_of_several_groups_equals_the_padded_forward(published):
    changes = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
    base, reference = fresh(published, "albert", **changes)
    batch = _batch(published("albert"))
    ids = torch.from_numpy(batch.token_ids).long()[None]
    with torch.no_grad():
        close(run(base, batch), reference(input_ids=ids).last_hidden_state[0])


def _batch(tokenizer) -> PackedBatch:
    """One sequence of one text."""
    encoded = tokenizer("badesso lala ne", return_tensors="np")["input_ids"][0].astype("int32")
    zeros = encoded * 0
    positions = zeros + range(len(encoded))
    return PackedBatch(encoded, zeros, positions.astype("int32"), zeros[:1] + len(encoded))


def test_run_in_two_parts_equals_one_run_exactly(published, family, packed):
    encoder = Encoder(fresh(published, family)[0])
    with torch.no_grad():
        hidden, layout = encoder.embed(packed)
        whole = encoder.run_layers(hidden, layout)
        for cut in range(4):
            part = encoder.run_layers(hidden, layout, 0, cut)
            assert torch.equal(encoder.run_layers(part, layout, cut), whole)
            assert (cut == 0) == torch.equal(part, hidden)


def test_gradients_of_a_packed_batch_equal_the_padded_ones(published, family, packed, padded):
    base, reference = fresh(published, family)
    weights = torch.randn(packed.num_tokens, 32, generator=torch.Generator().manual_seed(0))
    (run(base, packed) * weights).sum().backward()
    (at_tokens(reference(**padded).last_hidden_state, padded) * weights).sum().backward()
    _same_gradients(base, reference)


def _same_gradients(one, other):
    compared = 0
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        if a.grad is None and b.grad is None:
            assert "pooler" in name
            continue
        # A key's bias shifts all scores alike: its gradient is noise about 0.
        torch.testing.assert_close(a.grad, b.grad, atol=2e-4, rtol=1e-4, msg=name)
        compared += 1
    assert compared > 10


@pytest.mark.filterwarnings("error:.*use_reentrant")  # torch wants it to be said
def test_gradient_checkpointing_with_dropout_gives_the_same_gradients(published, family, packed):
    gradients = []
    for on in (False, True):
        base, _ = fresh(published, family)
        base.train()
        encoder = Encoder(base)
        encoder.gradient_checkpointing = on
        torch.manual_seed(3)
        encoder.run_layers(*encoder.embed(packed)).square().sum().backward()
        gradients.append([p.grad for p in base.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_encoder_of_an_unsupported_family_is_refused_by_name():
    config = transformers.RoFormerConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="model_type='roformer'"):
        Encoder(transformers.RoFormerModel(config))


@pytest.mark.parametrize("layers", [0, -1, 4])
def test_truncate_to_layers_that_are_not_there_is_refused(published, family, layers):
    with pytest.raises(CheckpointError, match=f"num_layers={layers} is not from 1 to 3"):
        truncate(fresh(published, family)[0], layers)


def test_truncate_albert_of_several_groups_is_refused(published):
    base, _ = fresh(published, "albert", num_hidden_groups=2, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match="2 layer groups"):
        truncate(base, 2)


def test_arrays_are_copied_to_devices_that_are_neither_cpu_nor_cuda():
    assert copy_to_device(np.arange(3), torch.device("meta")).device.type == "meta"
