"""Sentence splitting by named, versioned splitters that give places in the original text.

Knows strings. Must not know any corpus or model.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

from as2ray.errors import CorpusError


class CharSpan(NamedTuple):
    """A sentence as the half-open range of characters `text[start:end]`; never blank."""

    start: int
    end: int


SplitFunction = Callable[[str], list[tuple[int, int]]]
"""Ranges of a text in ascending order that do not overlap; blanks at their ends are cut off."""


@dataclass(frozen=True)
class SentenceSplitter:
    """A way of splitting; `version` goes into the manifest of whatever was split with it."""

    name: str
    version: str
    split: SplitFunction


def split(text: str, splitter: str = "syntok") -> list[CharSpan]:
    """The sentences of a text in order.

    Args:
        text: Any text; of a blank one there are no sentences.
        splitter: A name of `SPLITTERS`.

    Raises:
        CorpusError: No splitter of that name.
    """
    return [s for bounds in get_splitter(splitter).split(text) if (s := _trim(text, *bounds))]


def get_splitter(name: str) -> SentenceSplitter:
    """The splitter of that name.

    Raises:
        CorpusError: There is none.
    """
    if name not in SPLITTERS:
        raise CorpusError(
            f"unknown sentence splitter {name!r}; expected one of {sorted(SPLITTERS)}",
            fix="choose one of these, or register your own with as2ray.text.sentences.register",
        )
    return SPLITTERS[name]


def versioned_name(name: str) -> str:
    """The name with its version, such as `syntok-1.4.4`."""
    found = get_splitter(name)
    return f"{found.name}-{found.version}"


def register_splitter(name: str, version: str, split: SplitFunction) -> None:
    """Adds a splitter, or replaces the one of that name."""
    SPLITTERS[name] = SentenceSplitter(name, version, split)


def _trim(text: str, start: int, end: int) -> CharSpan | None:
    inner = text[start:end]
    left = start + len(inner) - len(inner.lstrip())
    right = left + len(inner.strip())
    return CharSpan(left, right) if right > left else None


def _split_syntok(text: str) -> list[tuple[int, int]]:
    from syntok import segmenter

    sentences = (list(s) for paragraph in segmenter.analyze(text) for s in paragraph)
    return [(s[0].offset, s[-1].offset + len(s[-1].value)) for s in sentences]


def _split_simple(text: str) -> list[tuple[int, int]]:
    ends = [m.end() for m in _SENTENCE_END.finditer(text)] + [len(text)]
    return list(zip([0, *ends], ends))


def _split_lines(text: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(r"[^\r\n]+", text)]


_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])|\n\s*\n")

SPLITTERS: dict[str, SentenceSplitter] = {
    "syntok": SentenceSplitter("syntok", version("syntok"), _split_syntok),
    "simple": SentenceSplitter("simple", "1", _split_simple),
    "lines": SentenceSplitter("lines", "1", _split_lines),
}
"""The splitters by name: syntok's rules; a stop before a capital; one sentence a line."""
