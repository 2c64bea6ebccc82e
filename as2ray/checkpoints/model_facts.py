"""What a checkpoint is: family, head, pooling, prompt, activation and license."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from as2ray.checkpoints.cross_encoder_files import CheckpointFiles
from as2ray.checkpoints.packaged import split_revision
from as2ray.models.encoder.families import token_pooling
from as2ray.models.ranker import Ranker

NON_COMMERCIAL = ("-nc", "noncommercial", "non-commercial", "research")
"""Parts of the names of licenses that forbid commercial use."""


@dataclass(frozen=True)
class ModelFacts:
    """What is said of a ranker before it is used."""

    family: str
    """`config.model_type`."""
    head: str
    """Class of the network with its head."""
    pooling: str
    """What the head reads."""
    prompt: str
    """A decoder's prompt, or the special tokens around both texts."""
    activation: str
    """What a score is."""
    license: str | None
    """As the model card says, several with commas; None if it says none."""

    @property
    def warning(self) -> str | None:
        """What the license forbids, if it does."""
        if self.license is None or not any(p in self.license.lower() for p in NON_COMMERCIAL):
            return None
        return f"license {self.license}: not for commercial use, and neither is what is made of it"


def read_model_facts(path: str | Path, ranker: Ranker) -> ModelFacts:
    """Returns what a ranker and its model card say.

    Args:
        path: Folder or hub id of the ranker.
        ranker: The ranker that was loaded from there.
    """
    config = ranker.network.config
    tokenizer = ranker.tokenizer
    fields = {-1: "{question}", -2: "{candidate}"}
    names = (
        fields.get(token_id) or tokenizer.id_to_token(token_id)
        for token_id, _ in tokenizer.special_token_layout
    )
    prompt = "".join(tokenizer.prompt) if tokenizer.prompt else " ".join(names)
    return ModelFacts(
        config.model_type,
        type(ranker.network).__name__,
        {"first": "first token", "mean": "mean of all tokens", "last": "last token"}[
            token_pooling(config)
        ],
        prompt.replace("{instruction}", tokenizer.instruction),
        "sigmoid" if ranker.calibration else ranker.activation,
        _read_license(path),
    )


def _read_license(path: str | Path) -> str | None:
    card = CheckpointFiles(*split_revision(path)).find("README.md")
    if card is None:
        return None
    try:
        data = ModelCard.load(card).data
    except (ValueError, TypeError, yaml.YAMLError):  # no metadata, or none that can be read
        return None
    names = getattr(data, "license_name", None) or data.license
    if isinstance(names, list):
        return ", ".join(map(str, names)) or None
    return None if names is None else str(names)
