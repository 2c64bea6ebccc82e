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
    # As a model's own settings may say.
    for name, value in {"num_beams": 4, "do_sample": True, "temperature": 100.0}.items():
        setattr(asks.model.generation_config, name, value)
    assert asks(sentences) == together


def test_folder_without_such_a_model_is_refused(tmp_path, checkpoint):
    for path in (tmp_path, checkpoint("bert", 2)):
        with pytest.raises(CheckpointError, match="sequence-to-sequence"):
            QuestionGenerator(str(path))
