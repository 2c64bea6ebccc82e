"""What the files of a decoder say of its answers and its prompt, without its network."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, LlamaConfig, Qwen2Config, Qwen3Config

from as2ray.checkpoints.cross_encoder_files import CheckpointFiles
from as2ray.checkpoints.decoder_reranker import (
    DECODER_PROMPTS,
    _read_rows,
    default_activation,
    is_decoder,
    is_generating,
    read_answer_ids,
    resolve_prompt,
)
from as2ray.errors import CheckpointError, ConfigError

MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.LogitScore", "path": "1_LogitScore"},
]


@pytest.fixture
def files(tmp_path) -> CheckpointFiles:
    return CheckpointFiles(str(tmp_path), {})


def write(folder, name, content) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_rows_are_read_from_the_file_that_has_them(files, tmp_path):
    weights = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    with pytest.raises(CheckpointError, match=r"has no lm_head\.weight in a safetensors file"):
        _read_rows(files, "lm_head.weight", [2, 0])
    save_file({"lm_head.weight": weights}, tmp_path / "model.safetensors")
    rows = _read_rows(files, "lm_head.weight", [2, 0])
    assert (rows.dtype, rows.tolist()) == (torch.float32, [[6, 7, 8], [0, 1, 2]])
    with pytest.raises(CheckpointError, match=r"has no other\.weight"):
        _read_rows(files, "other.weight", [0])
    save_file({"lm_head.weight": weights + 1}, tmp_path / "part-2.safetensors")
    index = {"weight_map": {"lm_head.weight": "part-2.safetensors"}}
    write(tmp_path, "model.safetensors.index.json", index)
    assert _read_rows(files, "lm_head.weight", [0]).tolist() == [[1, 2, 3]]
    save_file({"other.weight": weights}, tmp_path / "model.safetensors")  # not in the index
    with pytest.raises(CheckpointError, match=r"has no other\.weight"):
        _read_rows(files, "other.weight", [0])


def test_answers_are_those_of_the_modules_or_of_the_published_family(files, tmp_path, published):
    tokenizer = published("qwen3")
    vocabulary = tokenizer.get_vocab()
    own = [vocabulary["yes"], vocabulary["no"]]
    assert read_answer_ids(files, Qwen3Config(), tokenizer) == own
    write(tmp_path, "modules.json", MODULES)
    with pytest.raises(CheckpointError, match="names 1_LogitScore/config"):
        read_answer_ids(files, Qwen3Config(), tokenizer)
    for settings, ids in (
        ({"true_token_id": 7, "false_token_id": 0}, [7, 0]),
        ({"true_token_id": 0, "false_token_id": None}, [0]),
        ({"true_token_id": 7}, [7]),
    ):
        write(tmp_path, "1_LogitScore/config.json", settings)
        assert read_answer_ids(files, Qwen3Config(), tokenizer) == ids
    write(tmp_path, "modules.json", [MODULES[0], {"type": "a.Dense", "path": "1"}])
    with pytest.raises(CheckpointError, match="lists Transformer, Dense on model_type='qwen3'"):
        read_answer_ids(files, Qwen3Config(), tokenizer)


def test_decoder_that_answers_is_one_whose_architecture_generates(files, tmp_path):
    generating = Qwen2Config(architectures=["Qwen2ForCausalLM"])
    classifier = Qwen2Config(architectures=["Qwen2ForSequenceClassification"])
    assert [is_generating(config) for config in (generating, classifier)] == [True, False]
    assert is_decoder(classifier)
    assert not is_decoder(BertConfig())
    assert not is_generating(BertConfig(architectures=["BertForCausalLM"]))
    assert not is_generating(Qwen2Config())
    # What its own code gives as a score.
    assert default_activation(files, generating) == "identity"
    assert default_activation(files, Qwen3Config(architectures=["Qwen3ForCausalLM"])) == "sigmoid"
    assert default_activation(files, classifier) == "sigmoid"
    assert default_activation(files, LlamaConfig(architectures=["LlamaForCausalLM"])) == "sigmoid"
    write(tmp_path, "modules.json", MODULES)
    assert default_activation(files, generating) == "sigmoid"


def resolve(files, tokenizer, config=None, settings=None, instruction=None):
    prompt_settings = resolve_prompt(
        files, config or Qwen3Config(), tokenizer, settings or {}, instruction
    )
    return prompt_settings["prompt"], prompt_settings["instruction"]


def test_prompt_is_the_stored_one_or_that_of_the_family(files, published):
    tokenizer, known = published("qwen3"), DECODER_PROMPTS["qwen3"]
    assert resolve(files, tokenizer) == (known.segments, known.instruction)
    stored = {"prompt": ["{question} {candidate}"], "instruction": "Look.", "max_length": 9}
    assert resolve(files, tokenizer, settings=stored) == (("{question} {candidate}",), "Look.")
    prompt_settings = resolve_prompt(files, Qwen3Config(), tokenizer, stored, None)
    assert prompt_settings["max_length"] == 9
    assert resolve(files, tokenizer, BertConfig()) == ((), "")
    assert resolve(files, tokenizer, LlamaConfig()) == ((), "")


def test_instruction_of_the_user_has_the_format_of_the_published_prompt(files, published):
    tokenizer, known = published("qwen2"), DECODER_PROMPTS["qwen2"]
    prompt_settings = resolve(files, tokenizer, Qwen2Config(), instruction="Find it.")
    assert prompt_settings == (known.segments, "instruction: Find it.\n")
    stored = {"prompt": ["{instruction} {question} {candidate}"]}
    prompt_settings = resolve(files, tokenizer, Qwen2Config(), stored, "Find it.")
    assert prompt_settings == (("{instruction} {question} {candidate}",), "Find it.")
    with pytest.raises(ConfigError, match=r"instruction='Find it\.', but the prompt of .* has no"):
        resolve(files, tokenizer, BertConfig(), instruction="Find it.")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def chat(published):
    """A tokenizer with a chat template: `chat(template)`."""

    def make(template: str):
        tokenizer = deepcopy(published("qwen3"))
        tokenizer.chat_template = template
        return tokenizer

    return make


def test_chat_template_with_both_texts_is_the_prompt(files, tmp_path, chat):
    both = "<|im_start|>query\n{question}<|im_end|>\n<|im_start|>document\n{candidate}<|im_end|>\n"
    assert resolve(files, chat(TEMPLATE)) == ((both,), "")
    settings = {"prompts": {"web": "Search."}, "default_prompt_name": "web"}
    write(tmp_path, "config_sentence_transformers.json", settings)
    with_system = f"<|im_start|>system\n{{instruction}}<|im_end|>\n{both}"
    assert resolve(files, chat(TEMPLATE)) == ((with_system,), "Search.")
    assert resolve(files, chat(TEMPLATE), instruction="Find.") == ((with_system,), "Find.")
    write(tmp_path, "config_sentence_transformers.json", {"default_prompt_name": "web"})
    assert resolve(files, chat(TEMPLATE)) == ((both,), "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content }}<|im_end|>",  # without the document
        "<|im_start|>{{ messages[0].content }} {{ messages[1].content }} end",  # cannot be divided
    ],
)
def test_chat_template_that_does_not_fit_is_left_for_the_published_prompt(files, chat, template):
    known = DECODER_PROMPTS["qwen3"]
    assert resolve(files, chat(template)) == (known.segments, known.instruction)
