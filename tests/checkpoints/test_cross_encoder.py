"""An exported ranker scores in sentence-transformers as it does here."""

import json
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file

from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.main import main
from as2ray.errors import CheckpointError
from as2ray.training.frozen_cascade import CascadeConfig, make_cascade

QUESTION = "What is kovarin?"
TEXTS = ["Badesso.", "Kovarin ne kovarin.", "Lala muri.", "Muri.", "Quintol ba.", "Zelimut."]


@pytest.fixture(scope="module")
def cross_encoder():
    """Their class; its module takes seconds to load."""
    reason = "the extra `benchmarks` is not installed"
    return pytest.importorskip("sentence_transformers", reason=reason).CrossEncoder


@pytest.mark.parametrize("labels", [1, 2])
def test_exported_ranker_has_the_same_scores_and_order(
    cross_encoder, checkpoint, family, labels, tmp_path
):
    path = checkpoint(family, labels, initializer_range=0.3)
    ranker = load(path, dtype="fp32", device="cpu")
    expected = ranker.rank(QUESTION, TEXTS)
    main(["export", "--model", str(path), "--output", str(tmp_path / "out")])
    found = cross_encoder(str(tmp_path / "out"), device="cpu").rank(QUESTION, TEXTS)
    assert [one["corpus_id"] for one in found] == [one.index for one in expected]
    assert [one["score"] for one in found] == pytest.approx(
        [one.score for one in expected], abs=1e-5
    )
    again = load(tmp_path / "out", dtype="fp32", device="cpu").rank(QUESTION, TEXTS)
    assert [one.score for one in again] == pytest.approx([one.score for one in expected], abs=1e-5)


def test_export_leaves_the_ranker_as_it_was(checkpoint, tmp_path):
    ranker = load(checkpoint("bert"), dtype="fp32", device="cpu")
    before = ranker.rank(QUESTION, TEXTS)
    export_cross_encoder(ranker, tmp_path / "out")
    assert ranker.network.config.num_labels == 2
    assert ranker.rank(QUESTION, TEXTS) == before


def test_export_keeps_the_number_format_of_the_weights(checkpoint, tmp_path):
    ranker = load(checkpoint("bert"), dtype="fp32", device="cpu")
    ranker.network.to(torch.bfloat16)
    export_cross_encoder(ranker, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["classifier.weight"].shape[0] == 1
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "answer"}
    assert config["label2id"] == {"answer": 0}


def test_export_says_what_stays_behind(checkpoint, tmp_path, capsys):
    ranker = load(checkpoint("bert"))
    main(["export", "--model", str(checkpoint("bert")), "--output", str(tmp_path / "plain")])
    assert capsys.readouterr().err == ""
    ranker.calibrate(tiny.candidates(20))
    calibrated = str(save(ranker, tmp_path / "calibrated"))
    main(["export", "--model", calibrated, "--output", str(tmp_path / "uncalibrated")])
    assert "without the calibration and its threshold" in capsys.readouterr().err
    decoder = str(checkpoint("qwen3", 1, max_position_embeddings=600))
    main(["export", "--model", decoder, "--output", str(tmp_path / "decoder")])
    assert "give it whole prompts" in capsys.readouterr().err


def test_export_of_a_cascade_says_what_cross_encoders_do_not_know(checkpoint, tmp_path):
    cascade = save(
        init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3]),
        tmp_path / "cascade",
    )
    with pytest.raises(CheckpointError, match=r"CascadeRanker(.|\n)*as2ray\.load"):
        export_cross_encoder(load(cascade), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize(
    "said",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
)
def test_exported_ranker_that_was_a_cross_encoder_of_logits_has_our_scores(
    cross_encoder, checkpoint, labels, said, tmp_path
):
    path = shutil.copytree(checkpoint("bert", labels, initializer_range=0.3), tmp_path / "theirs")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **said}))
    ranker = load(path, dtype="fp32", device="cpu")
    export_cross_encoder(ranker, tmp_path / "out")
    found = cross_encoder(str(tmp_path / "out"), device="cpu").rank(QUESTION, TEXTS)
    expected = [one.score for one in ranker.rank(QUESTION, TEXTS)]
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)
    assert all(getattr(ranker.network.config, name) == value for name, value in said.items())


def test_exported_ranker_cuts_pairs_to_the_same_length(cross_encoder, checkpoint, family, tmp_path):
    path = checkpoint(family, 2, initializer_range=0.3)
    ranker = load(path, dtype="fp32", device="cpu", max_length=24)
    before = ranker.hf_tokenizer.model_max_length
    long = ["Kovarin ne kovarin lala muri badesso. " * 4, "Lala muri. " * 12]
    found = cross_encoder(str(export_cross_encoder(ranker, tmp_path / "out")), device="cpu")
    assert found.max_length == 24
    expected = {one.index: one.score for one in ranker.rank(QUESTION, long)}
    scores = {one["corpus_id"]: one["score"] for one in found.rank(QUESTION, long)}
    assert scores == pytest.approx(expected, abs=1e-5)
    assert ranker.hf_tokenizer.model_max_length == before


