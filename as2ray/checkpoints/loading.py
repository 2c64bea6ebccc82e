"""Loads rankers from checkpoints.

A checkpoint is a folder with `config.json`, `model.safetensors` and a tokenizer, or a hub id.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from as2ray.checkpoints.gc_pause import gc_paused

with gc_paused():
    import torch
    from safetensors.torch import load_file
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )

    from as2ray.checkpoints.activation_ranges import (
        check_activation_ranges,
        load_activation_ranges,
    )
    from as2ray.checkpoints.checkpoint_errors import checkpoint_errors
    from as2ray.checkpoints.config_checks import check_config, gte_config
    from as2ray.checkpoints.cross_encoder_files import (
        CheckpointFiles,
        ModuleHead,
        read_activation,
    )
    from as2ray.checkpoints.decoder_reranker import (
        default_activation,
        is_decoder,
        is_generating,
        load_score,
        resolve_prompt,
    )
    from as2ray.checkpoints.hub import check_hub
    from as2ray.checkpoints.packaged import split_revision
    from as2ray.checkpoints.weight_checks import check_loaded_weights, silence_transformers
    from as2ray.errors import CheckpointError, ConfigError, validate_arguments
    from as2ray.models.calibration import Calibration
    from as2ray.models.cascade import CascadeNetwork, CascadeRanker
    from as2ray.models.encoder.families import get_family, max_sequence_length
    from as2ray.models.ensemble import EnsembleRanker
    from as2ray.models.packed_ranker import PackedRanker
    from as2ray.models.pointwise import LinearRanker, PointwiseRanker
    from as2ray.models.precision import Dtype
    from as2ray.models.ranker import CONFIG_KEY, Ranker
    from as2ray.models.sequential import SequentialNetwork, SequentialRanker
    from as2ray.models.two_in_one import TwoInOneNetwork, TwoInOneRanker
    from as2ray.text.tokenization import TOKENIZER_SETTINGS, PairTokenizer

FORMAT_VERSION = 2
"""Version of the entry `as2ray` of `config.json`; other versions are refused."""

RANKER_TYPES: dict[str, tuple[Any, type[Ranker]]] = {
    "pointwise": (AutoModelForSequenceClassification, PointwiseRanker),
    "linear": (AutoModelForTokenClassification, LinearRanker),
    "cascade": (CascadeNetwork, CascadeRanker),
    "sequential": (SequentialNetwork, SequentialRanker),
    "two_in_one": (TwoInOneNetwork, TwoInOneRanker),
}
"""Classes of the network and the ranker, by the kind of ranker that `config.json` names."""

WEIGHT_ALIGNMENT = 64
"""Bytes to which torch aligns the tensors that it allocates on a CPU."""

MEMBER_PREFIX = "member-"
"""Folders of an ensemble's members are named by this prefix and their index."""


@validate_arguments
def load(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    max_length: PositiveInt | None = None,
    instruction: str | None = None,
) -> Ranker:
    """Loads a ranker for ranking.

    Args:
        path: A folder that `save` or transformers wrote, or a hub id, with or without `@REVISION`.
        dtype: Number format of matrix products; `auto` depends on the hardware, and is int8 if the
            checkpoint has activation ranges and the CPU multiplies bytes natively.
        device: By default the first GPU, or the CPU if there is none.
        max_length: Maximum number of tokens of a pair; by default as in training, or 128 and those
            of a decoder's prompt.
        instruction: What a decoder is told to do; by default as in its prompt.

    Raises:
        CheckpointError: There is no ranker at the path, its format is of another version, or its
            weights are unknown, missing or of another shape, or do not fit its activation ranges.
        ConfigError: The encoder has fewer positions than `max_length`; or int8 is requested without
            such a CPU, or without ranges; or this machine has no such device; or an argument is of
            another type or out of its range.
    """
    if device is not None:
        _check_device(device)
    settings = _read_ensemble_settings(path)
    if settings is not None:
        # Sorted by name, member-10 would come before member-2.
        folders = [Path(path) / f"{MEMBER_PREFIX}{i}" for i in range(len(settings["weights"]))]
        options: Any = {
            "dtype": dtype,
            "device": device,
            "max_length": max_length,
            "instruction": instruction,
        }
        members = [load(folder, **options) for folder in folders]
        ensemble = EnsembleRanker(members, settings["weights"])
        _load_calibration(ensemble, settings)
        return ensemble.eval()
    ranker, _ = read_ranker(
        path, max_length=max_length, make_new_head=False, instruction=instruction
    )
    ranker.dtype, ranker.use_fused_layers = dtype, True
    ranker.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_activation_ranges(ranker, path)
    return ranker


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that it has it
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={device} cannot be used: {reason}") from error


