"""Sentence splitting by named, versioned splitters that return ranges of the original text."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import NamedTuple

from as2ray.errors import lookup


class CharSpan(NamedTuple):
    """A sentence as the half-open range of characters `text[start:end]`; never blank."""

    start: int
    end: int


SplitFunction = Callable[[str], list[tuple[int, int]]]
"""Returns ranges of a text, ascending and without overlap; white space at their ends is trimmed."""


@dataclass(frozen=True)
class SentenceSplitter:
    """A sentence splitter; its version is recorded in the manifest of whatever it has split."""

    name: str
    version: str
    split: SplitFunction


def split(text: str, splitter: str = "syntok") -> list[CharSpan]:
    """Splits a text into sentences, in order; a blank text has none.

    Args:
        text: Any text.
        splitter: A name in `SPLITTERS`.

    Raises:
        ConfigError: There is no splitter of that name.
    """
    return [s for bounds in get_splitter(splitter).split(text) if (s := _trim(text, *bounds))]


def get_splitter(name: str) -> SentenceSplitter:
    """Returns the splitter of that name.

    Raises:
        ConfigError: There is no splitter of that name; `register_splitter` adds one.
    """
    return lookup(SPLITTERS, name, "sentence splitter")


def versioned_name(name: str) -> str:
    """Returns the name with its version, such as `syntok-1.4.4-1`."""
    splitter = get_splitter(name)
    return f"{splitter.name}-{splitter.version}"


def register_splitter(name: str, version: str, split: SplitFunction) -> None:
    """Adds a splitter, or replaces the one of that name."""
    SPLITTERS[name] = SentenceSplitter(name, version, split)


def _trim(text: str, start: int, end: int) -> CharSpan | None:
    part = text[start:end]
    trimmed_start = start + len(part) - len(part.lstrip())
    trimmed_end = trimmed_start + len(part.strip())
    return CharSpan(trimmed_start, trimmed_end) if trimmed_end > trimmed_start else None


def _split_syntok(text: str) -> list[tuple[int, int]]:
    from syntok import segmenter

    sentences = (list(s) for paragraph in segmenter.analyze(text) for s in paragraph)
    ranges = ((s[0].offset, s[-1].offset + len(s[-1].value)) for s in sentences)
    return [part for each in ranges for part in _split_at(_STOP_OF_OTHER_SCRIPTS, text, *each)]


def _split_simple(text: str) -> list[tuple[int, int]]:
    ranges = _split_at(_SENTENCE_END, text, 0, len(text))
    return [part for each in ranges for part in _split_at(_STOP_OF_OTHER_SCRIPTS, text, *each)]


def _split_at(stop: re.Pattern[str], text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Splits a range of a text where matches end."""
    ends = [match.end() for match in stop.finditer(text, start, end)]
    return list(pairwise([start, *ends, end]))


def _split_lines(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"[^\r\n]+", text)]


_STOP_OF_OTHER_SCRIPTS = re.compile("[。｡！？؟۔।॥։።။។]++[\"'”’」』）》)\\]]*+(?![，、。])")
"""The stops of Chinese, Japanese, Arabic, Urdu, Hindi, Armenian, Amharic, Burmese and Khmer, which
syntok does not know."""

_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])|\n\s*\n")

SPLITTERS: dict[str, SentenceSplitter] = {
    # The last digit is that of the stops of other scripts.
    "syntok": SentenceSplitter("syntok", f"{version('syntok')}-1", _split_syntok),
    "simple": SentenceSplitter("simple", "2", _split_simple),
    "lines": SentenceSplitter("lines", "1", _split_lines),
}
"""Splitters by name: the rules of syntok; a full stop before a capital; one sentence per line."""
