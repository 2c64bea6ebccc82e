"""Scores pairs as transformers does, in padded batches: what packed scores are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from as2ray.errors import CheckpointError
from as2ray.models.pointwise import PointwiseRanker
from as2ray.text.packing import TokenSequences

BATCH_SIZE = 32
"""Pairs of a padded batch: the default of sentence-transformers."""

TOLERANCE = 1e-3
"""Largest difference of a packed logit to a padded one, relative to the largest logit if that is
above 1. Real networks differ by some 1e-5 in fp32."""

MAX_CHECKED_PAIRS = 64


def predict_padded(network: Any, sequences: TokenSequences) -> np.ndarray:
    """Returns logits of padded batches, float32, shape [pairs, labels]; long pairs come first.

    Args:
        network: A `...ForSequenceClassification` with an attention of transformers, or a
            `...ForTokenClassification`, of which the first token counts.
        sequences: Tokenized pairs.
    """
    config = network.config
    padding_id = config.pad_token_id or 0
    device = next(network.parameters()).device
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    order = np.argsort(-sequences.lengths, kind="stable")
    logits = np.empty((len(sequences), config.num_labels), np.float32)
    with torch.inference_mode():
        for first in range(0, len(order), BATCH_SIZE):
            rows = order[first : first + BATCH_SIZE]
            shape = len(rows), int(sequences.lengths[rows].max())
            token_ids, types = np.full(shape, padding_id), np.zeros(shape, np.int64)
            mask = np.arange(shape[1]) < sequences.lengths[rows][:, None]
            for line, row in enumerate(rows):
                tokens = slice(starts[row], starts[row] + sequences.lengths[row])
                token_ids[line, mask[line]] = sequences.token_ids[tokens]
                types[line, mask[line]] = sequences.token_types[tokens]
            inputs = {"input_ids": token_ids, "attention_mask": mask.astype(np.int64)}
            if getattr(config, "type_vocab_size", 0) > 1:
                inputs["token_type_ids"] = types
            tensors = {name: torch.from_numpy(x).to(device) for name, x in inputs.items()}
            output = network(**tensors).logits.float().cpu().numpy()
            logits[rows] = output if output.ndim == 2 else output[:, 0]  # of each token
    return logits


@contextmanager
def transformers_attention(network: Any) -> Iterator[None]:
    """Runs a network of a ranker with transformers' own attention inside the context."""
    implementation = network.config._attn_implementation
    has_own = implementation == "eager"  # DeBERTa, whose layers know no other
    if not has_own:
        network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if not has_own:
            network.set_attn_implementation(implementation)


def check_packed_scores(ranker: PointwiseRanker, sequences: TokenSequences) -> float:
    """Compares packed with padded logits, in fp32, over the longest and the shortest pairs.

    Args:
        ranker: The ranker; its settings are as before afterwards.
        sequences: Pairs of the user.

    Returns:
        The largest difference, relative to the largest logit if that is above 1.

    Raises:
        CheckpointError: It is above the tolerance.
    """
    order = np.argsort(-sequences.lengths, kind="stable")
    half = MAX_CHECKED_PAIRS // 2
    pairs = sequences.take(np.unique(np.append(order[:half], order[-half:])))
    dtype, ranker.dtype = ranker.dtype, "fp32"
    try:
        packed = ranker.predict_logits(ranker.pack(pairs), len(pairs))
    finally:
        ranker.dtype = dtype
    with transformers_attention(ranker.network):
        padded = predict_padded(ranker.network, pairs)
    if padded.shape[1] == 1:
        packed = packed[:, 1:]
    scale = max(1.0, float(np.abs(padded).max()))
    difference = float(np.abs(packed - padded).max()) / scale
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"packed logits of {type(ranker.network).__name__} differ from those of transformers, "
            f"padded, by {difference:.2g} over {len(pairs)} of your pairs, above {TOLERANCE:g}",
            fix="report the model; rank with transformers until this is mended",
        )
    return difference
