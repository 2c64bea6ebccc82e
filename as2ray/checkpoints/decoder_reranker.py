"""Reads decoders as rankers: their prompt, and their score as one row of the vocabulary's product.

A generating reranker answers a prompt with "yes" or "no", and its score is the difference of both
logits at the last token: (W[yes] - W[no]) h. That row is the head of transformers'
`...ForSequenceClassification` with one label, which a saved ranker therefore is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open

from as2ray.checkpoints.cross_encoder_files import CheckpointFiles
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.encoder.families import token_pooling
from as2ray.models.ranker import Activation
from as2ray.text.prompts import (
    CANDIDATE_FIELD,
    INSTRUCTION_FIELD,
    QUESTION_FIELD,
    divide_prompt,
    ends_tokens,
)

SCORE_MODULES = ["Transformer", "LogitScore"]
"""What `modules.json` of sentence-transformers lists for a decoder that answers."""


@dataclass(frozen=True)
class DecoderPrompt:
    """What a published decoder is asked, and by which tokens it answers."""

    segments: tuple[str, ...]
    """See `PairTokenizer.prompt`."""
    instruction: str
    """What it is told to do if the user says nothing else."""
    answers: tuple[str, ...]
    """The token of a good candidate, and that of a bad one, if it counts."""
    activation: Activation
    """What its own code gives as a score."""
    instruction_format: str = "{}"
    """How an instruction of the user becomes `instruction`."""


DECODER_PROMPTS: dict[str, DecoderPrompt] = {
    "qwen3": DecoderPrompt(  # Qwen3-Reranker
        (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n",
            "<Instruct>: {instruction}\n<Query>: {question}\n<Document>: {candidate}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        "Given a web search query, retrieve relevant passages that answer the query",
        ("yes", "no"),
        "sigmoid",
    ),
    "qwen2": DecoderPrompt(  # mxbai-rerank v2
        (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n<|im_start|>user\n",
            "{instruction}query: {question}",
            "\n",
            "document: {candidate}",
            "\n",
            "You are a search relevance expert who evaluates how well documents match search "
            "queries. For each query-document pair, carefully analyze the semantic relationship "
            "between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
            "relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        "",
        ("1", "0"),
        "identity",
        "instruction: {}\n",
    ),
    "gemma": DecoderPrompt(  # bge-reranker-v2-gemma
        (
            "<bos>",
            "A: {question}",
            "\n",
            "B: {candidate}",
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to "
            "the query by providing a prediction of either 'Yes' or 'No'.",
        ),
        "",
        ("Yes",),
        "identity",
    ),
}
"""Prompts of published rerankers, by `config.model_type`."""


def is_decoder(config: Any) -> bool:
    """Returns whether a model is a decoder, whose score is read at the last token."""
    return token_pooling(config) == "last"


def is_generating(config: Any) -> bool:
    """Returns whether a checkpoint is a decoder that answers with a token."""
    names = config.architectures or []
    return is_decoder(config) and any(name.endswith("ForCausalLM") for name in names)


def default_activation(files: CheckpointFiles, config: Any) -> Activation:
    """Returns what the score of a checkpoint is that does not say it."""
    known = DECODER_PROMPTS.get(config.model_type)
    is_own = known is not None and is_generating(config) and not files.read_json("modules.json")
    return known.activation if known is not None and is_own else "sigmoid"


def load_score(files: CheckpointFiles, network: Any, hf_tokenizer: Any) -> None:
    """Copies the rows of the answers from the product with the vocabulary into the head.

    Raises:
        CheckpointError: The answers are not known, or no tokens, or the product is missing.
    """
    rows = read_answer_ids(files, network.config, hf_tokenizer)
    if network.config.tie_word_embeddings:
        weights = network.base_model.embed_tokens.weight.detach()[rows]
    else:
        weights = _read_rows(files, "lm_head.weight", rows)
    score = weights[0] if len(rows) == 1 else weights[0] - weights[1]
    with torch.no_grad():
        network.score.weight.copy_(score[None])


def read_answer_ids(files: CheckpointFiles, config: Any, hf_tokenizer: Any) -> list[int]:
    """Returns the ids of the token of a good candidate, and of that of a bad one if it counts.

    Raises:
        CheckpointError: They are not known, or no tokens.
    """
    entries = files.read_json("modules.json") or []
    names = [entry["type"].rpartition(".")[2] for entry in entries]
    if names:
        if names != SCORE_MODULES:
            raise CheckpointError(
                f"{files.name}: modules.json lists {', '.join(names)} on model_type="
                f"{config.model_type!r}; of such decoders as2ray runs {', '.join(SCORE_MODULES)}"
            )
        path = f"{entries[1]['path']}/config.json"
        files.require(path)
        settings = files.read_json(path)
        ids = [settings["true_token_id"], settings.get("false_token_id")]
        return [token_id for token_id in ids if token_id is not None]
    known = DECODER_PROMPTS.get(config.model_type)
    if known is None:
        raise CheckpointError(
            f"{files.name}: architectures={config.architectures} answers with a token, but neither "
            "modules.json nor as2ray says with which",
            fix="convert it to a ...ForSequenceClassification with one label",
        )
    vocabulary = hf_tokenizer.get_vocab()
    missing = [answer for answer in known.answers if answer not in vocabulary]
    if missing:
        raise CheckpointError(f"{files.name}: tokenizer.json has no token {', '.join(missing)}")
    return [vocabulary[answer] for answer in known.answers]


def _read_rows(files: CheckpointFiles, name: str, rows: list[int]) -> torch.Tensor:
    index = files.read_json("model.safetensors.index.json")
    file = index["weight_map"].get(name, "") if index else "model.safetensors"
    path = files.find(file) if file else None
    if path is not None:
        with safe_open(path, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - it is no dict
                weights = tensors.get_slice(name)
                return torch.cat([weights[row : row + 1] for row in rows]).float()
    raise CheckpointError(f"{files.name} has no {name} in a safetensors file")


def resolve_prompt(
    files: CheckpointFiles,
    config: Any,
    hf_tokenizer: Any,
    settings: Mapping[str, Any],
    instruction: str | None,
) -> dict[str, Any]:
    """Returns settings with the fields `prompt` and `instruction` of a `PairTokenizer`.

    The prompt is the one that as2ray has stored, or a chat template with the roles of
    sentence-transformers, or that of the family's published rerankers. Without one, a pair is
    tokenized as transformers does; encoders never have one.

    Args:
        files: The checkpoint.
        config: Its configuration.
        hf_tokenizer: Its tokenizer.
        settings: Its entry `as2ray`.
        instruction: What the user asks for; by default as stored or published.

    Raises:
        ConfigError: There is an instruction, and no place for it.
    """
    known = DECODER_PROMPTS.get(config.model_type) if is_decoder(config) else None
    prompt = tuple(settings.get("prompt", ()))
    text = settings.get("instruction", "")
    if not prompt and is_decoder(config):
        prompt, text = _published_prompt(files, known, hf_tokenizer)
    if instruction is not None:
        if not any(INSTRUCTION_FIELD in segment for segment in prompt):
            raise ConfigError(
                f"instruction={instruction!r}, but the prompt of {files.name}, {list(prompt)}, has "
                f"no field {INSTRUCTION_FIELD}"
            )
        is_known = known is not None and prompt == known.segments
        text = known.instruction_format.format(instruction) if known and is_known else instruction
    return {**settings, "prompt": prompt, "instruction": text}


def _published_prompt(
    files: CheckpointFiles, known: DecoderPrompt | None, hf_tokenizer: Any
) -> tuple[tuple[str, ...], str]:
    """Returns the prompt of a decoder that as2ray has not saved, and its instruction."""
    template, default = _render_template(files, hf_tokenizer)
    if template is not None and _can_divide(template, hf_tokenizer.backend_tokenizer):
        return (template,), default
    return ((), "") if known is None else (known.segments, known.instruction)


def _render_template(files: CheckpointFiles, hf_tokenizer: Any) -> tuple[str | None, str]:
    """Returns a chat template with fields in place of both texts, and the default instruction."""
    if not hf_tokenizer.chat_template:
        return None, ""
    settings = files.read_json("config_sentence_transformers.json")
    default = (settings.get("prompts") or {}).get(settings.get("default_prompt_name"), "")
    fields = {"query": QUESTION_FIELD, "document": CANDIDATE_FIELD}
    if default:
        fields = {"system": INSTRUCTION_FIELD, **fields}
    messages = [{"role": role, "content": field} for role, field in fields.items()]
    try:
        rendered: str = hf_tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # the template refuses these roles, each in its own way
        return None, ""
    is_complete = all(field in rendered for field in (QUESTION_FIELD, CANDIDATE_FIELD))
    return (rendered if is_complete else None), default


def _can_divide(template: str, tokenizer: Any) -> bool:
    try:
        divide_prompt((template,), "", partial(ends_tokens, tokenizer))
    except ConfigError:
        return False
    return True
