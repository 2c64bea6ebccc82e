"""Checks the weights that transformers has loaded, and silences its own reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

from as2ray.errors import CheckpointError

BUFFER_SUFFIXES = ("position_ids", "token_type_ids")
"""Ends of names that older releases of transformers store and no release reads."""

PRETRAINING_HEAD_PREFIXES = (
    "cls.",
    "lm_head.",
    "predictions.",
    "discriminator_predictions.",
    "generator_",
    "sop_classifier.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "decoder.",
)
"""Weights of pre-training that an encoder's checkpoint has and fine-tuning does not use."""


def check_loaded_weights(
    path: str | Path, loading_info: dict[str, Any], network: Any, has_new_head: bool
) -> None:
    """Checks that no weight is missing, unknown or of another shape, except in a new head.

    Args:
        path: Path of the checkpoint.
        loading_info: The report of transformers' `from_pretrained`.
        network: The network that was loaded.
        has_new_head: Whether its classifier is new.

    Raises:
        CheckpointError: There are such weights.
    """
    encoder_prefix = network.base_model_prefix + "."
    missing = sorted(loading_info["missing_keys"])
    if has_new_head:
        missing = [k for k in missing if k.startswith(encoder_prefix) and ".pooler" not in k]
    unknown = sorted(loading_info["unexpected_keys"])
    if has_new_head:
        # RoBERTa's and ELECTRA's classifiers have no pooler, but plain encoders may have one.
        unknown = [k for k in unknown if not k.removeprefix(encoder_prefix).startswith("pooler.")]
        unknown = [k for k in unknown if not k.startswith(PRETRAINING_HEAD_PREFIXES)]
    unknown = [k for k in unknown if not k.endswith(BUFFER_SUFFIXES)]
    mismatched = sorted(
        f"{name}: {list(shape)} instead of {list(expected_shape)}"
        for name, shape, expected_shape in loading_info["mismatched_keys"]
        if name.startswith(encoder_prefix) or not has_new_head
    )
    if missing or unknown or mismatched:
        raise CheckpointError(
            f"{path} does not have exactly the weights of {type(network).__name__}: "
            f"{len(missing)} weights missing {missing[:4]}, {len(unknown)} unknown {unknown[:4]}, "
            f"{len(mismatched)} of another shape {mismatched[:4]}",
            fix="a pretrained encoder must be trained first (`model` of a recipe)",
        )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disables transformers' progress bars and load report; `check_loaded_weights` replaces it."""
    verbosity, had_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()
