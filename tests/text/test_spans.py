import pytest
import tiny

from as2ray.text.spans import NOWHERE, locate, text_of
from as2ray.text.tokens import PairTokenizer

SENTENCE = "Kovarin, badesso (lala) 1986, Kovarin."


@pytest.fixture(params=tiny.FAMILIES)
def tokenizer(request, published) -> PairTokenizer:
    return PairTokenizer(published(request.param).backend_tokenizer.to_str(), 60, 24)


@pytest.mark.parametrize("answer", ["badesso", "lala", "1986", "badesso (lala) 1986", "kovarin"])
def test_answer_is_found_by_its_tokens_and_cut_out_again(tokenizer, answer):
    first, last = locate(tokenizer, SENTENCE, answer)
    assert text_of(tokenizer, SENTENCE, first, last).lower().strip("(") == answer
    assert 0 <= first <= last


def test_first_place_of_the_answer_counts(tokenizer):
    assert locate(tokenizer, SENTENCE, "Kovarin")[0] == 0


@pytest.mark.parametrize("answer", ["", "yes", "adess", "198"])
def test_what_is_no_whole_word_of_the_sentence_is_nowhere(tokenizer, answer):
    assert locate(tokenizer, SENTENCE, answer) == NOWHERE
