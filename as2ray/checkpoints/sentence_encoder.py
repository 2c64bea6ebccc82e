"""Loads and saves sentence encoders in the format of sentence-transformers.

sentence-transformers itself is not needed. Modules are recognized by the name of their class, not
by its import path, which has changed between its releases.
"""

import json
from pathlib import Path
from typing import Any, cast

from as2ray.checkpoints.gc_pause import gc_paused
from as2ray.tables.atomic import atomic_folder

with gc_paused():
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer
    from torch import nn

    from as2ray.checkpoints.checkpoint_errors import checkpoint_errors
    from as2ray.checkpoints.packaged import MINILM_NAME, resolve_model_path
    from as2ray.errors import CheckpointError
    from as2ray.models.encoder.families import get_family, max_sequence_length
    from as2ray.models.encoder.inference_bert import InferenceBert
    from as2ray.models.precision import Dtype
    from as2ray.models.sentence_encoder import EmbeddingSettings, SentenceEncoder, TokenizerFile

MODULE_PREFIX = "sentence_transformers.models."
"""Import path of modules that all releases of sentence-transformers read."""

MODULE_ORDERS = tuple(
    ["Transformer", "Pooling", *dense, *normalize]
    for dense in ([], ["Dense"])
    for normalize in ([], ["Normalize"])
)
"""Modules that a checkpoint may consist of, in order."""

POOLING_MODES = {"mean": "mean", "cls": "first"}
"""Our name of each supported pooling."""

ACTIVATIONS: dict[str, type[nn.Module]] = {"Tanh": nn.Tanh, "Identity": nn.Identity}
"""Supported activations of the module Dense."""

PROMPTS = ("query_prompt", "document_prompt", "default_prompt")

FILES = ("*.json", "*.txt", "*.model", "*model.safetensors")
"""Files of a hub repository that are downloaded."""


def load_sentence_encoder(
    path: str | Path = MINILM_NAME,
    *,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
) -> SentenceEncoder:
    """Loads a sentence encoder.

    Args:
        path: A folder of sentence-transformers, a hub id, or the name of the packaged MiniLM.
        dtype: Number format of matrix products; `auto` depends on the hardware. An encoder has no
            int8, so that this is `auto`, too.
        device: By default the first GPU, or the CPU if there is none.

    Raises:
        CheckpointError: There is no sentence encoder, or one with a module or setting that as2ray
            does not support.
    """
    name = str(Path(path).absolute()) if Path(path).is_dir() else str(path)
    with checkpoint_errors(path):
        folder = Path(resolve_model_path(name))
        if not folder.is_dir():
            folder = _download(name)
        modules = _read_modules(name, folder)
        parts = _load_transformer(modules["Transformer"])
        encoder = _build_encoder(name, folder, modules, *parts)
    return _prepare(encoder, dtype, device)


def load_query_encoder(
    path: str | Path,
    fingerprint: str,
    *,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
) -> SentenceEncoder:
    """Loads the encoder of an index's queries; without transformers if it is a BERT in a folder.

    Importing transformers' models takes longer than an answer. An encoder that was loaded without
    them cannot be trained or saved, and is the same if its fingerprint is.

    Args:
        path: See `load_sentence_encoder`, which loads all other encoders.
        fingerprint: Fingerprint of the encoder that the index was embedded with.
        dtype: See `load_sentence_encoder`.
        device: See `load_sentence_encoder`.
    """
    name = str(Path(path).absolute()) if Path(path).is_dir() else str(path)
    with checkpoint_errors(path):
        folder = Path(resolve_model_path(name))
        if (folder / "modules.json").is_file():
            modules = _read_modules(name, folder)
            parts = _read_bert(modules["Transformer"])
            encoder = None if parts is None else _build_encoder(name, folder, modules, *parts)
            if encoder is not None and encoder.fingerprint == fingerprint:
                return _prepare(encoder, dtype, device)
    return load_sentence_encoder(path, dtype=dtype, device=device)


