"""Networks as transformers publishes them: read in silence, and refused where weights do not fit.

Knows transformers' report of a loading. Must not know rankers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

from as2ray.errors import CheckpointError

BUFFER_SUFFIXES = ("position_ids", "token_type_ids")
"""Ends of names that older releases of transformers store and nobody reads."""

PRETRAINING_HEAD_PREFIXES = (
    "cls.",
    "lm_head.",
    "predictions.",
    "discriminator_predictions.",
    "generator_",
    "sop_classifier.",
)
"""Weights that pre-training leaves in an encoder's checkpoint and fine-tuning has no use for."""


def check_loaded_weights(
    path: str | Path, loading_info: dict[str, Any], network: Any, has_new_head: bool
) -> None:
    """No weight may be missing, unknown or misshapen, but for what a new head explains.

    Args:
        path: Of the checkpoint.
        report: What transformers says of its loading.
        network: What was loaded.
        new_head: Whether its classifier is made anew.

    Raises:
        CheckpointError: There are such weights.
    """
    inside = network.base_model_prefix + "."
    missing = sorted(loading_info["missing_keys"])
    if has_new_head:
        missing = [k for k in missing if k.startswith(inside) and ".pooler" not in k]
    unknown = sorted(loading_info["unexpected_keys"])
    if has_new_head:
        # RoBERTa's and ELECTRA's classifiers have no pooler, but plain encoders may bring one.
        unknown = [k for k in unknown if not k.removeprefix(inside).startswith("pooler.")]
        unknown = [k for k in unknown if not k.startswith(PRETRAINING_HEAD_PREFIXES)]
    unknown = [k for k in unknown if not k.endswith(BUFFER_SUFFIXES)]
    misshapen = sorted(
        f"{name}: {list(found)} for {list(wanted)}"
        for name, found, wanted in loading_info["mismatched_keys"]
        if name.startswith(inside) or not has_new_head
    )
    if missing or unknown or misshapen:
        raise CheckpointError(
            f"{path}: {len(missing)} weights missing {missing[:4]}, {len(unknown)} unknown "
            f"{unknown[:4]}, {len(misshapen)} misshapen {misshapen[:4]}"
            f"; expected exactly the weights of {type(network).__name__}",
            fix="train from it (a recipe's `model`) if it is a pretrained encoder; else repair it",
        )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Without transformers' bars and load report: `refuse_gaps` says what matters."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
