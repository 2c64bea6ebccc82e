"""New rankers from pretrained encoders and from other rankers."""

from collections.abc import Sequence
from pathlib import Path

from as2ray.checkpoints.gc_pause import gc_paused

with gc_paused():
    import torch

    from as2ray.checkpoints.loading import (
        build_ranker,
        checkpoint_errors,
        read_config,
        read_ranker,
    )
    from as2ray.checkpoints.weight_checks import silence_transformers
    from as2ray.errors import CheckpointError, ConfigError
    from as2ray.models.cascade import CascadeNetwork, CascadeRanker
    from as2ray.models.encoder.encoder import truncate
    from as2ray.models.multi_stage import MultiStageRanker
    from as2ray.models.pointwise import PointwiseRanker
    from as2ray.models.ranker import Ranker
    from as2ray.models.sequential import SequentialNetwork, SequentialRanker
    from as2ray.models.two_in_one import TwoInOneNetwork, TwoInOneRanker


def encoder_num_layers(path: str | Path) -> int:
    """Layers of a checkpoint's encoder; its weights are not read.

    Args:
        path: A folder or a hub id.

    Raises:
        CheckpointError: No encoder or ranker.
    """
    with checkpoint_errors(path), silence_transformers():
        return int(read_config(path).num_hidden_layers)


def init_ranker(
    path: str | Path,
    *,
    max_length: int = 128,
    num_layers: int | None = None,
    exit_layers: Sequence[int] | None = None,
    pooling: str = "mean",
    num_ranking_heads: int = 0,
    score_averaging: str = "probabilities",
    is_joint: bool = False,
    extract_answers: bool = False,
    seed: int = 0,
) -> Ranker:
    """A ranker to be trained, from a pretrained encoder or from a ranker.

    A pretrained encoder has no classification head, and a classifier of another task one of other
    labels: a head is made from `seed`. Nothing else may be missing from the checkpoint. A cascade
    or a joint model goes on as it is.

    Args:
        path: A folder or a hub id.
        max_length: Most tokens of a pair.
        layers: Keep the first layers only.
        exits: Make a cascade: layers run before each partial classifier, ascending.
        pooling: What a cascade's partial classifiers look at: the `mean` of all token states, or
            the `first`.
        heads: CERBERUS's heads after the last exit: a copy each of the layers above it, and of
            a ranker's classifier; on a pretrained encoder each has a new one.
        average: How the heads become one score: of their `probabilities` or their `logits`.
        joint: Make a joint model of passages and sentences (Two-in-One).
        answers: Let it find short answers in the sentences, too.
        seed: Of the new heads' weights.

    Raises:
        CheckpointError: No encoder or ranker; weights unknown, missing or of another shape.
        RecipeError: What is asked does not go together, or is not what the ranker is.
    """
    torch.manual_seed(seed)
    ranker, new_head = read_ranker(path, max_length=max_length, make_new_head=True)
    ranker.calibration, ranker.threshold = (), None  # of weights that will change
    _check_init_options(
        ranker, num_layers, exit_layers, num_ranking_heads, is_joint, extract_answers
    )
    if isinstance(ranker, MultiStageRanker | TwoInOneRanker):
        return ranker
    dress = ranker.tokenizer, ranker.hf_tokenizer
    network = ranker.network if num_layers is None else truncate(ranker.network, num_layers)
    if is_joint:
        return build_ranker(
            TwoInOneRanker, TwoInOneNetwork.from_encoder(network, extract_answers), *dress
        )
    if exit_layers is None:
        return build_ranker(PointwiseRanker, network, *dress)
    made = CascadeNetwork.from_encoder(
        network, exit_layers, pooling, num_ranking_heads, score_averaging, not new_head
    )
    return build_ranker(CascadeRanker, made, *dress)


def _check_init_options(
    ranker: Ranker,
    num_layers: int | None,
    exit_layers: Sequence[int] | None,
    num_ranking_heads: int,
    is_joint: bool,
    extract_answers: bool,
) -> None:
    """Nothing that is asked of a ranker may be left undone in silence; see `start`."""
    if isinstance(ranker, MultiStageRanker | TwoInOneRanker):
        held = ranker.checkpoint_settings()
        fine = num_layers is None and (
            exit_layers is None or tuple(exit_layers) == ranker.exit_layers
        )
        fine = (
            fine
            and num_ranking_heads in (0, held.get("heads", 0))
            and extract_answers <= held.get("answers", False)
        )
        fine = fine and is_joint == isinstance(ranker, TwoInOneRanker)
        expected = "no layers and no other exits, heads or answers: it goes on as it is"
        mend = "start a new one from an encoder or a pointwise ranker"
    else:
        fine = not num_ranking_heads if exit_layers is None else not is_joint
        fine = fine and is_joint >= extract_answers
        expected = "heads after exits, answers of a joint model, and that with neither of the two"
        mend = "correct the recipe"
    if not fine:
        raise ConfigError(
            f"layers={num_layers}, exits={exit_layers}, heads={num_ranking_heads}, joint={is_joint}, answers={extract_answers} of a "
            f"{type(ranker).__name__} with exits {ranker.exit_layers}"
            f"; expected {expected}",
            fix=mend,
        )


def build_sequential(rankers: Sequence[Ranker]) -> Ranker:
    """Pointwise rankers of one encoder and growing depth as one ranker that drops in between.

    Args:
        rankers: Shallowest first; the tokenizer is the last one's.

    Raises:
        CheckpointError: None at all, one that is not pointwise, or of several encoders.
        RecipeError: Not of growing depth.
    """
    if not rankers or not all(isinstance(ranker, PointwiseRanker) for ranker in rankers):
        raise CheckpointError(
            f"a sequence of {[type(ranker).__name__ for ranker in rankers]}"
            "; expected at least one pointwise ranker, and no other kind",
            fix="train pointwise rankers of growing depth",
        )
    network = SequentialNetwork.from_networks([ranker.network for ranker in rankers])
    last = rankers[-1]
    return build_ranker(SequentialRanker, network, last.tokenizer, last.hf_tokenizer)
