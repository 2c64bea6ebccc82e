"""The public pseudo-XML of TREC-QA (jacana): tags on lines of their own around tab-joined tokens.

Knows that one format. Must not know files or tables. It is no XML: `&` and `<num>` stand bare.
"""

import re
from collections.abc import Iterable, Iterator

from as2ray.errors import CorpusError

LABEL_VALUES = {"positive": 1, "negative": 0}
_PAIRS = re.compile(r"<QApairs id=['\"]([^'\"]+)['\"]>")
_TAG = re.compile(r"<(/?)(QApairs|question|positive|negative)>")


def parse_blocks(
    lines: Iterable[str], source: str
) -> Iterator[tuple[str, str, list[tuple[str, int]]]]:
    """Question id, question, and (sentence, label) pairs of every `<QApairs>` block.

    The first line of an inner block holds its tokens; part of speech, dependencies and the rest
    below are left out. Tokens are joined by one space.

    Raises:
        CorpusError: A block that does not end, has no question, or begins where none may.
    """
    id = question = inside = None
    candidates: list[tuple[str, int]] = []
    waiting = False
    row = 0
    for row, raw in enumerate(lines, 1):
        line = raw.rstrip("\r\n")
        if opening := _PAIRS.fullmatch(line):
            _check_structure(id is None, source, row, "a <QApairs> inside another")
            id, question, candidates = opening[1], None, []
        elif tag := _TAG.fullmatch(line):
            closing, name = tag.groups()
            if name == "QApairs":
                _check_structure(
                    id is not None and inside is None, source, row, "a stray </QApairs>"
                )
                _check_structure(question is not None, source, row, "a block without a question")
                yield str(id), str(question), candidates
                id = None
            else:
                fits = inside == name if closing else inside is None and id is not None
                _check_structure(fits, source, row, f"a stray {line}")
                inside, waiting = (None, False) if closing else (name, True)
        elif waiting:
            text, waiting = " ".join(line.split("\t")), False
            if inside == "question":
                question = text
            else:
                candidates.append((text, LABEL_VALUES[str(inside)]))
    _check_structure(id is None, source, row, "an end of file inside a block")


def _check_structure(is_valid: bool, source: str, line_number: int, problem: str) -> None:
    if not is_valid:
        raise CorpusError(
            f"{source}, line {line_number:,}: {problem}"
            "; expected <QApairs id='..'> with <question>, <positive>, <negative>, each closed",
            fix="fetch the file again; it is cut short or was changed",
        )