def _prepare(
    encoder: SentenceEncoder, dtype: Dtype, device: str | torch.device | None
) -> SentenceEncoder:
    encoder.dtype = "auto" if dtype == "int8" else dtype
    return encoder.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    from as2ray.checkpoints.hub import check_hub

    check_hub(name)
    return Path(snapshot_download(name, allow_patterns=list(FILES)))


def save_sentence_encoder(encoder: SentenceEncoder, folder: str | Path) -> Path:
    """Saves a sentence encoder atomically, in the format of sentence-transformers.

    Args:
        encoder: The encoder to save.
        folder: Path of the checkpoint; a folder there is an error.

    Returns:
        The folder.
    """
    settings = encoder.settings
    with atomic_folder(folder) as new_folder:
        network, hf_tokenizer = cast(Any, encoder.network), cast(Any, encoder.hf_tokenizer)
        network.save_pretrained(new_folder)
        hf_tokenizer.save_pretrained(new_folder)
        _write_json(
            new_folder / "sentence_bert_config.json",
            {"max_seq_length": settings.max_length, "do_lower_case": False},
        )
        prompts = {
            "query": settings.query_prompt,
            "document": settings.document_prompt,
            "default": settings.default_prompt,
        }
        _write_json(
            new_folder / "config_sentence_transformers.json",
            {
                "prompts": prompts,
                "default_prompt_name": "default" if settings.default_prompt else None,
                "similarity_fn_name": settings.similarity,
            },
        )
        modes = {"mean": "mean_tokens", "first": "cls_token"}
        modules: dict[str, dict[str, Any]] = {
            "Pooling": {
                "word_embedding_dimension": encoder.network.config.hidden_size,
                **{f"pooling_mode_{m}": name == settings.pooling for name, m in modes.items()},
            }
        }
        if encoder.projection is not None:
            linear, activation = encoder.projection
            modules["Dense"] = {
                "in_features": linear.in_features,
                "out_features": linear.out_features,
                "bias": linear.bias is not None,
                "activation_function": f"{type(activation).__module__}.{type(activation).__name__}",
            }
        if settings.normalize:
            modules["Normalize"] = {}
        entries = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULE_PREFIX}Transformer"}]
        for number, (kind, config) in enumerate(modules.items(), 1):
            path = f"{number}_{kind}"
            _write_json(new_folder / path / "config.json", config)
            if kind == "Dense":
                weights = {f"linear.{k}": w for k, w in linear.state_dict().items()}
                save_file(weights, new_folder / path / "model.safetensors")
            entries.append(
                {"idx": number, "name": str(number), "path": path, "type": MODULE_PREFIX + kind}
            )
        _write_json(new_folder / "modules.json", entries)
    return Path(folder)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_modules(name: str, folder: Path) -> dict[str, Path]:
    """Returns the folder of each module by the name of its class."""
    if not (folder / "modules.json").is_file():
        raise CheckpointError(
            f"{name} has no modules.json, so it is no sentence encoder",
            fix="name a checkpoint of sentence-transformers",
        )
    entries = _read_json(folder / "modules.json")
    modules = {entry["type"].rpartition(".")[2]: folder / entry["path"] for entry in entries}
    if list(modules) not in MODULE_ORDERS or len(modules) != len(entries):
        classes = [entry["type"].rpartition(".")[2] for entry in entries]
        raise CheckpointError(
            f"{name} consists of the modules {', '.join(classes)}; as2ray supports Transformer, "
            "Pooling, Dense and Normalize in this order, the last two optional"
        )
    return modules


def _load_transformer(folder: Path) -> tuple[Any, Any]:
    """Returns network and tokenizer, as transformers loads them."""
    from transformers import AutoModel, AutoTokenizer

    from as2ray.checkpoints.loading import read_config
    from as2ray.checkpoints.weight_checks import silence_transformers

    with silence_transformers():
        config = read_config(folder)
        options = {"add_pooling_layer": False} if get_family(config).has_pooler_option else {}
        network, loading_info = AutoModel.from_pretrained(
            folder, config=config, output_loading_info=True, dtype=torch.float32, **options
        )
        if missing := sorted(loading_info["missing_keys"]):
            raise CheckpointError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}")
        return network, AutoTokenizer.from_pretrained(folder)


