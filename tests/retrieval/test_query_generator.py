import pytest
import tiny
import torch
import transformers

from as2ray.errors import CheckpointError
from as2ray.retrieval.query_generator import QuestionGenerator


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """A random T5 that says something about everything."""
    folder = tmp_path_factory.mktemp("t5")
    tokenizer = tiny.published_tokenizer("bert")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        decoder_start_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():  # as it is born it repeats its first token, which is no word
        for weights in model.parameters():
            weights.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_generator_asks_a_question_for_each_sentence_alone_or_together(generator):
    asks = QuestionGenerator(str(generator), max_question_tokens=6)
    sentences = ["Kovarin ba.", "What is zelimut? Badesso is long and kind."]
    together = asks(sentences)
    assert len(together) == 2
    assert together == [asks([sentence])[0] for sentence in sentences]
    assert any(together)
    asks.model.generation_config.num_beams = 4  # as a model's own settings may say
    assert asks(sentences) == together


def test_folder_without_such_a_model_is_refused(tmp_path, checkpoint):
    for path in (tmp_path, checkpoint("bert", 2)):
        with pytest.raises(CheckpointError, match="sequence-to-sequence"):
            QuestionGenerator(str(path))
