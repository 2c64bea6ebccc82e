"""Answers as spans of a sentence's tokens, and back to its characters.

Knows the pair tokenizer. Must not know models or files.
"""

import re

from as2ray.text.tokenization import PairTokenizer

NO_SPAN = (-1, -1)
"""Of an answer that does not stand in the sentence, such as "yes"."""


def find_answer_span(tokenizer: PairTokenizer, sentence: str, answer: str) -> tuple[int, int]:
    """The first and the last token of an answer in a sentence, or `NOWHERE`.

    Args:
        tokenizer: How the sentence becomes tokens.
        sentence: The text.
        answer: Stands in it as whole words, in either case; its first place counts.
    """
    found = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence, re.IGNORECASE)
    if not answer or found is None:
        return NO_SPAN
    begin, end = found.span()
    tokens = [
        n for n, (a, b) in enumerate(tokenizer.char_offsets(sentence)) if a < end and b > begin
    ]
    return (tokens[0], tokens[-1]) if tokens else NO_SPAN


def span_text(tokenizer: PairTokenizer, sentence: str, first: int, last: int) -> str:
    """The characters of a sentence from one token to another.

    Args:
        tokenizer: How the sentence becomes tokens.
        sentence: The text.
        first: Number of the first token.
        last: Number of the last.
    """
    offsets = tokenizer.char_offsets(sentence)
    return sentence[offsets[first][0] : offsets[last][1]].strip()
