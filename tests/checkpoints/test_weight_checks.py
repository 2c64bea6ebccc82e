"""Which weights may be missing or unknown, as transformers reports them."""

from contextlib import suppress

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging

from as2ray.checkpoints.checkpoint_errors import checkpoint_errors
from as2ray.checkpoints.loading import _align_weights
from as2ray.checkpoints.weight_checks import check_loaded_weights, silence_transformers
from as2ray.errors import CheckpointError, ConfigError

ENCODER, HEAD, POOLER = "bert.encoder.layer.0.w", "classifier.weight", "bert.pooler.dense.weight"


@pytest.fixture(scope="module")
def network():
    sizes = {"hidden_size": 4, "intermediate_size": 4, "vocab_size": 9}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    return BertForSequenceClassification(config)


def report(missing=(), unexpected=(), mismatched=()):
    return {
        "missing_keys": set(missing),
        "unexpected_keys": set(unexpected),
        "mismatched_keys": set(mismatched),
    }


@pytest.mark.parametrize(
    "loading_info",
    [
        report(),
        report(missing=[HEAD, POOLER]),
        report(unexpected=["pooler.dense.weight", POOLER]),
        report(unexpected=["cls.predictions.bias", "lm_head.bias", "decoder.bias"]),
        report(unexpected=["bert.embeddings.position_ids", "embeddings.token_type_ids"]),
        report(mismatched=[(HEAD, (3, 4), (2, 4))]),
    ],
)
def test_weights_of_heads_poolers_and_buffers_do_not_matter_to_a_new_head(network, loading_info):
    check_loaded_weights("here", loading_info, network, has_new_head=True)


def test_buffers_alone_do_not_matter_to_a_ranker(network):
    loading_info = report(unexpected=["bert.embeddings.position_ids"])
    check_loaded_weights("here", loading_info, network, has_new_head=False)


@pytest.mark.parametrize(
    ("loading_info", "has_new_head", "problem"),
    [
        (report(missing=[HEAD]), False, rf"1 weights missing \['{HEAD}'\], 0 unknown \[\], 0 of"),
        (report(missing=[POOLER]), False, rf"1 weights missing \['{POOLER}'\]"),
        (report(missing=[ENCODER, HEAD]), True, rf"1 weights missing \['{ENCODER}'\]"),
        (report(unexpected=[ENCODER]), True, rf"0 weights missing \[\], 1 unknown \['{ENCODER}'\]"),
        (report(unexpected=[POOLER]), False, "1 unknown"),
        (report(unexpected=["lm_head.bias"]), False, "1 unknown"),
        (
            report(mismatched=[(HEAD, (3, 4), (2, 4))]),
            False,
            rf"1 of another shape \['{HEAD}: \[3, 4\] instead of \[2, 4\]'\]",
        ),
        (report(mismatched=[(ENCODER, (3,), (2,))]), True, "1 of another shape"),
        (report(missing=[f"bert.{n}" for n in range(6)]), True, r"6 .*'bert.0', .*'bert.3'\]"),
    ],
)
def test_other_weights_are_counted_and_the_first_four_named(
    network, loading_info, has_new_head, problem
):
    with pytest.raises(CheckpointError, match=problem) as refused:
        check_loaded_weights("here", loading_info, network, has_new_head)
    assert "here does not have exactly the weights of BertForSequenceClassi" in str(refused.value)


@pytest.mark.parametrize("had_progress_bar", [False, True])
def test_transformers_is_silent_inside_and_as_before_afterwards(had_progress_bar):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        (logging.enable_progress_bar if had_progress_bar else logging.disable_progress_bar)()
        inside = []
        with suppress(OSError), silence_transformers():
            inside = [logging.get_verbosity(), logging.is_progress_bar_enabled()]
            raise OSError
        assert inside == [logging.ERROR, False]
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (
            20,
            had_progress_bar,
        )
    finally:
        logging.set_verbosity(before[0])
        (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()


def test_errors_of_libraries_become_one_and_our_own_stay():
    with pytest.raises(ConfigError, match="ours"), checkpoint_errors("here"):
        raise ConfigError("ours")
    with pytest.raises(CheckpointError) as refused, checkpoint_errors("here"):
        raise ValueError("a \n  b" + "c" * 400)
    assert refused.value.problem == "here is no checkpoint: ValueError: a b" + "c" * 297
    assert isinstance(refused.value.__cause__, ValueError)


def test_weights_at_any_address_are_copied_to_one_that_torch_aligns():
    network = torch.nn.Linear(8, 8)
    buffer = torch.randn(65)
    network.weight.data = buffer[1:].view(8, 8)
    aligned = network.bias.data_ptr()
    _align_weights(network)
    assert network.weight.data_ptr() % 64 == 0
    assert torch.equal(network.weight.data, buffer[1:].view(8, 8))
    assert network.bias.data_ptr() == aligned  # what is aligned stays