def _read_bert(folder: Path) -> tuple[InferenceBert, TokenizerFile] | None:
    """Returns network and tokenizer without transformers; None if they are of another kind."""
    paths = [folder / name for name in ("model.safetensors", "tokenizer.json")]
    if not all(path.is_file() for path in paths):
        return None
    network = InferenceBert.from_weights(_read_json(folder / "config.json"), load_file(paths[0]))
    max_length = _read_json(folder / "tokenizer_config.json").get("model_max_length")
    if network is None or max_length is None:
        return None
    return network, TokenizerFile(Tokenizer.from_file(str(paths[1])), max_length)


def _build_encoder(
    name: str, folder: Path, modules: dict[str, Path], network: Any, tokenizer: Any
) -> SentenceEncoder:
    transformer = modules["Transformer"]
    lengths = [_read_text_length(name, transformer), tokenizer.model_max_length]
    max_length = min(max_sequence_length(network.config), *filter(None, lengths))
    prompts = _read_prompts(name, _read_json(folder / "config_sentence_transformers.json"))
    pooling = _read_pooling(name, modules["Pooling"], any(prompts[key] for key in PROMPTS))
    settings = EmbeddingSettings(
        int(max_length), pooling=pooling, normalize="Normalize" in modules, **prompts
    )
    projection = _read_projection(name, modules["Dense"]) if "Dense" in modules else None
    return SentenceEncoder(name, network, tokenizer, settings, projection)


def _read_text_length(name: str, folder: Path) -> int | None:
    """Returns the maximal length that the module Transformer sets, if it sets one."""
    paths = [*folder.glob("sentence_bert_config.json"), *folder.glob("sentence_*_config.json")]
    settings = _read_json(paths[0]) if paths else {}
    for key in ("query_length", "document_length"):
        if settings.get(key) is not None:
            raise _unsupported_error(name, "Transformer", key, settings[key])
    if settings.get("do_lower_case") and not _is_lower_casing(folder):
        raise _unsupported_error(name, "Transformer", "do_lower_case", True)
    max_length: int | None = settings.get("max_seq_length")
    return max_length


def _is_lower_casing(folder: Path) -> bool:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"


def _read_pooling(name: str, folder: Path, has_prompts: bool) -> Any:
    settings = _read_json(folder / "config.json")
    prefix = "pooling_mode_"
    modes = settings.get("pooling_mode") or [
        key.removeprefix(prefix).removesuffix("_token").removesuffix("_tokens")
        for key, is_used in settings.items()
        if key.startswith(prefix) and is_used
    ]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise _unsupported_error(name, "Pooling", "pooling_mode", modes)
    if has_prompts and not settings.get("include_prompt", True):
        raise _unsupported_error(name, "Pooling", "include_prompt", False)
    return POOLING_MODES[modes[0]]


def _read_prompts(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise _unsupported_error(name, "the checkpoint", "similarity_fn_name", similarity)
    prompts = {key: prompt for key, prompt in (settings.get("prompts") or {}).items() if prompt}
    default_name = settings.get("default_prompt_name")
    documents = (prompts.get(key) for key in ("document", "passage", "corpus"))
    return {
        "similarity": similarity,
        "query_prompt": prompts.get("query", ""),
        "document_prompt": next(filter(None, documents), ""),
        "default_prompt": prompts.get(default_name, "") if default_name else "",
    }


def _read_projection(name: str, folder: Path) -> nn.Sequential:
    settings = _read_json(folder / "config.json")
    activation = settings.get("activation_function", "Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise _unsupported_error(name, "Dense", "activation_function", activation)
    if settings.get("use_residual"):
        raise _unsupported_error(name, "Dense", "use_residual", True)
    linear = nn.Linear(settings["in_features"], settings["out_features"], settings["bias"])
    weights = load_file(folder / "model.safetensors")
    linear.load_state_dict({key.removeprefix("linear."): w for key, w in weights.items()})
    return nn.Sequential(linear, ACTIVATIONS[activation]())


def _unsupported_error(name: str, module: str, key: str, value: object) -> CheckpointError:
    return CheckpointError(f"{name}: as2ray does not support {key}={value!r} of {module}")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
