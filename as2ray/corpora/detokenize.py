"""Penn Treebank tokens back to plain text, for tokenizers that were trained on plain text.

Knows strings. Must not know any corpus.
"""

from typing import Final

OPENING: Final = {"``": '"', "`": "'", "-LRB-": "(", "-LSB-": "[", "-LCB-": "{", "$": "$"}
"""Tokens that stand against the next one, and how they are written."""

CLOSING: Final = {"''": '"', "'": "'", "-RRB-": ")", "-RSB-": "]", "-RCB-": "}"} | {
    mark: mark
    for mark in [
        *[".", ",", ";", ":", "?", "!", "%"],
        *["n't", "'s", "'re", "'ve", "'m", "'d", "'ll", "N'T", "'S", "'RE", "'VE", "'M", "'LL"],
    ]
}
"""Tokens that stand against the one before, and how they are written."""

SPLIT_WORDS: Final = {("can", "not"), ("gon", "na"), ("wan", "na"), ("got", "ta")}
"""Words that the Penn Treebank cuts in two."""


PUNCTUATION: Final = {".", ",", ";", ":", "?", "!", "'"}


def detokenize(text: str) -> str:
    """Plain text from tokens between spaces.

    `` `` Do n't -LRB- ever -RRB- , '' he said . `` becomes `"Don't (ever)," he said.`; text that
    never was tokenised comes back with its blanks collapsed.
    """
    out: list[str] = []
    previous = ""
    for token in _mark_opening_quotes(text.split()):
        glued = token in CLOSING or previous in OPENING or (previous.lower(), token) in SPLIT_WORDS
        written = OPENING.get(token) or CLOSING.get(token) or token.replace("\\/", "/")
        out.append(written if glued or not out else f" {written}")
        previous = token
    return "".join(out)


def _mark_opening_quotes(tokens: list[str]) -> list[str]:
    # Some newswire has '' at both ends of a quotation: one that nothing opened, and that no
    # punctuation precedes, opens one itself, unless it is the last token.
    inside = False
    for i, token in enumerate(tokens[:-1]):
        if token == "''" and not inside and (i == 0 or tokens[i - 1] not in PUNCTUATION):
            tokens[i] = "``"
        inside = tokens[i] == "``" or (inside and token != "''")
    return tokens