def test_export_over_what_is_there_is_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    for output in (tmp_path, tmp_path / "mine.txt", tmp_path / "mine.txt" / "inside"):
        with pytest.raises(SystemExit):
            main(["export", "--model", "nowhere", "--output", str(output)])
        assert "new folder" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def write_ettin(folder, published, pooling="cls"):
    """Writes a ModernBERT with the head of Ettin's rerankers: modules and no activation."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    encoder = tiny.write_checkpoint(
        folder / "encoder", "modernbert", published("modernbert"), None, initializer_range=0.3
    )
    torch.manual_seed(0)
    identity = torch.nn.Identity()
    modules = [
        Transformer(str(encoder)),
        Pooling(32, pooling),
        Dense(32, 32, bias=False, activation_function=torch.nn.GELU()),
        LayerNorm(32),
        Dense(32, 1, activation_function=identity, module_output_name="scores"),
    ]
    with torch.no_grad():
        for weights in modules[3].parameters():
            weights.normal_()
    theirs = CrossEncoder(modules=modules, activation_fn=identity, device="cpu")
    theirs.save_pretrained(str(folder / "ettin"))
    return theirs, folder / "ettin"


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_head_of_modules_scores_as_in_sentence_transformers_and_so_does_what_is_saved(
    cross_encoder, published, tmp_path, pooling
):
    theirs, path = write_ettin(tmp_path, published, pooling)
    expected = theirs.predict([(QUESTION, text) for text in TEXTS])
    ranker = load(path, dtype="fp32", device="cpu")
    ranked = {one.index: one for one in ranker.rank(QUESTION, TEXTS)}
    assert all(one.is_logit for one in ranked.values())
    scores = [ranked[i].score for i in range(len(TEXTS))]
    assert scores == pytest.approx(expected, abs=2e-5)
    assert max(abs(expected)) > 1  # no probabilities
    saved = save(ranker, tmp_path / "saved")
    found = cross_encoder(str(saved), device="cpu").predict([(QUESTION, text) for text in TEXTS])
    assert found == pytest.approx(expected, abs=2e-5)
    again = load(saved, dtype="fp32", device="cpu").rank(QUESTION, TEXTS)
    assert [one.score for one in again] == pytest.approx(sorted(expected)[::-1], abs=2e-5)


def test_head_of_modules_becomes_the_last_exit_of_a_cascade_with_its_scores(
    cross_encoder, published, tmp_path
):
    _, path = write_ettin(tmp_path, published)
    ranker = load(path, dtype="fp32", device="cpu")
    config = CascadeConfig(exit_layers=(1, 3), drop_ratios=(0.5,), epochs=1)
    folder = tmp_path / "cascade"
    make_cascade(ranker, tiny.candidates(20), folder, config=config)
    cascade = load(folder, dtype="fp32", device="cpu")
    whole = {one.index: one.score for one in ranker.rank(QUESTION, TEXTS)}
    for one in cascade.rank(QUESTION, TEXTS, drop_ratios=0.0):
        assert one.is_logit
        assert one.score == pytest.approx(whole[one.index], abs=1e-4)
    assert {one.exit_layer for one in cascade.rank(QUESTION, TEXTS)} == {1, 3}


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("2_Dense/model.safetensors", None, "modules.json names 2_Dense/model.safetensors"),
        ("3_LayerNorm/config.json", None, "modules.json names 3_LayerNorm/config.json"),
        ("2_Dense/config.json", {"out_features": 16}, "out_features"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Softplus"}, "Softplus"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode='max'"),
        ("config.json", {"norm_eps": 1e-3}, "norm_eps=0.001"),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "my.Own"},
            "activation_fn='my.Own'",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "default_prompt_name"),
    ],
)
def test_head_of_modules_that_would_run_otherwise_is_refused_by_name(
    cross_encoder, published, tmp_path, file, changes, message
):
    _, path = write_ettin(tmp_path, published)
    if changes is None:
        (path / file).unlink()
    else:
        values = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**values, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_head_of_other_modules_is_refused_by_their_names(cross_encoder, published, tmp_path):
    _, path = write_ettin(tmp_path, published)
    entries = json.loads((path / "modules.json").read_text())
    (path / "modules.json").write_text(json.dumps(entries[:2] + entries[4:]))
    with pytest.raises(
        CheckpointError, match=r"modules\.json lists Transformer, Pooling, Dense on"
    ):
        load(path)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_score_of_a_cross_encoder_is_what_its_activation_says(
    cross_encoder, checkpoint, family, tmp_path
):
    for name in ("Identity", "Sigmoid"):
        path = tmp_path / name
        theirs = cross_encoder(
            str(checkpoint(family, 1, initializer_range=0.3)),
            activation_fn=getattr(torch.nn, name)(),
            device="cpu",
        )
        theirs.save_pretrained(str(path))
        expected = theirs.rank(QUESTION, TEXTS)
        ranked = load(path, dtype="fp32", device="cpu").rank(QUESTION, TEXTS)
        assert [one.index for one in ranked] == [one["corpus_id"] for one in expected]
        assert [one.score for one in ranked] == pytest.approx(
            [one["score"] for one in expected], abs=1e-5
        )
        assert ranked[0].is_logit == (name == "Identity")


@pytest.mark.parametrize("is_old", [True, False])
def test_activation_of_the_configuration_that_is_not_supported_is_refused(
    checkpoint, is_old, tmp_path
):
    path = shutil.copytree(checkpoint("bert", 1), tmp_path / "theirs")
    name = "torch.nn.modules.activation.Softplus"
    old = {"sbert_ce_default_activation_function": name}
    said = old if is_old else {"sentence_transformers": {"activation_fn": name}}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **said}))
    with pytest.raises(CheckpointError, match=r"activation_fn='torch.*Softplus' is none of"):
        load(path, device="cpu")


def test_score_of_a_calibrated_ranker_is_a_probability(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("bert", 1, initializer_range=0.3), tmp_path / "theirs")
    config = json.loads((path / "config.json").read_text())
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    (path / "config.json").write_text(json.dumps({**config, **identity}))
    ranker = load(path, dtype="fp32", device="cpu")
    ranker.calibrate(tiny.candidates(20))
    ranked = load(save(ranker, tmp_path / "saved"), device="cpu").rank(QUESTION, TEXTS)
    assert all(0 <= one.score <= 1 and not one.is_logit for one in ranked)
