"""The parts of a prompt have the tokens of the whole, and truncation keeps its end."""

import numpy as np
import pytest

from as2ray.errors import ConfigError
from as2ray.text.packing import concatenate_sequences
from as2ray.text.prompts import _last_boundary
from as2ray.text.tokenization import PairTokenizer

QUESTIONS = ["What is kovarin?", "muri", "Is it?\n", "x ", "漢字 é", "(a) 'tis:", "12 3"]
CANDIDATES = ["Badesso lala.", "kovarin", " muri?", "'s", "漢字", "1st.", "\ttab", "<Document>: no"]
WHOLE = ("<|im_start|>{instruction}\n<Query>: {question}\n<Document>: {candidate}<|im_end|>yes\n",)
SEGMENTS = ("<bos>", "A: {question}", "\n", "B: {candidate}", "\n", "Answer?\n")


def reference(tokenizer, prompt, question, candidate, instruction="Find it.") -> list[int]:
    """Token ids of the whole prompt, segment by segment."""
    texts = (
        segment.replace("{instruction}", instruction)
        .replace("{question}", question)
        .replace("{candidate}", candidate)
        for segment in prompt
    )
    return [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def build(tokenizer, prompt, **settings) -> PairTokenizer:
    settings = {"max_length": 500, "max_question_length": 60, **settings}
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    return PairTokenizer(tokenizer_json, prompt=prompt, instruction="Find it.", **settings)


def split(sequences) -> list[list[int]]:
    ends = np.cumsum(sequences.lengths)[:-1]
    return [part.tolist() for part in np.split(sequences.token_ids, ends)]


@pytest.mark.parametrize("prompt", [WHOLE, SEGMENTS], ids=["whole", "segments"])
def test_pairs_have_the_tokens_of_the_whole_prompt(published, prompt):
    tokenizer = published("qwen3")
    pairs = [(q, c) for q in QUESTIONS for c in CANDIDATES]
    divided = split(build(tokenizer, prompt).encode(*map(list, zip(*pairs))))
    assert divided == [reference(tokenizer, prompt, *pair) for pair in pairs]


def test_text_before_the_candidate_may_share_a_token_with_it(published):
    tokenizer, prompt = published("qwen3"), ("A: {question}", "B{candidate}")
    pairs = build(tokenizer, prompt).encode(["muri?"], ["lala"])
    assert split(pairs) == [reference(tokenizer, prompt, "muri?", "lala")]


def test_prompt_has_no_special_tokens_that_the_tokenizer_puts_around_texts(published):
    tokenizer = published("roberta")
    pairs = build(tokenizer, SEGMENTS).encode(["muri?"], ["lala"])
    assert split(pairs) == [reference(tokenizer, SEGMENTS, "muri?", "lala")]
    assert tokenizer.cls_token_id not in pairs.token_ids


def test_tokens_of_texts_alone_are_not_those_of_the_prompt(published):
    tokenizer = published("qwen3")
    pieces = WHOLE[0].replace("{instruction}", "Find it.").split("{question}")
    pieces = [pieces[0], QUESTIONS[0], *pieces[1].split("{candidate}")]
    pieces.insert(3, CANDIDATES[1])
    ids = [i for piece in pieces for i in tokenizer(piece)["input_ids"]]
    assert ids != reference(tokenizer, WHOLE, QUESTIONS[0], CANDIDATES[1])


def test_question_of_as_many_tokens_as_fit_is_whole(published):
    tokenizer, question = published("qwen3"), " ".join(["muri lala badesso"] * 40)
    length = len(tokenizer(question, add_special_tokens=False)["input_ids"])
    assert length > 100
    pairs = build(tokenizer, SEGMENTS, max_question_length=length).encode([question], ["lala"])
    assert split(pairs) == [reference(tokenizer, SEGMENTS, question, "lala")]


@pytest.mark.parametrize("prompt", [WHOLE, SEGMENTS], ids=["whole", "segments"])
def test_truncation_keeps_the_prompt_around_both_texts(published, prompt):
    tokenizer, long = published("qwen3"), "kovarin is muri. " * 40
    pairs = build(tokenizer, prompt, max_length=100, max_question_length=8)
    [ids] = split(pairs.encode([long], [long]))
    whole = reference(tokenizer, prompt, long, long)
    suffix = reference(tokenizer, prompt[-1:], "", "").copy()
    suffix = suffix[-(len(suffix) if len(prompt) > 1 else 3) :]
    assert len(ids) == 100
    assert ids[-len(suffix) :] == suffix
    assert ids[0] == whole[0]
    text = tokenizer.decode(ids)
    assert text.count("kovarin is muri. kovarin") < 8
    assert ("\n<Document>: kovarin" if prompt is WHOLE else "\nB: kovarin") in text
    assert (
        split(pairs.encode(["muri"], [long]))[0][: len(ids) // 4]
        == reference(tokenizer, prompt, "muri", long)[: len(ids) // 4]
    )


def test_long_question_keeps_exactly_its_first_tokens(published):
    tokenizer = published("qwen3")
    pairs = build(tokenizer, list(SEGMENTS), max_question_length=3)
    assert pairs == build(tokenizer, SEGMENTS, max_question_length=3)  # JSON has lists
    ids = tokenizer("muri lala badesso kovarin", add_special_tokens=False)["input_ids"]
    [cut] = split(pairs.encode(["muri lala badesso kovarin"], ["tu"]))
    assert cut == reference(tokenizer, SEGMENTS, tokenizer.decode(ids[:3]), "tu")


def test_prompt_is_divided_at_the_last_place_where_tokens_end():
    at_bars = lambda left, right: left.endswith("|")  # noqa: E731
    for joint, place in (("a|b|c", 4), ("a|b|", 4), ("a|bcd", 2)):
        assert _last_boundary("", joint, "", at_bars) == place


def test_prefix_of_a_question_is_what_its_pairs_share(published):
    pairs = build(published("qwen3"), WHOLE)
    sequences = pairs.encode(["muri?", "lala", "muri?"], ["Badesso.", "Badesso.", "Kovarin."])
    assert sequences.prefixes.index[0] == sequences.prefixes.index[2] != sequences.prefixes.index[1]
    heads, rest = sequences.split_prefixes()
    joined = [
        split(heads)[prefix] + tail for prefix, tail in zip(sequences.prefixes.index, split(rest))
    ]
    assert joined == split(sequences)
    assert split(sequences.take(np.array([2, 0]))) == [joined[2], joined[0]]
    two = concatenate_sequences([sequences, sequences])
    heads, rest = two.split_prefixes()
    assert len(heads) == 4
    assert split(rest) == 2 * split(sequences.split_prefixes()[1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (("{question} and no document",), "must contain {question} and, after it, {candidate}"),
        (("{candidate}\n{question}",), "must contain {question} and, after it"),
        (("{question}{question}", "{candidate}"), "must contain"),
        (("{question}\n{candidate}\nAnswer:",), "depend on the text after it"),
    ],
)
def test_prompt_without_a_place_for_a_text_is_refused(published, prompt, message):
    with pytest.raises(ConfigError, match=message):
        build(published("qwen3"), prompt)


def test_prompt_that_leaves_no_tokens_for_the_candidate_is_refused_with_its_length(published):
    with pytest.raises(ConfigError, match=r"max_length=20 has no place.*prompt alone takes \d\d"):
        build(published("qwen3"), WHOLE, max_length=20, max_question_length=4)


def test_prompt_leaves_a_token_for_each_text_at_least(published):
    tokenizer = published("qwen3")
    num_special = build(tokenizer, WHOLE).num_special_tokens
    shortest = build(tokenizer, WHOLE, max_length=num_special + 2, max_question_length=1)
    assert shortest.encode(["muri lala"], ["lala muri"]).lengths.tolist() == [num_special + 2]
    with pytest.raises(ConfigError, match="has no place for a question and a candidate"):
        build(tokenizer, WHOLE, max_length=num_special + 1, max_question_length=1)
