"""Answers as spans of a sentence's tokens, and back to its characters."""

import re

from as2ray.text.tokenization import PairTokenizer

NO_SPAN = (-1, -1)
"""Span of an answer that does not occur in the sentence, such as "yes"."""


def find_answer_span(tokenizer: PairTokenizer, sentence: str, answer: str) -> tuple[int, int]:
    """Returns the indices of the first and the last token of an answer in a sentence.

    Args:
        tokenizer: Splits the sentence into tokens.
        sentence: The text to search.
        answer: Must occur in it as whole words, in upper or lower case. Its first occurrence
            counts.

    Returns:
        First and last token, or `NO_SPAN` if the answer does not occur.
    """
    match = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence, re.IGNORECASE)
    if not answer or match is None:
        return NO_SPAN
    begin, end = match.span()
    offsets = enumerate(tokenizer.char_offsets(sentence))
    tokens = [index for index, (first, stop) in offsets if first < end and stop > begin]
    return (tokens[0], tokens[-1]) if tokens else NO_SPAN


def span_text(tokenizer: PairTokenizer, sentence: str, first: int, last: int) -> str:
    """Returns the characters of a sentence from one token to another.

    Args:
        tokenizer: Splits the sentence into tokens.
        sentence: The text.
        first: Index of the first token.
        last: Index of the last token.
    """
    offsets = tokenizer.char_offsets(sentence)
    return sentence[offsets[first][0] : offsets[last][1]].strip()
