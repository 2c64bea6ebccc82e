"""Parses the public pseudo-XML of TREC-QA (jacana): tags on separate lines, tab-joined tokens.

It is not XML: `&` and `<num>` are not escaped.
"""

import re
from collections.abc import Iterable, Iterator

from as2ray.errors import CorpusError

LABEL_VALUES = {"positive": 1, "negative": 0}
_PAIRS = re.compile(r"<QApairs id=['\"]([^'\"]+)['\"]>")
_TAG = re.compile(r"<(/?)(question|positive|negative)>")


def parse_blocks(
    lines: Iterable[str], source: str
) -> Iterator[tuple[str, str, list[tuple[str, int]]]]:
    """Yields question id, question, and (sentence, label) pairs of every `<QApairs>` block.

    The first line of an inner block holds its tokens, which are joined by one space. The lines
    below (part of speech, dependencies and others) are ignored.

    Args:
        lines: Lines of a file.
        source: The file, for error texts.

    Raises:
        CorpusError: A block is not closed, has no question, or begins inside another.
    """
    id = question = open_tag = None
    candidates: list[tuple[str, int]] = []
    expects_tokens = False
    location = source

    def check(is_valid: bool, problem: str) -> None:
        if not is_valid:
            fix = "download the file again; it is truncated or was changed"
            raise CorpusError(f"{location}: {problem}", fix)

    for number, raw_line in enumerate(lines, 1):
        line, location = raw_line.rstrip("\r\n"), f"{source}, line {number:,}"
        if block_start := _PAIRS.fullmatch(line):
            check(id is None, "a <QApairs> inside another")
            id, question, candidates = block_start[1], None, []
        elif line == "</QApairs>":
            check(id is not None and open_tag is None, "a stray </QApairs>")
            check(question is not None, "a block without a question")
            yield str(id), str(question), candidates
            id = None
        elif tag := _TAG.fullmatch(line):
            is_closing, name = tag.groups()
            expected = name if is_closing else None
            check(id is not None and open_tag == expected, f"a stray {line}")
            open_tag, expects_tokens = (None, False) if is_closing else (name, True)
        elif expects_tokens:
            text, expects_tokens = " ".join(line.split("\t")), False
            if open_tag == "question":
                question = text
            else:
                candidates.append((text, LABEL_VALUES[str(open_tag)]))
    check(id is None, "an end of file inside a block")