def _read_ensemble_settings(path: str | Path) -> dict[str, Any] | None:
    """Reads the settings of an ensemble, whose `config.json` describes no network."""
    config_path = Path(path) / "config.json"
    if not config_path.is_file():
        return None
    with checkpoint_errors(path):
        config = json.loads(config_path.read_text(encoding="utf-8"))
        settings: dict[str, Any] = config.get(CONFIG_KEY, {})
        if settings.get("ranker") != "ensemble":
            return None
        _check_format_version(path, settings)
        return settings


def _check_format_version(path: str | Path, settings: Mapping[str, Any]) -> None:
    version = settings.get("format_version", 1)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {version}, but as2ray reads {FORMAT_VERSION}",
            fix="train or convert the ranker again",
        )


def _load_calibration(ranker: Ranker, settings: Mapping[str, Any]) -> None:
    ranker.calibration, ranker.plain_calibration = (
        tuple(Calibration(**entry) for entry in settings.get(name, []))
        for name in ("calibration", "plain_calibration")
    )
    ranker.threshold = settings.get("threshold")


def build_ranker(
    ranker_type: Any, network: Any, pair_tokenizer: PairTokenizer, hf_tokenizer: Any
) -> Ranker:
    """Builds a ranker that keeps the Hugging Face tokenizer, which `save` writes."""
    ranker: Ranker = ranker_type(network, pair_tokenizer)
    ranker.hf_tokenizer = hf_tokenizer
    settings = getattr(network.config, "sentence_transformers", None) or {}
    is_identity = str(settings.get("activation_fn")).endswith(".Identity")
    if is_identity and network.config.num_labels == 1 and isinstance(ranker, PackedRanker):
        ranker.activation = "identity"
    return ranker


