import dataclasses
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from as2ray.checkpoints import activation_ranges
from as2ray.checkpoints.activation_ranges import FILE_NAME
from as2ray.checkpoints.initialization import build_sequential, init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import add_activation_ranges, save
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.models import precision
from as2ray.models.encoder import int8
from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.quantization import MIN_PAIRS, fit_activation_ranges
from as2ray.tables.schema import question_indices
from as2ray.training.frozen_cascade import CascadeConfig, make_cascade

TABLE = tiny.with_distinct_questions(tiny.candidates(MIN_PAIRS // 5, each=5))

needs_int8 = pytest.mark.skipif(
    not precision.has_int8(), reason="needs a CPU with AVX2, AVX512 or AMX"
)


@pytest.fixture
def ranker(checkpoint):
    """Returns a ranker with activation ranges, whose scores differ: `ranker(family)`."""

    def make(family="bert", **options):
        config = {"initializer_range": 0.3}
        if family in tiny.DECODERS:  # whose prompts are long
            config, options = config | {"max_position_embeddings": 512}, {"max_length": 400}
        start = init_ranker(checkpoint(family, None, **config), **{"max_length": 60} | options)
        start.use_fused_layers = True
        fit_activation_ranges(start.eval(), TABLE)
        return start

    return make


def scores(ranker, dtype):
    ranker.dtype = dtype
    return ranker.predict_exits(TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist())


def assert_scores_are_close(ranker, max_share=0.15):
    """Checks that int8 changes the scores, but by little of their differences.

    Where products are added in 16 bits, weights are coarser by half.
    """
    max_share *= 1.5 if int8._adds_in_16_bits() else 1
    exact, rough = scores(ranker, "fp32"), scores(ranker, "int8")
    assert np.abs(rough - exact).max() > 0
    assert np.std(rough - exact) < max_share * np.std(exact)


def ranges_of(*inputs):
    return torch.stack([torch.cat(inputs).amin(0), torch.cat(inputs).amax(0)])


@needs_int8
def test_int8_product_is_within_a_step_of_each_factor_of_the_fp32_product():
    torch.manual_seed(0)
    x, weights, bias = torch.randn(64, 128), torch.randn(96, 128), torch.randn(96)
    residual = torch.randn(64, 96)
    product = int8.Int8Linear(weights, bias, ranges_of(x))
    expected = functional.linear(x, weights, bias)
    step = (x.max() - x.min()) / 255
    bound = (step / 2 * weights.abs().sum(1)).max() + (product.weight_scales / 2).max() * 255 * 128
    assert 0 < (product(x) - expected).abs().max() < bound
    assert (product(x) - expected).std() < 0.02 * expected.std()
    torch.testing.assert_close(product(x, residual=residual), product(x) + residual)


@needs_int8
def test_states_between_the_products_of_a_feed_forward_layer_are_bytes():
    torch.manual_seed(0)
    x, weights, bias = torch.randn(64, 128), torch.randn(96, 128) / 10, torch.randn(96)
    for activation, approximation in (("gelu", "none"), ("gelu_tanh", "tanh")):
        expected = functional.gelu(functional.linear(x, weights, bias), approximate=approximation)
        product = int8.Int8Linear(weights, bias, ranges_of(x), output_ranges=ranges_of(expected))
        inner = product(x, activation=activation)
        scale, zero_point = product.output
        assert inner.dtype == torch.uint8
        assert ((inner.float() - zero_point) * scale - expected).abs().max() < 0.1


@needs_int8
def test_smoothed_inputs_with_a_large_channel_lose_less():
    torch.manual_seed(0)
    x, weights = torch.randn(64, 128), torch.randn(96, 128)
    x[:, 3] *= 100
    expected = functional.linear(x, weights)
    plain, smoothed = (
        int8.Int8Linear(weights, torch.zeros(96), ranges_of(x), is_smoothed=is_smoothed)
        for is_smoothed in (False, True)
    )
    errors = [(product(x) - expected).std() for product in (plain, smoothed)]
    assert errors[1] < 0.5 * errors[0]


@needs_int8
def test_smoothed_inputs_far_from_zero_lose_as_little_as_those_around_zero():
    torch.manual_seed(0)
    x, weights = torch.randn(64, 128), torch.randn(96, 128)
    errors = []
    for shifts in (torch.zeros(128), 40 * torch.randn(128)):
        product = int8.Int8Linear(weights, torch.zeros(96), ranges_of(x + shifts), is_smoothed=True)
        errors.append((product(x + shifts) - functional.linear(x + shifts, weights)).std())
    assert errors[1] < 1.1 * errors[0]


@needs_int8
def test_values_of_attention_that_differ_in_size_lose_little(ranker):
    fitted = ranker()
    with torch.no_grad():
        for layer in fitted.encoder.layers:
            value, output = layer.attention.self.value, layer.attention.output.dense
            value.bias[5] += 300.0
            output.bias -= 300.0 * output.weight[:, 5]
            value.weight[7] *= 100.0
            output.weight[:, 7] /= 100.0
    fit_activation_ranges(fitted, TABLE)
    assert_scores_are_close(fitted, 0.1)


@needs_int8
def test_int8_scores_of_a_real_encoder_are_close_to_fp32():
    real = init_ranker(packaged_minilm(), max_length=60)
    real.use_fused_layers = True
    fit_activation_ranges(real.eval(), TABLE)
    assert_scores_are_close(real, 0.1)


SUMS = """
import torch
from as2ray.models.encoder.int8 import Int8Linear, _adds_in_16_bits
generator = torch.Generator().manual_seed(0)
for rows, inputs in ((1, 32), (1, 99), (64, 30), (64, 128), (200, 384), (2, 257), (64, 386)):
    x = torch.randint(2, (rows, inputs), generator=generator).float()
    x[0] = 1.0
    weights = torch.randint(-9, 10, (96, inputs), generator=generator).sign()
    weights[0], weights[1], weights[2:50, ::2] = 1, -1, 0
    weights[50, ::4], weights[50, 3::4] = 0, 0  # of neighbors one, unless they begin at odd inputs
    weights[50, 1::4], weights[50, 2::4] = 1, 1
    ranges = torch.tensor([[0.0], [1.0]]).expand(2, inputs)
    product = Int8Linear(weights.float(), torch.zeros(96), ranges)
    rounded = (weights / product.weight_scales[:, None]).round() * product.weight_scales[:, None]
    torch.testing.assert_close(product(x), x @ rounded.T, rtol=1e-4, atol=1e-3)
print(_adds_in_16_bits())
"""


@needs_int8
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "DEFAULT"])
def test_largest_inputs_and_weights_are_multiplied_without_an_error(isa):
    """With this variable oneDNN computes as on a CPU without VNNI."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    output = subprocess.check_output([sys.executable, "-c", SUMS], env=environment, text=True)
    assert isa == "DEFAULT" or output == "True\n"


def test_int8_weights_have_7_bits_where_products_are_added_in_16(monkeypatch):
    weights = torch.tensor([[0.0, 0.0], [2.0, -4.0]])
    for adds, largest in ((True, 64), (False, 127)):
        monkeypatch.setattr(int8, "_adds_in_16_bits", lambda adds=adds: adds)
        scales = int8.weight_scales(weights)
        assert scales[1] == 4 / largest
        assert scales[0] > 0


def quantize_all(fitted):
    """Computes those parts in int8, too, that were left in bf16."""
    fitted.activation_ranges = tuple(
        dataclasses.replace(ranges, unquantized_parts=frozenset())
        for ranges in fitted.activation_ranges
    )


def unquantized(fitted):
    return {part for ranges in fitted.activation_ranges for part in ranges.unquantized_parts}


@needs_int8
def test_parts_that_lose_too_much_stay_in_bf16(ranker):
    fitted = ranker()
    before = unquantized(fitted)
    assert (1, "feed_forward") not in before
    layer = fitted.encoder.layers[1]
    with torch.no_grad():  # more inner channels than are computed in fp32
        layer.intermediate.dense.bias[: int8.MAX_OUTLIERS + 1] += 1_000.0
        layer.output.dense.weight[:, : int8.MAX_OUTLIERS + 1] /= 1_000.0
    fit_activation_ranges(fitted, TABLE)
    assert unquantized(fitted) - before == {(1, "feed_forward")}
    assert_scores_are_close(fitted, 0.1)


@needs_int8
@pytest.mark.parametrize("part", [*int8.LAYER_PARTS])
def test_unquantized_parts_are_within_the_rounding_of_bf16(ranker, part, tmp_path):
    fitted = ranker()
    errors = []
    for parts in ((), (part,), tuple(int8.LAYER_PARTS)):
        layers = range(len(fitted.encoder.layers))
        kept = frozenset((layer, name) for layer in layers for name in parts)
        fitted.activation_ranges = (
            dataclasses.replace(fitted.activation_ranges[0], unquantized_parts=kept),
        )
        errors.append(np.std(scores(fitted, "int8") - scores(fitted, "fp32")))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 2 * np.std(scores(fitted, "bf16") - scores(fitted, "fp32"))
    loaded = load(save(fitted, tmp_path / "saved"), device="cpu")
    assert unquantized(loaded) == kept
    np.testing.assert_array_equal(scores(loaded, "int8"), scores(fitted, "int8"))


@pytest.mark.parametrize("has_operator", [True, False])
def test_quantized_values_are_rounded_and_clipped(monkeypatch, has_operator):
    if not has_operator:
        monkeypatch.setattr(int8, "_one_pass_operator", lambda: None)
    x = torch.tensor([[-9.0, -1.0, -0.2, 0.0], [0.2, 0.3, 1.0, 99.0]])
    codes = int8.quantize(x.T, 0.5, 10)  # not contiguous
    assert codes.tolist() == [[0, 10], [8, 11], [10, 12], [10, 208]]
    assert int8.quantize(x, 0.1, 10).max() == 255


def test_outliers_are_the_channels_far_above_all_others():
    ranges = torch.zeros(2, 50)
    ranges[1] = torch.linspace(1.0, 1.2, 50)
    assert len(int8.find_outliers(ranges)) == 0
    ranges[1, 7], ranges[0, 30] = 9.0, -4.0
    assert int8.find_outliers(ranges).tolist() == [7, 30]
    assert len(int8.find_outliers(ranges[:, :5])) == 0


@needs_int8
@pytest.mark.parametrize("family", [*sorted({*tiny.FAMILIES} - {*tiny.DECODERS}), "qwen3"])
def test_int8_scores_are_close_to_fp32_with_every_family(ranker, family):
    fitted = ranker(family)
    assert np.ptp(scores(fitted, "fp32")) > 0.2
    quantize_all(fitted)
    # DeBERTa multiplies queries and keys by positions, too, and Qwen3 normalizes them.
    assert_scores_are_close(fitted, 0.25 if family in ("deberta-v2", "qwen3") else 0.15)


def test_ranges_of_deberta_are_fitted_without_a_warning_of_torch(ranker):
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Converting a tensor with requires_grad")
            ranker("deberta-v2")
    finally:
        torch.set_warn_always(False)


@needs_int8
@pytest.mark.parametrize("act", ["gelu_new", "relu"])
def test_int8_layers_have_the_encoder_s_activation(checkpoint, act):
    path = checkpoint("bert", None, initializer_range=0.3, hidden_act=act)
    start = init_ranker(path, max_length=60).eval()
    start.use_fused_layers = True
    fit_activation_ranges(start, TABLE)
    assert_scores_are_close(start)


@needs_int8
@pytest.mark.parametrize("family", ["modernbert", "nomic_bert"])
def test_large_channels_behind_a_gate_lose_nothing(ranker, family):
    fitted, errors = ranker(family), []
    for factor in (1.0, 300.0):
        with torch.no_grad():
            for layer in fitted.encoder.layers:
                mlp = layer.mlp
                up = mlp.Wi.weight.chunk(2)[1] if hasattr(mlp, "Wi") else mlp.up_proj.weight
                down = mlp.Wo.weight if hasattr(mlp, "Wo") else mlp.down_proj.weight
                up[3:15] *= factor
                down[:, 3:15] /= factor
        fit_activation_ranges(fitted, TABLE)
        quantize_all(fitted)
        errors.append(np.std(scores(fitted, "int8") - scores(fitted, "fp32")))
    assert errors[1] < 1.1 * errors[0]


@needs_int8
def test_large_inner_channel_is_computed_in_fp32(ranker, monkeypatch):
    fitted = ranker()
    with torch.no_grad():
        for layer in fitted.encoder.layers:
            layer.intermediate.dense.bias[5] += 300.0
            layer.output.dense.weight[:, 5] /= 100.0
    fit_activation_ranges(fitted, TABLE)
    exact, rough = scores(fitted, "fp32"), scores(fitted, "int8")
    monkeypatch.setattr(int8, "MAX_OUTLIERS", 0)
    fitted.encoder._fused = None
    without = scores(fitted, "int8")
    assert np.abs(rough - exact).max() < 0.2 * np.abs(without - exact).max()


@needs_int8
@pytest.mark.parametrize("family", ["bert", "modernbert", "nomic_bert"])
def test_int8_score_of_a_pair_does_not_depend_on_the_others(ranker, family):
    fitted = ranker(family)
    together = scores(fitted, "int8")[:, 0]
    texts = TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist()
    alone = [fitted.predict_exits([q], [c])[0, 0] for q, c in list(zip(*texts))[:12]]
    np.testing.assert_allclose(alone, together[:12], atol=2e-6)


@needs_int8
@pytest.mark.parametrize("options", [{"exit_layers": [1, 2, 3]}, {}])
def test_saved_ranges_make_auto_int8_with_equal_scores(ranker, tmp_path, options):
    fitted = ranker(**options)
    loaded = load(save(fitted, tmp_path / "saved"), device="cpu")
    assert loaded.dtype_name == "int8"
    np.testing.assert_array_equal(scores(loaded, "auto"), scores(fitted, "int8"))
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in weights.values())


@pytest.mark.parametrize("options", [{"exit_layers": [1, 2, 3]}, {}])
def test_start_from_a_checkpoint_has_no_ranges_of_its_weights(ranker, tmp_path, options):
    folder = save(ranker(**options), tmp_path / "saved")
    assert load(folder, device="cpu").activation_ranges
    assert init_ranker(folder, max_length=60).activation_ranges == ()


@needs_int8
def test_cascade_in_int8_that_drops_nothing_ranks_as_its_ranker(ranker, tmp_path):
    config = CascadeConfig(exit_layers=(1, 2), drop_ratios=(0.0,), epochs=1, int8=True)
    monolith = ranker()
    monolith.activation_ranges, monolith.dtype = (), "auto"
    cascade = make_cascade(monolith, TABLE, tmp_path / "cascade", config=config)
    assert cascade.dtype_name == "int8"
    monolith.activation_ranges = cascade.activation_ranges
    np.testing.assert_array_equal(scores(cascade, "auto")[:, -1], scores(monolith, "int8")[:, 0])
    assert load(tmp_path / "cascade", device="cpu").dtype_name == "int8"


@needs_int8
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("albert", {"exit_layers": [1, 2, 3]}),
        ("bert", {"exit_layers": [1, 2], "num_ranking_heads": 2}),
    ],
)
def test_cascades_in_int8_drop_almost_the_same_candidates(ranker, family, options):
    fitted = ranker(family, **options)
    texts = TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist()
    ranked = {}
    for dtype in ("fp32", "int8"):
        fitted.dtype = dtype
        ranked[dtype] = fitted.predict_pairs(*texts, question_indices(TABLE), 0.4)
    stages = [ranked[dtype].stage_index for dtype in ("fp32", "int8")]
    assert set(stages[1]) == set(range(len(fitted.exit_layers)))
    assert np.mean(stages[0] == stages[1]) > 0.8
    difference = ranked["int8"].scores - ranked["fp32"].scores
    assert 0 < np.abs(difference[stages[0] == stages[1]]).max() < 0.1
    question, *_ = TABLE["question"].to_pylist()
    in_time = fitted.rank(question, texts[1][:5], budget_ms=60_000)
    assert {candidate.exit_layer for candidate in in_time} <= set(fitted.exit_layers)


@needs_int8
def test_heads_sequential_rankers_and_ensembles_rank_in_int8(ranker, checkpoint, tmp_path):
    heads = ranker(exit_layers=[1], num_ranking_heads=2)
    assert len(heads.activation_ranges) == 3
    pair = [init_ranker(checkpoint(), max_length=60, num_layers=n) for n in (1, 2)]
    sequential = build_sequential(pair).eval()
    ensemble = EnsembleRanker([ranker(), ranker()]).eval()
    for fitted in (heads, sequential, ensemble):
        fitted.use_fused_layers = True
        fit_activation_ranges(fitted, TABLE)
        assert_scores_are_close(fitted)
    folder = save(ensemble, tmp_path / "ensemble")
    assert load(folder, device="cpu").dtype_name == "int8"


def test_checkpoint_without_ranges_has_another_dtype_than_int8(checkpoint, monkeypatch):
    monkeypatch.setattr(precision, "has_int8", lambda *_: True)
    assert load(checkpoint(), device="cpu").dtype_name in ("bf16", "fp32")
    with pytest.raises(ConfigError, match=r"(?s)int8 needs the ranges.*as2ray quantize"):
        load(checkpoint(), dtype="int8", device="cpu")


def test_cpu_without_int8_refuses_it_and_auto_takes_another_dtype(ranker, tmp_path, monkeypatch):
    folder = save(ranker(), tmp_path / "saved")
    monkeypatch.setattr(precision, "has_int8", lambda *_: False)
    assert load(folder, device="cpu").dtype_name in ("bf16", "fp32")
    with pytest.raises(ConfigError, match=r"int8 needs a CPU with AVX2, AVX512 or AMX"):
        load(folder, dtype="int8", device="cpu")


def test_ranges_of_other_weights_are_refused(ranker, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "has_int8", lambda *_: True)
    folder, other = save(ranker(), tmp_path / "saved"), ranker()
    with torch.no_grad():
        other.encoder.layers[-1].output.dense.weight[0, 0] += 1.0
    save(other, tmp_path / "other")
    (tmp_path / "other" / FILE_NAME).replace(folder / FILE_NAME)
    load(folder, device="cpu", dtype="fp32")
    other.activation_ranges = ()
    fit_activation_ranges(other, TABLE)
    add_activation_ranges(other, folder)
    with pytest.raises(CheckpointError, match=r"do not fit its weights: the weights are others"):
        load(folder, device="cpu")
    add_activation_ranges(ranker(num_layers=1), folder)
    with pytest.raises(CheckpointError, match=r"they are of 1 layers, but the encoder has \d"):
        load(folder, device="cpu")


def test_ranges_of_another_version_are_refused(ranker, tmp_path, monkeypatch):
    folder = save(ranker(), tmp_path / "saved")
    tensors = load_file(folder / FILE_NAME)
    with safe_open(folder / FILE_NAME, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, folder / FILE_NAME, {**metadata, "version": "9"})
    with pytest.raises(CheckpointError, match=r"has version 9, but as2ray reads 2"):
        load(folder, device="cpu")
    save_file(tensors, folder / FILE_NAME, {"version": "1", "checksums": metadata["checksums"]})
    assert load(folder, device="cpu").activation_ranges[0].unquantized_parts == frozenset()
    name = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != name}, folder / FILE_NAME, metadata)
    with pytest.raises(CheckpointError):
        load(folder, device="cpu")


@needs_int8
def test_parts_that_no_layer_has_are_refused(ranker, tmp_path):
    fitted = ranker()
    (ranges,) = fitted.activation_ranges
    for part in ((99, "attention"), (0, "pooler")):
        other = dataclasses.replace(ranges, unquantized_parts=frozenset([part]))
        fitted.activation_ranges = (other,)
        folder = save(fitted, tmp_path / part[1])
        with pytest.raises(CheckpointError, match="parts of layers that there are not"):
            load(folder, device="cpu")


def test_ranges_are_added_without_another_change(ranker, checkpoint, tmp_path):
    fitted = ranker()
    ranges, fitted.activation_ranges = fitted.activation_ranges, ()
    folder = save(fitted, tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    fitted.activation_ranges = ranges
    add_activation_ranges(fitted, folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop(FILE_NAME)
    assert before == after
    assert json.loads(before["config.json"])["as2ray"]["format_version"] == 2
    assert activation_ranges.load_activation_ranges(str(folder))[0].checksum == ranges[0].checksum


def test_ranges_are_added_to_each_member_of_an_ensemble(ranker, tmp_path):
    members = [ranker(), ranker()]
    ranges = [member.activation_ranges for member in members]
    for member in members:
        member.activation_ranges = ()
    ensemble = EnsembleRanker(members).eval()
    folder = save(ensemble, tmp_path / "saved")
    assert not list(folder.rglob(FILE_NAME))
    for member, (fitted,) in zip(members, ranges):
        member.activation_ranges = (fitted,)
    add_activation_ranges(ensemble, folder)
    for loaded, (fitted,) in zip(load(folder, device="cpu").members, ranges):
        assert loaded.activation_ranges[0].checksum == fitted.checksum


def test_training_drops_ranges_that_its_weights_will_not_fit(ranker, tmp_path):
    folder = save(ranker(), tmp_path / "saved")
    assert init_ranker(folder, max_length=60).activation_ranges == ()


def test_few_pairs_or_infinite_states_give_no_ranges(ranker):
    fitted = ranker()
    with pytest.raises(EvaluationError, match=rf"99 pairs are too few .* {MIN_PAIRS} are needed"):
        fit_activation_ranges(fitted, TABLE.slice(0, MIN_PAIRS - 1))
    with torch.no_grad():
        fitted.encoder.layers[0].output.dense.bias[0] = torch.inf
    before = fitted.activation_ranges
    with pytest.raises(EvaluationError, match="not finite"):
        fit_activation_ranges(fitted, TABLE)
    assert fitted.activation_ranges is before
