"""An exported ranker scores in sentence-transformers as it does here."""

import json
import shutil

import pytest

from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.main import main
from as2ray.errors import CheckpointError

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
