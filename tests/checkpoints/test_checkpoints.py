import copy
import json
import os
import resource
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

import as2ray
from as2ray.checkpoints.initialization import (
    build_sequential,
    encoder_num_layers,
    init_ranker,
)
from as2ray.checkpoints.loading import load, load_weights
from as2ray.checkpoints.model_facts import read_model_facts
from as2ray.checkpoints.saving import add_activation_ranges, check_new_path, save
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.calibration import UNCHANGED
from as2ray.models.encoder.families import FAMILIES
from as2ray.models.quantization import fit_activation_ranges
from as2ray.training.config import TrainingConfig
from as2ray.training.optimization import create_optimizer

PAIR = ("What is kovarin?", "Kovarin lala ne badesso.")


@pytest.fixture
def copy_of(tmp_path):
    """A checkpoint to spoil."""

    def copy(folder):
        return shutil.copytree(folder, tmp_path / "copy")

    return copy


def test_rankers_of_tests_and_of_their_processes_are_on_the_cpu(checkpoint):
    """Also on a machine with a GPU, which `_on_cpu` hides."""
    assert load(checkpoint()).device.type == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def change_weights(folder, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(change(weights), path, metadata={"format": "pt"})


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def same_weights(one, other) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


def logits_of_transformers(folder) -> torch.Tensor:
    """Of one pair, by transformers alone."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return network.eval()(**tokenizer(*PAIR, return_tensors="pt")).logits


def probability(logits: torch.Tensor) -> float:
    return float(logits.softmax(-1)[0, 1] if logits.shape[1] == 2 else logits.sigmoid())


@pytest.mark.parametrize("labels", [1, 2])
def test_save_then_load_gives_the_same_weights_bit_by_bit(checkpoint, family, labels, tmp_path):
    ranker = load(checkpoint(family, labels), max_length=60)
    again = load(save(ranker, tmp_path / "saved"))
    assert same_weights(ranker, again)
    assert again.tokenizer.max_length == 60
    assert again.tokenizer.max_question_length == ranker.tokenizer.max_question_length
    assert again.rank(PAIR[0], [PAIR[1], "Muri."]) == ranker.rank(PAIR[0], [PAIR[1], "Muri."])


def test_linear_head_is_one_layer_on_the_first_token_with_its_own_rate(
    checkpoint, family, tmp_path
):
    """monoBERT of Mokrii et al., section 4: no pooler, one label, 2e-4 for the head alone."""
    if not FAMILIES[family].has_linear_head:
        with pytest.raises(ConfigError, match=f"'linear', but .*{family}"):
            init_ranker(checkpoint(family, None), head="linear", max_length=60)
        return
    ranker = init_ranker(checkpoint(family, None), head="linear", max_length=60)
    prefix = ranker.network.base_model_prefix + "."
    names = [n for n, _ in ranker.network.named_parameters() if not n.startswith(prefix)]
    assert names == ["classifier.weight", "classifier.bias"]
    assert not [n for n, _ in ranker.network.named_parameters() if "pooler" in n]
    assert ranker.network.classifier.weight.shape[0] == 1
    config = TrainingConfig(learning_rate=2e-5, head_learning_rate=2e-4)
    groups = create_optimizer(ranker, config, ranker.network.base_model_prefix).param_groups
    assert sum(p.numel() for g in groups if g["lr"] == 2e-4 for p in g["params"]) == sum(
        p.numel() for p in ranker.network.classifier.parameters()
    )
    again = load(save(ranker, tmp_path / "saved"), dtype="fp32")
    assert same_weights(ranker, again)
    network = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    inputs = again.hf_tokenizer(*PAIR, return_tensors="pt")
    with torch.no_grad():
        logit = network.eval()(**inputs).logits[0, 0]
    [ranked] = again.rank(PAIR[0], PAIR[1:])
    assert ranked.score == pytest.approx(float(logit.sigmoid()), abs=1e-5)
    with pytest.raises(CheckpointError, match="pointwise"):
        build_sequential([again])


def test_document_is_cut_at_its_own_length_whatever_the_question(checkpoint, tmp_path):
    """64 + 445 + 3 = 512 in Mokrii et al.; here 8 + 21 + 3 = 32."""
    folder = checkpoint("bert", None)
    lengths = {"max_question_length": 8, "max_candidate_length": 21}
    ranker = init_ranker(folder, max_length=32, tokenizer_settings=lengths)
    again = load(save(ranker, tmp_path / "saved"))
    document = " ".join(["kovarin"] * 60)
    num_short = len(again.tokenizer.tokenize_texts(["Muri?"], 8)[0])
    short, long = again.tokenizer.encode(["Muri?", document], [document] * 2).lengths
    assert (short, long) == (num_short + 21 + 3, 32)


@pytest.mark.parametrize("labels", [1, 2])
def test_saved_ranker_scores_the_same_in_plain_transformers(checkpoint, family, labels, tmp_path):
    ranker = load(checkpoint(family, labels), dtype="fp32")
    folder = save(ranker, tmp_path / "saved")
    [ranked] = ranker.rank(PAIR[0], PAIR[1:])
    assert ranked.score == pytest.approx(probability(logits_of_transformers(folder)), abs=1e-5)
    written = json.loads((folder / "config.json").read_text())
    assert not any("as2ray_packed" in str(value) for value in written.values())


def test_load_is_offered_by_the_package_and_ready_to_rank(checkpoint):
    ranker = as2ray.load(str(checkpoint("bert")), dtype="fp32", device="cpu")
    assert not ranker.training
    assert ranker.dtype == "fp32"
    assert ranker.tokenizer.max_length == 66  # all positions that the tiny network has


@pytest.mark.parametrize("device", ["gpu", "cuda:99", torch.device("cuda", 99)])
def test_load_on_a_device_that_is_not_there_is_refused(checkpoint, device):
    with pytest.raises(ConfigError, match=f"^device={device} cannot be used: "):
        load(checkpoint("bert"), device=device)


@pytest.mark.parametrize("family", ["bert"])
def test_save_with_given_weights_writes_those(checkpoint, family, tmp_path):
    ranker = load(checkpoint(family))
    doubled = {name: weights * 2 for name, weights in ranker.state_dict().items()}
    folder = save(ranker, tmp_path / "saved", doubled)
    found = load_weights(ranker, folder)
    assert found.keys() == doubled.keys()
    assert all(torch.equal(found[name], doubled[name]) for name in doubled)


def test_start_from_a_plain_encoder_takes_its_weights_and_makes_a_head(checkpoint, family):
    folder = checkpoint(family, None)
    ranker = init_ranker(folder, max_length=60)
    encoder = transformers.AutoModel.from_pretrained(folder).state_dict()
    held = ranker.network.base_model.state_dict()
    assert all(torch.equal(held[n], encoder[n]) for n in held if not n.startswith("pooler"))
    assert ranker.network.config.num_labels == 2
    assert len(ranker.rank(PAIR[0], PAIR[1:])) == 1


def test_start_same_seed_makes_the_same_head_and_another_another(checkpoint, family):
    made = [init_ranker(checkpoint(family, None), max_length=60, seed=s) for s in (0, 0, 1)]
    assert same_weights(made[0], made[1])
    assert not same_weights(made[0], made[2])


def test_load_a_plain_encoder_is_refused_with_the_way_to_train_it(checkpoint, family):
    with pytest.raises(CheckpointError, match=r"missing.*classifier") as error:
        load(checkpoint(family, None))
    assert "must be trained first" in str(error.value)


def test_start_from_a_ranker_keeps_its_head_and_labels(checkpoint, family):
    ranker = init_ranker(checkpoint(family, 1), max_length=60, seed=9)
    assert same_weights(ranker, load(checkpoint(family, 1)))


def test_start_with_fewer_layers_keeps_the_first_ones(checkpoint, published, family, tmp_path):
    ranker = init_ranker(checkpoint(family, 2), max_length=60, num_layers=2)
    assert len(ranker.encoder) == 2
    folder = save(ranker, tmp_path / "saved")
    assert len(load(folder).encoder) == 2
    [ranked] = load(folder, dtype="fp32").rank(PAIR[0], PAIR[1:])
    assert ranked.score == pytest.approx(probability(logits_of_transformers(folder)), abs=1e-5)


PRETRAINING = {
    "bert": ["BertForMaskedLM", "BertForPreTraining"],
    "roberta": ["RobertaForMaskedLM"],
    "electra": ["ElectraForPreTraining", "ElectraForMaskedLM"],
    "albert": ["AlbertForMaskedLM", "AlbertForPreTraining"],
}


@pytest.mark.parametrize(
    ("family", "kind"), [(f, kind) for f, kinds in PRETRAINING.items() for kind in kinds]
)
def test_start_from_a_pretraining_checkpoint_takes_the_encoder_and_no_head(
    published, family, kind, tmp_path
):
    network = getattr(transformers, kind)(tiny.config_of(family, len(published(family))))
    network.save_pretrained(tmp_path)
    published(family).save_pretrained(tmp_path)
    ranker = init_ranker(tmp_path, max_length=60)
    encoder, held = network.base_model.state_dict(), ranker.network.base_model.state_dict()
    assert all(torch.equal(held[n], encoder[n]) for n in held if not n.startswith("pooler"))
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_start_from_an_encoder_that_brings_an_unneeded_pooler_is_accepted(published, tmp_path):
    # FacebookAI/roberta-base is such a one.
    tokenizer = published("roberta")
    network = transformers.RobertaForMaskedLM(tiny.config_of("roberta", len(tokenizer)))
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda w: {**w, "roberta.pooler.dense.weight": torch.zeros(32, 32)})
    assert len(init_ranker(tmp_path, max_length=60).encoder) == 3


def test_load_old_names_of_layer_norms_gives_the_same_weights(checkpoint, copy_of):
    def old_names(weights):
        return {
            n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): w
            for n, w in weights.items()
        }

    folder = copy_of(checkpoint("bert"))
    change_weights(folder, old_names)
    assert same_weights(load(folder), load(checkpoint("bert")))


@pytest.mark.parametrize("read", [load, init_ranker])
def test_checkpoint_without_a_weight_is_refused_by_its_name(checkpoint, copy_of, family, read):
    folder = copy_of(checkpoint(family))
    name = next(n for n in load_file(folder / "model.safetensors") if "embeddings.weight" in n)
    change_weights(folder, lambda w: {n: v for n, v in w.items() if n != name})
    with pytest.raises(CheckpointError, match=f"1 weights missing.*{name}"):
        read(folder)


@pytest.mark.parametrize("read", [load, init_ranker])
def test_checkpoint_with_an_unknown_weight_is_refused_by_its_name(
    checkpoint, copy_of, family, read
):
    folder = copy_of(checkpoint(family))
    change_weights(folder, lambda w: {**w, "heads.4.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"1 unknown.*heads\.4\.weight"):
        read(folder)


@pytest.mark.parametrize("read", [load, init_ranker])
def test_checkpoint_with_a_misshapen_weight_is_refused_by_its_name(checkpoint, copy_of, read):
    folder = copy_of(checkpoint("bert"))
    change_weights(folder, lambda w: {**w, "classifier.weight": torch.zeros(2, 31)})
    with pytest.raises(CheckpointError, match=r"1 of another shape.*classifier\.weight"):
        read(folder)


def test_start_from_an_encoder_that_lacks_a_layer_is_refused_by_name(checkpoint, copy_of):
    folder = copy_of(checkpoint("electra", None))
    change_weights(folder, lambda w: {n: v for n, v in w.items() if "layer.2" not in n})
    with pytest.raises(CheckpointError, match=r"missing.*layer\.2"):
        init_ranker(folder)


def test_load_a_classifier_of_three_labels_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match="3 labels"):
        load(checkpoint("bert", 3))


def test_load_an_unsupported_family_is_refused_by_name(tmp_path):
    transformers.RoFormerConfig(vocab_size=30, hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="model_type='roformer'"):
        load(tmp_path)


def test_load_what_is_no_checkpoint_is_refused_with_the_path(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere/at-all"):
        load("nowhere/at-all")


def test_load_shorter_than_trained_shortens_the_question_too(checkpoint, tmp_path):
    folder = save(init_ranker(checkpoint("bert"), max_length=60), tmp_path / "saved")
    ranker = load(folder, max_length=20)
    assert ranker.tokenizer.max_length == 20
    assert ranker.tokenizer.max_question_length == 10
    assert len(ranker.rank("What is kovarin " * 20, ["lala " * 40])) == 1


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_longer_pairs_than_the_encoder_has_positions_for_are_refused(checkpoint, family):
    most = {"bert": 66, "roberta": 64}[family]
    assert init_ranker(checkpoint(family), max_length=most).tokenizer.max_length == most
    with pytest.raises(ConfigError, match=f"max_length={most + 1}"):
        init_ranker(checkpoint(family), max_length=most + 1)


def test_load_longest_pair_of_each_family_runs(checkpoint, family):
    ranker = load(checkpoint(family))
    assert len(ranker.rank("What is kovarin " * 20, ["lala " * 99])) == 1


def test_save_that_fails_leaves_the_older_checkpoint_and_nothing_half_written(
    checkpoint, tmp_path, monkeypatch
):
    older, newer = load(checkpoint("bert", 2)), load(checkpoint("bert", 1))
    folder = save(older, tmp_path / "held" / "ranker")

    def fail(*_, **__):
        raise OSError("no space left")

    def fail_once(source, target, rename=os.rename):
        if tmp_path / "failed" in tmp_path.iterdir() or "-new-" not in str(source):
            return rename(source, target)
        (tmp_path / "failed").touch()
        raise OSError("no space left")

    broken = [
        ("as2ray.checkpoints.saving._write_checkpoint", fail),
        ("as2ray.tables.atomic.os.rename", fail),
        ("as2ray.tables.atomic.os.rename", fail_once),
    ]
    for name, replacement in broken:
        with monkeypatch.context() as patch:
            patch.setattr(name, replacement)
            with pytest.raises(OSError, match="no space left"):
                save(newer, folder)
        assert same_weights(load(folder), older)
        assert [p.name for p in folder.parent.iterdir()] == ["ranker"]


def test_save_that_fails_while_weights_are_written_leaves_nothing(
    checkpoint, tmp_path, monkeypatch
):
    ranker = load(checkpoint("bert"))

    def write_half(_, folder, **__):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(type(ranker.network), "save_pretrained", write_half)
    with pytest.raises(OSError, match="no space left"):
        save(ranker, tmp_path / "held" / "ranker")
    assert list((tmp_path / "held").iterdir()) == []


def test_save_over_an_older_checkpoint_leaves_nothing_of_it(checkpoint, tmp_path):
    folder = save(load(checkpoint("bert", 2)), tmp_path / "ranker")
    (folder / "stray.txt").write_text("of the older one")
    newer = load(checkpoint("roberta", 1))
    save(newer, folder)
    assert same_weights(load(folder), newer)
    assert not (folder / "stray.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["ranker"]


def test_saved_folder_may_be_read_by_whom_a_plain_folder_may(checkpoint, tmp_path):
    (tmp_path / "plain").mkdir()
    folder = save(load(checkpoint("bert")), tmp_path / "ranker")
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_module_knows_every_supported_family():
    assert set(FAMILIES) == set(tiny.FAMILIES)


@pytest.mark.parametrize("content", ["{half", "[1]"])
def test_load_a_broken_configuration_is_refused_with_the_path(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranking_heads": 3}, "needs exit_layers"),
        ({"is_joint": True, "exit_layers": [1, 3]}, "a joint model has no exits"),
        (
            {"is_joint": True, "exit_layers": [2], "num_ranking_heads": 3},
            "a joint model has no exits",
        ),
        ({"is_joint": True, "num_ranking_heads": 3}, "needs exit_layers"),
        ({"extract_answers": True}, "needs a joint model"),
        ({"num_layers": 4}, "num_layers=4 is not from 1 to 3"),
    ],
)
def test_init_ranker_with_options_that_do_not_go_together_is_refused(checkpoint, options, message):
    with pytest.raises(ConfigError, match=message):
        init_ranker(checkpoint("bert", None), max_length=60, **options)


@pytest.mark.parametrize(
    ("start", "options"),
    [
        ({"exit_layers": [1, 3]}, {"is_joint": True}),
        ({"exit_layers": [1, 2]}, {"num_ranking_heads": 2}),
        (
            {"exit_layers": [2], "num_ranking_heads": 3},
            {"exit_layers": [2], "num_ranking_heads": 2},
        ),
        ({"is_joint": True}, {}),
        ({"is_joint": True}, {"is_joint": True, "extract_answers": True}),
        ({"is_joint": True}, {"is_joint": True, "num_layers": 2}),
        ({"is_joint": True}, {"is_joint": True, "exit_layers": [1]}),
    ],
)
def test_cascades_and_joint_models_cannot_change_their_shape(checkpoint, tmp_path, start, options):
    folder = save(init_ranker(checkpoint("bert", None), max_length=60, **start), tmp_path / "saved")
    with pytest.raises(ConfigError, match="keep their layers, exits and heads"):
        init_ranker(folder, max_length=60, **options)
    assert type(init_ranker(folder, max_length=60, **start)) is type(load(folder))


@pytest.mark.parametrize("version", [None, 1, 3])
def test_checkpoint_of_another_format_version_is_refused(checkpoint, version, tmp_path):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3])
    folder = save(ranker, tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    assert config["as2ray"].pop("format_version") == 2
    if version is not None:
        config["as2ray"]["format_version"] = version
    change_config(folder, as2ray=config["as2ray"])
    for read in (load, init_ranker, encoder_num_layers):
        with pytest.raises(CheckpointError, match=f"checkpoint format {version or 1}, but"):
            read(folder)


@pytest.mark.parametrize("read", [load, init_ranker])
def test_checkpoint_without_a_tokenizer_is_refused(checkpoint, copy_of, family, read):
    folder = copy_of(checkpoint(family))
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"a tokenizer of 0 words|the backend tokenizer"):
        read(folder)


def test_checkpoint_with_a_vocabulary_file_alone_ranks_as_before(checkpoint, published, copy_of):
    path = checkpoint("bert")
    folder = copy_of(path)
    for file in folder.glob("*token*"):
        file.unlink()
    words = published("bert").get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(words, key=words.get)), encoding="utf-8")
    assert load(folder).rank(PAIR[0], PAIR[1:]) == load(path).rank(PAIR[0], PAIR[1:])


@pytest.mark.parametrize("read", [load, init_ranker])
def test_checkpoint_with_a_tokenizer_of_more_ids_than_embeddings_is_refused(
    checkpoint, published, copy_of, read
):
    folder = copy_of(checkpoint("bert"))
    longer = copy.deepcopy(published("bert"))
    longer.add_tokens(["kovarinne"])
    longer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"ids up to \d+ does not fit \d+ embeddings"):
        read(folder)


def test_folder_in_which_one_ranker_lies_is_refused_with_the_ranker_named(checkpoint, tmp_path):
    ranker = load(checkpoint("bert"))
    named = save(ranker, tmp_path / "trained" / "ranker")
    with pytest.raises(CheckpointError, match="trained is no checkpoint: it has no") as error:
        load(tmp_path / "trained")
    assert error.value.fix == f"did you mean {named}?"
    (named / "modules.json").write_text("[]")  # as of the encoder in an index
    with pytest.raises(CheckpointError, match="trained is no checkpoint") as error:
        load(tmp_path / "trained")
    assert "did you mean" not in str(error.value.fix)
    (named / "modules.json").unlink()
    save(ranker, tmp_path / "trained" / "other")
    with pytest.raises(CheckpointError, match="trained is no checkpoint") as error:
        load(tmp_path / "trained")
    assert "did you mean" not in str(error.value.fix)


def test_place_that_may_not_be_written_to_is_told_before_work_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("as2ray.checkpoints.saving.is_writable", {tmp_path: False}.get)
    with pytest.raises(CheckpointError, match=f"{tmp_path} may not be written to"):
        check_new_path(tmp_path / "new" / "ranker")


@pytest.mark.parametrize("file", ["model", "activation_ranges"])
def test_disk_that_fills_is_told_and_leaves_no_checkpoint(checkpoint, tmp_path, file):
    ranker, write = load(checkpoint("bert")), save
    if file == "activation_ranges":
        fit_activation_ranges(ranker, tiny.candidates(20))
        write = add_activation_ranges
    (tmp_path / "full").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The largest file that may be written stands for the room that is left.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot be written: .*File too large"):
            write(ranker, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("what", ["a file", "a folder of something else", "a broken link"])
def test_save_over_what_is_no_checkpoint_leaves_it_as_it_is(checkpoint, tmp_path, what):
    place = tmp_path / "notes"
    if what == "a file":
        place.write_text("mine")
    elif what == "a broken link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is no checkpoint, so it is not replaced"):
        save(load(checkpoint("bert")), place)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    held = {"a file": place, "a folder of something else": place / "mine.txt"}
    assert what not in held or held[what].read_text() == "mine"


def test_save_into_an_empty_folder_fills_it(checkpoint, tmp_path):
    assert load(save(load(checkpoint("bert")), tmp_path)).exit_layers == ()


def test_hub_id_with_a_revision_loads_that_revision(checkpoint, tmp_path, monkeypatch):
    """Two revisions in a cache of the hub's layout, which is read without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--toy--encoder"
    for revision, seed in (("a" * 40, 0), ("b" * 40, 1)):
        ranker = init_ranker(checkpoint("bert", None), seed=seed, max_length=60)
        save(ranker, folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("b" * 40)
    main, first, second = (load(f"toy/encoder{at}") for at in ("", "@" + "a" * 40, "@" + "b" * 40))
    assert same_weights(main, second)
    assert not same_weights(first, second)
    assert encoder_num_layers("toy/encoder@" + "a" * 40) == first.network.config.num_hidden_layers
    with pytest.raises(CheckpointError, match="toy/encoder@c"):
        load("toy/encoder@" + "c" * 40)


@pytest.mark.parametrize(
    ("metadata", "license_name", "warns"),
    [
        ("license: mit", "mit", False),
        ("license: [mit, cc-by-nc-4.0]", "mit, cc-by-nc-4.0", True),
        ("license: other\nlicense_name: own-research", "own-research", True),
        ("license: 3", "3", False),
        ("license: [", None, False),
        ("2: 3", None, False),
        ("license:", None, False),
    ],
)
def test_license_of_a_model_card_is_told_however_it_is_written(
    checkpoint, tmp_path, metadata, license_name, warns
):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n")
    facts = read_model_facts(tmp_path, load(checkpoint("bert", 1), device="cpu"))
    assert facts.license == license_name
    assert (facts.warning is not None) is warns


def test_facts_of_a_ranker_tell_its_input_and_what_its_score_is(checkpoint, tmp_path):
    ranker = load(checkpoint("bert", 1), device="cpu")
    facts = read_model_facts(tmp_path, ranker)
    assert facts.prompt == "[CLS] {question} [SEP] {candidate} [SEP]"
    assert (facts.family, facts.head) == ("bert", "BertForSequenceClassification")
    assert (facts.pooling, facts.activation) == ("first token", "sigmoid")
    ranker.activation = "identity"
    assert read_model_facts(tmp_path, ranker).activation == "identity"
    ranker.calibration = (UNCHANGED,)
    assert read_model_facts(tmp_path, ranker).activation == "sigmoid"
    segments = ("Do {instruction}: ", "{question}", " and ", "{candidate}")
    ranker.tokenizer = replace(ranker.tokenizer, prompt=segments, instruction="this")
    assert read_model_facts(tmp_path, ranker).prompt == "Do this: {question} and {candidate}"
