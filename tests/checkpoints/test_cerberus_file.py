"""The layout of the published CERBERUS file, under names that such a file may give its parts."""

import re

import pytest
import torch

from as2ray.checkpoints.cerberus_file import load_cerberus_file
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.cli.main import main
from as2ray.errors import CheckpointError
from as2ray.text.packing import pack_sequences

NAMES = {
    "as modules of one network": {
        r"^body\.": "",
        r"^heads\.0\.networks\.(\d+)\.electra\.encoder\.layer\.": r"heads.\1.encoder.layer.",
        r"^heads\.0\.networks\.(\d+)\.classifier\.": r"heads.\1.classifier.",
    },
    "as lists of parts": {
        r"^body\.embeddings": "embeddings",
        r"^body\.encoder\.layer\.": "shared_encoder.layer.",
        r"^heads\.0\.networks\.(\d+)\.electra\.encoder\.layer\.": r"head_encoders.\1.layer.",
        r"^heads\.0\.networks\.(\d+)\.classifier\.": r"classifiers.\1.",
    },
}


@pytest.fixture
def base(checkpoint):
    return checkpoint("electra", None, num_hidden_layers=4)


@pytest.fixture
def theirs(base):
    """B3_2H1 with weights of its own."""
    ranker = init_ranker(base, max_length=60, exit_layers=[3], num_ranking_heads=2)
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    return ranker.eval()


def named(ranker, how: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, weights in ranker.network.state_dict().items():
        for pattern, new in NAMES[how].items():
            name = re.sub(pattern, new, name)
        found[name] = weights
    return found


@pytest.mark.parametrize("how", NAMES)
def test_every_weight_finds_its_place_whatever_the_parts_are_called(theirs, base, how, tmp_path):
    weights = {**named(theirs, how), "embeddings.position_ids": torch.arange(66)[None]}
    torch.save({"model": weights, "best_value": 0.9}, tmp_path / "cerberus_model.pt")
    found = load_cerberus_file(tmp_path / "cerberus_model.pt", base, max_length=60)
    sequences = found.tokenizer.encode(["Kovarin ne?"] * 3, ["Badesso.", "Muri.", "Quintol."])
    (batch,) = pack_sequences(sequences, 8_192)
    with torch.no_grad():
        torch.testing.assert_close(found(batch), theirs(batch))


def test_layers_are_in_the_order_of_their_numbers_wherever_they_stand(checkpoint, tmp_path):
    base = checkpoint("electra", None, num_hidden_layers=12)
    theirs = init_ranker(base, max_length=60, exit_layers=[11], num_ranking_heads=1).eval()
    weights = named(theirs, "as lists of parts")
    torch.save(dict(sorted(weights.items(), reverse=True)), tmp_path / "cerberus_model.pt")
    loaded = load_cerberus_file(tmp_path / "cerberus_model.pt", base, max_length=60)
    for layer, expected in zip(loaded.encoder.layers, theirs.encoder.layers, strict=True):
        torch.testing.assert_close(layer.state_dict(), expected.state_dict())


def test_command_writes_a_checkpoint_that_ranks(theirs, base, tmp_path, capsys):
    file = tmp_path / "cerberus_model.pt"
    torch.save(named(theirs, "as lists of parts"), file)
    given = {"weights": file, "base_model": base, "output": tmp_path / "made", "max_length": 60}
    main(
        ["convert", *(text for name, value in given.items() for text in (f"--{name}", str(value)))]
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "made")
    assert load(tmp_path / "made").network.heads[-1].num_outputs == 2


SPOILERS = {
    "a part nobody knows": lambda weights: {
        **weights,
        "final_classifier.pooler.weight": torch.zeros(2),
    },
    "a head without a classifier": lambda weights: {
        name: w for name, w in weights.items() if not name.startswith("classifiers.1.")
    },
    "a layer with a weight missing": lambda weights: {
        name: w for name, w in weights.items() if "shared_encoder.layer.1.output.dense" not in name
    },
    "no heads": lambda weights: {n: w for n, w in weights.items() if not n.startswith("head")},
    "another width": lambda weights: {**weights, "embeddings.LayerNorm.bias": torch.zeros(3)},
    "names that are numbers": lambda weights: dict(enumerate(weights.values())),
    "no tensors": lambda _: {"weights": object()},
}


@pytest.mark.parametrize("how", SPOILERS)
def test_a_file_that_does_not_fit_is_refused(theirs, base, how, tmp_path):
    file = tmp_path / "cerberus_model.pt"
    torch.save(SPOILERS[how](named(theirs, "as lists of parts")), file)
    with pytest.raises(CheckpointError, match="cerberus_model"):
        load_cerberus_file(file, base, max_length=60)


def test_a_missing_file_is_refused(base, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.pt is no file"):
        load_cerberus_file(tmp_path / "nowhere.pt", base, max_length=60)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"junk\n" * 9, b"\x80\x02.", b"\x80\x02j12."],
    ids=["empty", "a word", "lines", "a pickle of nothing", "a pickle that is cut"],
)
def test_a_file_that_torch_did_not_write_is_refused(base, tmp_path, content):
    (tmp_path / "junk.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"junk\.pt"):
        load_cerberus_file(tmp_path / "junk.pt", base, max_length=60)


def test_an_empty_file_is_called_empty(base, tmp_path):
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CheckpointError, match=r"empty\.pt is an empty file"):
        load_cerberus_file(tmp_path / "empty.pt", base, max_length=60)


def test_convert_over_what_is_there_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(
            [
                "convert",
                "--weights",
                "nowhere",
                "--base_model",
                "nowhere",
                "--output",
                str(tmp_path),
            ]
        )
    assert "choose a new folder" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"
