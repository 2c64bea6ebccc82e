"""Sentence splitting by named, versioned splitters that give places in the original text.

Knows strings. Must not know any corpus or model.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

from as2ray.errors import CorpusError


class Span(NamedTuple):
    """A sentence as the half-open range of characters `text[start:end]`; never blank."""

    start: int
    end: int


Split = Callable[[str], list[tuple[int, int]]]
"""Ranges of a text in ascending order that do not overlap; blanks at their ends are cut off."""


@dataclass(frozen=True)
class Splitter:
    """A way of splitting; `version` goes into the manifest of whatever was split with it."""

    name: str
    version: str
    split: Split


def split(text: str, splitter: str = "syntok") -> list[Span]:
    """The sentences of a text in order.

    Args:
        text: Any text; of a blank one there are no sentences.
        splitter: A name of `SPLITTERS`.

    Raises:
        CorpusError: No splitter of that name.
    """
    return [s for bounds in find(splitter).split(text) if (s := _trim(text, *bounds))]


def find(splitter: str) -> Splitter:
    """The splitter of that name.

    Raises:
        CorpusError: There is none.
    """
    if splitter not in SPLITTERS:
        raise CorpusError(
            f"unknown sentence splitter {splitter!r}",
            expected=f"one of {sorted(SPLITTERS)}",
            mend="choose one of these, or register your own with as2ray.text.sentences.register",
        )
    return SPLITTERS[splitter]


def versioned(splitter: str) -> str:
    """The name with its version, such as `syntok-1.4.4`."""
    found = find(splitter)
    return f"{found.name}-{found.version}"


def register(name: str, version: str, split: Split) -> None:
    """Adds a splitter, or replaces the one of that name."""
    SPLITTERS[name] = Splitter(name, version, split)


def _trim(text: str, start: int, end: int) -> Span | None:
    inner = text[start:end]
    left = start + len(inner) - len(inner.lstrip())
    right = left + len(inner.strip())
    return Span(left, right) if right > left else None


def _syntok(text: str) -> list[tuple[int, int]]:
    from syntok import segmenter

    sentences = (list(s) for paragraph in segmenter.analyze(text) for s in paragraph)
    return [(s[0].offset, s[-1].offset + len(s[-1].value)) for s in sentences]


def _simple(text: str) -> list[tuple[int, int]]:
    ends = [m.end() for m in _END.finditer(text)] + [len(text)]
    return list(zip([0, *ends], ends))


def _lines(text: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(r"[^\r\n]+", text)]


_END = re.compile(r"[.!?…][\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])|\n\s*\n")

SPLITTERS: dict[str, Splitter] = {
    "syntok": Splitter("syntok", version("syntok"), _syntok),
    "simple": Splitter("simple", "1", _simple),
    "lines": Splitter("lines", "1", _lines),
}
"""The splitters by name: syntok's rules; a stop before a capital; one sentence a line."""
