"""Creates new rankers from pretrained encoders and from other rankers."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from as2ray.cascade.ranker_shape import RankerShape, check_model_spec
from as2ray.checkpoints.gc_pause import gc_paused

with gc_paused():
    import torch
    from transformers import AutoModelForTokenClassification

    from as2ray.checkpoints.checkpoint_errors import checkpoint_errors
    from as2ray.checkpoints.loading import (
        build_ranker,
        check_max_length,
        read_config,
        read_ranker,
    )
    from as2ray.checkpoints.weight_checks import silence_transformers
    from as2ray.errors import CheckpointError, ConfigError, validate_arguments
    from as2ray.models.cascade import CascadeNetwork, CascadeRanker, Pooling
    from as2ray.models.encoder.encoder import copy_encoder_weights, truncate
    from as2ray.models.encoder.families import get_family
    from as2ray.models.pointwise import LinearRanker, PointwiseRanker
    from as2ray.models.ranker import Ranker
    from as2ray.models.sequential import SequentialNetwork, SequentialRanker
    from as2ray.models.two_in_one import TwoInOneNetwork, TwoInOneRanker


def encoder_num_layers(path: str | Path, max_length: int = 1) -> int:
    """Returns the number of layers of a checkpoint's encoder, without reading its weights.

    Args:
        path: A folder or a hub id.
        max_length: Number of tokens for which the encoder must have positions.

    Raises:
        CheckpointError: The path holds neither an encoder nor a ranker.
        ConfigError: The encoder has fewer positions.
    """
    with checkpoint_errors(path), silence_transformers():
        config = read_config(path)
        check_max_length(config, max_length)
        return int(config.num_hidden_layers)


@dataclass(frozen=True)
class _ShapeOptions:
    num_layers: int | None
    exit_layers: Sequence[int] | None
    num_ranking_heads: int


@validate_arguments
def init_ranker(
    path: str | Path,
    *,
    max_length: PositiveInt = 128,
    tokenizer_settings: Mapping[str, Any] | None = None,
    head: Literal["own", "linear"] = "own",
    num_layers: int | None = None,
    exit_layers: Sequence[int] | None = None,
    pooling: Pooling = "mean_of_rest",
    num_ranking_heads: NonNegativeInt = 0,
    score_averaging: Literal["probabilities", "logits"] = "probabilities",
    is_joint: bool = False,
    extract_answers: bool = False,
    seed: int = 0,
) -> Ranker:
    """Creates a ranker to be trained from a pretrained encoder or from a ranker.

    A pretrained encoder has no classification head, and a classifier of another task has one with
    other labels; both get a new head. All other weights must be in the checkpoint. A cascade or a
    joint model keeps its layers, exits and heads.

    Args:
        path: A folder or a hub id.
        max_length: Maximum number of tokens of a pair.
        tokenizer_settings: Other fields of `PairTokenizer`; None stands for what the start has.
        head: Head of a new pointwise ranker: its family's `own`, or one `linear` layer on the first
            token, without a pooler and with one label.
        num_layers: Keep only the first layers of the encoder.
        exit_layers: Make a cascade: number of layers below each partial classifier, ascending.
        pooling: Input of a cascade's partial classifiers: the mean of all token states but the
            first (`mean_of_rest`), the `mean` of all, or the `first` state.
        num_ranking_heads: CERBERUS's heads after the last exit. Each is a copy of the layers above
            it and of a ranker's classifier; on a pretrained encoder each gets a new classifier.
        score_averaging: What is averaged over the ranking heads to give one score: their
            `probabilities` or their `logits`.
        is_joint: Make a joint model of passages and sentences (Two-in-One).
        extract_answers: Let the joint model extract short answers from the sentences.
        seed: Seed of the weights of new heads.

    Raises:
        CheckpointError: The path holds neither an encoder nor a ranker, or its weights are unknown,
            missing or of another shape.
        ConfigError: Layers, exits and heads do not go together; see `check_model_spec`. Or an
            argument is out of its range.
    """
    torch.manual_seed(seed)
    ranker, has_new_head = read_ranker(path, max_length=max_length, make_new_head=True)
    # Fitted to weights that will change.
    ranker.calibration, ranker.plain_calibration, ranker.threshold = (), (), None
    ranker.activation_ranges = ()
    settings = {k: v for k, v in (tokenizer_settings or {}).items() if v is not None}
    ranker.tokenizer = replace(ranker.tokenizer, **settings)
    if is_joint and ranker.tokenizer.prompt:
        raise ConfigError(
            f"is_joint=True, but a joint model reads passages without a prompt, and "
            f"model_type={ranker.network.config.model_type!r} has one"
        )
    start_shape = _shape_of_ranker(ranker)
    check_model_spec(
        _ShapeOptions(num_layers, exit_layers, num_ranking_heads),
        start_shape.num_layers,
        start_shape,
        is_joint=is_joint,
        extract_answers=extract_answers,
    )
    if not isinstance(ranker, PointwiseRanker):
        return ranker
    network: Any = ranker.network
    if num_layers is not None:
        network = truncate(network, num_layers)
    ranker_type: type[Ranker] = type(ranker)
    if is_joint:
        ranker_type = TwoInOneRanker
        network = TwoInOneNetwork.from_encoder(network, extract_answers)
    elif exit_layers is not None:
        ranker_type = CascadeRanker
        network = CascadeNetwork.from_encoder(
            network, exit_layers, pooling, num_ranking_heads, score_averaging, not has_new_head
        )
    elif head == "linear" and has_new_head:
        if not get_family(network.config).has_linear_head:
            raise ConfigError(
                f"head='linear', but transformers has no linear head for model_type="
                f"{network.config.model_type!r}",
                fix="choose head='own'",
            )
        ranker_type, config = LinearRanker, deepcopy(network.config)
        config.num_labels = 1
        encoder, network = network, AutoModelForTokenClassification.from_config(config)
        copy_encoder_weights(encoder, network.base_model)
    return build_ranker(ranker_type, network, ranker.tokenizer, ranker.hf_tokenizer)


def _shape_of_ranker(ranker: Ranker) -> RankerShape:
    settings = ranker.checkpoint_settings()
    return RankerShape(
        ranker.network.config.num_hidden_layers,
        ranker.exit_layers,
        settings.get("num_ranking_heads", 0),
        isinstance(ranker, TwoInOneRanker),
        settings.get("extract_answers", False),
    )


def build_sequential(rankers: Sequence[Ranker]) -> Ranker:
    """Combines pointwise rankers of one encoder and growing depth into a sequential ranker.

    Args:
        rankers: The rankers, shallowest first; the last one's tokenizer is used.

    Raises:
        CheckpointError: There are no rankers, one is not pointwise, or their encoders differ in
            more than their depth.
        ConfigError: The depths do not grow.
    """
    if not rankers or not all(type(ranker) is PointwiseRanker for ranker in rankers):
        raise CheckpointError(
            "a sequential ranker is made of one or more pointwise rankers, not of "
            f"{[type(ranker).__name__ for ranker in rankers]}"
        )
    network = SequentialNetwork.from_networks([ranker.network for ranker in rankers])
    return build_ranker(SequentialRanker, network, rankers[-1].tokenizer, rankers[-1].hf_tokenizer)
