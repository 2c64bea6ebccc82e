import pytest
import tiny

from as2ray.text.answer_spans import NO_SPAN, find_answer_span, span_text
from as2ray.text.tokenization import PairTokenizer

SENTENCE = "Kovarin, badesso (lala) 1986, Kovarin."


@pytest.fixture(params=tiny.FAMILIES)
def tokenizer(request, published) -> PairTokenizer:
    return PairTokenizer(published(request.param).backend_tokenizer.to_str(), 60, 24)


@pytest.mark.parametrize("answer", ["badesso", "lala", "1986", "badesso (lala) 1986", "kovarin"])
def test_answer_is_found_by_its_tokens_and_cut_out_again(tokenizer, answer):
    first, last = find_answer_span(tokenizer, SENTENCE, answer)
    assert span_text(tokenizer, SENTENCE, first, last).lower().strip("(") == answer
    assert 0 <= first <= last


def test_answer_lacks_the_tokens_that_touch_it(published):
    tokenizer = PairTokenizer(published("bert").backend_tokenizer.to_str(), 60, 24)
    place = find_answer_span(tokenizer, "Badesso (lala) ne.", "lala")
    assert span_text(tokenizer, "Badesso (lala) ne.", *place) == "lala"


def test_first_place_of_the_answer_counts(tokenizer):
    assert find_answer_span(tokenizer, SENTENCE, "Kovarin")[0] == 0


@pytest.mark.parametrize("answer", ["", "yes", "adess", "198"])
def test_what_is_no_whole_word_of_the_sentence_is_nowhere(tokenizer, answer):
    assert find_answer_span(tokenizer, SENTENCE, answer) == NO_SPAN
