import pytest

from as2ray.errors import CheckpointError
from as2ray.retrieval.query_generator import QuestionGenerator


def test_generator_asks_a_question_for_each_sentence_alone_or_together(seq2seq):
    asks = QuestionGenerator(str(seq2seq), max_question_tokens=6)
    sentences = ["Kovarin ba.", "What is zelimut? Badesso is long and kind."]
    together = asks(sentences)
    assert len(together) == 2
    assert together == [asks([sentence])[0] for sentence in sentences]
    assert any(together)
    special = asks.tokenizer.all_special_tokens
    assert not any(token in question for question in together for token in special)
    # As a model's own settings may say.
    for name, value in {"num_beams": 4, "do_sample": True, "temperature": 100.0}.items():
        setattr(asks.model.generation_config, name, value)
    assert asks(sentences) == together


def test_model_reads_prompt_and_sentence_up_to_its_length_and_decodes_greedily(
    seq2seq, monkeypatch
):
    calls = []

    def generate(input_ids, **options):
        calls.append((input_ids, options))
        return input_ids

    asks = {prompt: QuestionGenerator(str(seq2seq), prompt) for prompt in ("", "ba ")}
    asks["default"] = QuestionGenerator(str(seq2seq))
    for generator in asks.values():
        monkeypatch.setattr(generator.model, "generate", generate)
        generator.tokenizer.model_max_length = 8
        generator(["kovarin", "ba " * 20])
    (plain, options), (prompted, _), (default, _) = calls
    assert plain.shape == (2, 8)
    assert plain.tolist() == default.tolist() != prompted.tolist()
    assert options.pop("attention_mask").tolist() == (plain != 0).long().tolist()
    assert options == {"max_new_tokens": 32, "do_sample": False, "num_beams": 1}


def test_folder_without_such_a_model_is_refused(tmp_path, checkpoint):
    for path in (tmp_path, checkpoint("bert", 2)):
        with pytest.raises(CheckpointError, match="sequence-to-sequence"):
            QuestionGenerator(str(path))