def read_ranker(
    path: str | Path,
    *,
    max_length: int | None,
    make_new_head: bool,
    instruction: str | None = None,
) -> tuple[Ranker, bool]:
    """Reads a ranker that is no ensemble.

    Args:
        path: A folder or a hub id.
        max_length: Maximum number of tokens of a pair; by default as in training, or 128.
        make_new_head: Whether an encoder, or a classifier of another task, gets a new head.
        instruction: What a decoder is told to do; by default as in its prompt.

    Returns:
        The ranker, and whether its head is new.
    """
    with checkpoint_errors(path), silence_transformers():
        config = read_config(path)
        settings = getattr(config, CONFIG_KEY, {})
        kind = settings.get("ranker", "pointwise")
        if kind not in RANKER_TYPES:
            raise CheckpointError(f"{path}: ranker {kind!r} is none of {sorted(RANKER_TYPES)}")
        network_type, ranker_type = RANKER_TYPES[kind]
        name, revision = split_revision(path)
        files = CheckpointFiles(name, revision)
        generates = kind == "pointwise" and is_generating(config)
        has_modules = kind == "pointwise" and not generates
        module_head = ModuleHead.read(files, config) if has_modules else None
        is_classifier = kind != "pointwise" or any(
            "SequenceClassification" in name for name in config.architectures or []
        )
        is_classifier = is_classifier or module_head is not None or generates
        if generates:
            config.num_labels = 1
        # A classifier of another task can be a starting point: TANDA's RoBERTa-large is from MNLI.
        make_new_head = make_new_head and not (is_classifier and config.num_labels <= 2)
        if make_new_head or not is_classifier:
            config.num_labels = 2
        read_activation(files, config, default_activation(files, config))
        network, loading_info = network_type.from_pretrained(
            name,
            **revision,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded_weights` reports them
            dtype=torch.float32,
            **_attention_option(config),
        )
        has_new_head = make_new_head or module_head is not None or generates
        check_loaded_weights(path, loading_info, network, has_new_head)
        if module_head is not None:
            module_head.load_into(network)
        _align_weights(network)
        hf_tokenizer = AutoTokenizer.from_pretrained(
            name, config=config, trust_remote_code=False, **revision
        )
        _check_tokenizer(path, hf_tokenizer, config.vocab_size)
        if generates:
            load_score(files, network, hf_tokenizer)
        settings = resolve_prompt(files, config, hf_tokenizer, settings, instruction)
        if is_decoder(config) and config.pad_token_id is None:
            # transformers looks for the last token in front of it.
            network.config.pad_token_id = hf_tokenizer.pad_token_id
        tokenizer_json = hf_tokenizer.backend_tokenizer.to_str()
        tokenizer = _build_pair_tokenizer(tokenizer_json, config, settings, max_length)
        ranker = build_ranker(ranker_type, network, tokenizer, hf_tokenizer)
        _load_calibration(ranker, settings)
        ranker.activation_ranges = load_activation_ranges(name, **revision)
    return ranker, make_new_head


def _attention_option(config: Any) -> dict[str, str]:
    """Returns the attention of a family that has none but its own; `Encoder` sets others'."""
    is_own = get_family(config).positions == "relative"
    return {"attn_implementation": "eager"} if is_own else {}


def _align_weights(network: torch.nn.Module) -> None:
    """Copies weights that lie in the mapped file at any address to addresses that torch aligns.

    The last digit of a product depends on the alignment, so that the same weights in another file,
    such as a cascade's, would give other scores.
    """
    for weights in network.parameters():
        if weights.data_ptr() % WEIGHT_ALIGNMENT:
            weights.data = weights.data.clone()


def read_config(path: str | Path) -> Any:
    """Reads the configuration of a supported encoder or ranker.

    Raises:
        CheckpointError: The family is not supported, or the format is of another version.
    """
    name, revision = split_revision(path)
    check_hub(name, **revision)
    values = CheckpointFiles(name, revision).read_json("config.json")
    if values:
        check_config(name, values)
    else:
        _refuse_parent(name)
    if values.get("model_type") == "new":
        config = gte_config(values)
    else:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **revision)
    get_family(config)
    if hasattr(config, CONFIG_KEY):
        _check_format_version(path, getattr(config, CONFIG_KEY))
    return config


def _refuse_parent(name: str) -> None:
    """Raises an error that names the only checkpoint in a folder, if there is one.

    As in the output of `as2ray train`, but not in an index, whose encoder is no ranker. Otherwise
    transformers says what is missing.
    """
    nested = [path.parent for path in Path(name).glob("*/config.json")]
    if len(nested) == 1 and not (nested[0] / "modules.json").exists():
        problem = f"{name} is no checkpoint: it has no config.json"
        raise CheckpointError(problem, fix=f"did you mean {nested[0]}?")


def _check_tokenizer(path: str | Path, tokenizer: Any, num_embeddings: int) -> None:
    """Checks that transformers has read a vocabulary, and that its ids fit the embeddings."""
    ids = set(tokenizer.get_vocab().values())
    num_words, max_id = len(ids - set(tokenizer.all_special_ids)), max(ids, default=-1)
    if num_words <= 0 or max_id >= num_embeddings:
        raise CheckpointError(
            f"{path}: a tokenizer of {num_words} words and ids up to {max_id} does not fit "
            f"{num_embeddings} embeddings",
            fix="copy tokenizer.json and tokenizer_config.json from the original checkpoint",
        )


def _build_pair_tokenizer(
    tokenizer_json: str, config: Any, settings: Mapping[str, Any], max_length: int | None
) -> PairTokenizer:
    """Builds a tokenizer with lengths as requested, as in training, or 128 and 64.

    Without a length, those of a prompt are added.
    """
    max_positions = max_sequence_length(config)
    stored = {name: settings[name] for name in TOKENIZER_SETTINGS if name in settings}
    num_prompt_tokens = 0
    if stored.get("prompt"):
        whole = {**stored, "max_length": 10**6, "max_question_length": 1}
        num_prompt_tokens = PairTokenizer(tokenizer_json, **whole).num_special_tokens
    if max_length is None:
        max_length = settings.get("max_length", min(128 + num_prompt_tokens, max_positions))
    check_max_length(config, max_length)
    max_question_length = settings.get("max_question_length", 64)
    if max_length != settings.get("max_length"):
        max_question_length = min(max_question_length, (max_length - num_prompt_tokens) // 2)
    lengths = {"max_length": max_length, "max_question_length": max_question_length}
    return PairTokenizer(tokenizer_json, **{**stored, **lengths})


def check_max_length(config: Any, max_length: int) -> None:
    """Checks that an encoder has positions for so many tokens.

    Raises:
        ConfigError: It has fewer.
    """
    if max_length > (max_positions := max_sequence_length(config)):
        raise ConfigError(
            f"{max_length=} exceeds the encoder's {max_positions} positions "
            f"(max_position_embeddings={config.max_position_embeddings})",
            fix=f"choose a max_length of at most {max_positions}",
        )


def load_weights(ranker: Ranker, folder: str | Path) -> dict[str, torch.Tensor]:
    """Loads the weights of a saved ranker, under their names in `ranker.state_dict()`."""
    weights = load_file(Path(folder) / "model.safetensors")
    return {f"network.{name}": tensor for name, tensor in weights.items()}
