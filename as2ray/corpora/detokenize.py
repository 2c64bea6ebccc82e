"""Turns Penn Treebank tokens back into plain text, on which tokenizers were trained."""

from typing import Final

OPENING: Final = {"``": '"', "`": "'", "-LRB-": "(", "-LSB-": "[", "-LCB-": "{", "$": "$"}
"""Tokens without a space after them, and how they are written."""

CLOSING: Final = {"''": '"', "'": "'", "-RRB-": ")", "-RSB-": "]", "-RCB-": "}"} | {
    mark: mark
    for mark in [
        *[".", ",", ";", ":", "?", "!", "%"],
        *["n't", "'s", "'re", "'ve", "'m", "'d", "'ll", "N'T", "'S", "'RE", "'VE", "'M", "'LL"],
    ]
}
"""Tokens without a space before them, and how they are written."""

SPLIT_WORDS: Final = {("can", "not"), ("gon", "na"), ("wan", "na"), ("got", "ta")}
"""Words that the Penn Treebank splits in two."""

PUNCTUATION: Final = {".", ",", ";", ":", "?", "!", "'"}
"""Tokens after which a closing quotation mark may follow."""


def detokenize(text: str) -> str:
    """Joins space-separated tokens to plain text.

    `` `` Do n't -LRB- ever -RRB- , '' he said . `` becomes `"Don't (ever)," he said.`. Plain text
    stays as it is, but for runs of white space, which become one blank.
    """
    parts: list[str] = []
    previous = ""
    for token in _mark_opening_quotes(text.split()):
        needs_space = not (
            token in CLOSING or previous in OPENING or (previous.lower(), token) in SPLIT_WORDS
        )
        written = OPENING.get(token) or CLOSING.get(token) or token.replace("\\/", "/")
        parts.append(f" {written}" if needs_space and parts else written)
        previous = token
    return "".join(parts)


def _mark_opening_quotes(tokens: list[str]) -> list[str]:
    # Some newswire has '' at both ends of a quotation. Such a mark opens a quotation if none is
    # open, no punctuation precedes it and it is not the last token.
    is_quoting = False
    for i, token in enumerate(tokens[:-1]):
        if token == "''" and not is_quoting and (i == 0 or tokens[i - 1] not in PUNCTUATION):
            tokens[i] = "``"
        is_quoting = tokens[i] == "``" or (is_quoting and token != "''")
    return tokens
