"""Extracts prose from plain text, Markdown, HTML, PDF and office files: paragraphs under headings.

Code, scripts and navigation are removed, because they contain no answers in sentences.
"""

import logging
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from zipfile import is_zipfile

import yaml
from markdown_it import MarkdownIt


class TextBlock(NamedTuple):
    """A paragraph."""

    heading: str
    """The heading above it; empty before the first heading."""
    text: str
    """One line; for plain text, the lines of the file."""


def parse_plain_text(text: str) -> tuple[str, list[TextBlock]]:
    """Returns an empty title and the paragraphs, which are separated by blank lines."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    paragraphs = ("\n".join(group) for has_text, group in groupby(lines, bool) if has_text)
    return "", [TextBlock("", paragraph) for paragraph in paragraphs]


def parse_markdown(text: str) -> tuple[str, list[TextBlock]]:
    """Returns the title and the paragraphs, without YAML front matter.

    The title is that of the front matter, or else the first heading.
    """
    front_matter = _FRONT_MATTER.match(text)
    body = text[front_matter.end() :] if front_matter else text
    heading, blocks = parse_html(_MARKDOWN.render(body))
    return (_read_title(front_matter[0]) if front_matter else "") or heading, blocks


def parse_html(text: str) -> tuple[str, list[TextBlock]]:
    """Returns the title (`title`, or else the first heading) and the paragraphs."""
    page = _HTMLTextExtractor()
    page.feed(text)
    page.close()
    page.end_block()
    return page.title, page.blocks


def read_pdf(path: Path) -> tuple[str, list[TextBlock]]:
    """Returns the title and the paragraphs of a PDF file, each with its page as the heading.

    Raises:
        ImportError: pypdf is not installed.
        Exception: The file is damaged, or needs a password.
    """
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = PdfReader(path)
    blocks = []
    for number, page in enumerate(reader.pages, 1):
        text = _LINE_HYPHEN.sub("", page.extract_text())
        blocks += [TextBlock(f"page {number}", b.text) for b in parse_plain_text(text)[1]]
    return str((reader.metadata and reader.metadata.title) or ""), blocks


def read_office_file(path: Path) -> tuple[str, list[TextBlock]]:
    """Returns the title and the paragraphs of a document, slides or a workbook.

    Raises:
        ImportError: markitdown is not installed.
        Exception: The file is damaged.
    """
    from markitdown import MarkItDown

    if not is_zipfile(path):  # It would be read as plain text.
        raise ValueError(f"{path} is damaged")
    return parse_markdown(MarkItDown().convert(path).markdown)


def _read_title(front_matter: str) -> str:
    try:
        entries = yaml.safe_load(front_matter.strip().strip("-"))
    except yaml.YAMLError:
        return ""
    title = entries.get("title") if isinstance(entries, dict) else None
    return " ".join(str(title or "").split())


_LINE_HYPHEN: Final = re.compile(r"(?<=[a-z])-\n(?=[a-z])")
"""A hyphen at the end of a line, between the parts of a word."""

_FRONT_MATTER: Final = re.compile(
    r"\A---[ \t]*\r?\n(?!\s*\n)"
    r"(?:(?:[ \t].*|-(?: .*)?|#.*|[\w\"'][^:\n]*:(?:[ \t].*)?|)\r?\n)*?"
    r"---[ \t]*(?:\r?\n|$)"
)
"""YAML between two lines of `---` at the start of a text.

It consists of keys, indented lines, lists and comments, but of no prose.
"""

_HEADING_TAGS: Final = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_IGNORED_TAGS: Final = frozenset({"script", "style", "noscript", "template", "nav", "pre", "svg"})
_BLOCK_TAGS: Final = _HEADING_TAGS | {
    *("p", "div", "section", "article", "li", "ul", "ol", "dl", "dt", "dd", "tr", "td", "th"),
    *("table", "blockquote", "br", "hr", "figure", "figcaption", "header", "footer", "main"),
    *("aside", "body", "title", "head", "form", "fieldset", "legend", "label", "button"),
    *("select", "option", "textarea", "details", "summary", "dialog", "address", "caption"),
}

_TAG: Final = re.compile(r"</?(\w+)")


def _render_inline_tag(renderer: Any, tokens: Sequence[Any], index: int, *_: Any) -> str:
    """A block tag inside a line, such as `<br>` in a table cell, separates words only."""
    tag = _TAG.match(tokens[index].content)
    return " " if tag is not None and tag[1].lower() in _BLOCK_TAGS else ""


def _render_strong(_: Any, tokens: Sequence[Any], index: int, *__: Any) -> str:
    """Keeps the underscores of names such as `__init__` and `__FILE__`.

    Emphasis by `__` is a name if all of it is one identifier in lower case or in capitals. So
    `__bold__` keeps its underscores too; `__Bold__`, `__two words__` and `**bold**` are emphasis.
    """
    token = tokens[index]
    text, other_end = tokens[index + token.nesting], tokens[index + 2 * token.nesting]
    word = text.content if other_end.nesting == -token.nesting else ""
    is_name = word.isidentifier() and (word.islower() or word.isupper())
    return token.markup if token.markup == "__" and is_name else ""


_MARKDOWN: Final = MarkdownIt("commonmark").enable("table")
_MARKDOWN.add_render_rule("hardbreak", lambda *_: " ")
_MARKDOWN.add_render_rule("html_inline", _render_inline_tag)
_MARKDOWN.add_render_rule("strong_open", _render_strong)
_MARKDOWN.add_render_rule("strong_close", _render_strong)


class _HTMLTextExtractor(HTMLParser):
    """Collects the text of a page, block by block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title, self.heading = "", ""
        self.blocks: list[TextBlock] = []
        self._text_parts: list[str] = []
        self._open_tag = ""
        self._open_ignored_tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _IGNORED_TAGS:
            self._open_ignored_tags.append(tag)
        if tag in _BLOCK_TAGS | _IGNORED_TAGS:
            self.end_block()
        if not self._open_ignored_tags and (tag in _HEADING_TAGS or tag == "title"):
            self._open_tag = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open_ignored_tags:
            # Unclosed tags inside the element end with it.
            del self._open_ignored_tags[self._open_ignored_tags.index(tag) :]
        if tag in _BLOCK_TAGS | _IGNORED_TAGS:
            self.end_block()
        if tag == self._open_tag:
            self._open_tag = ""

    def handle_data(self, data: str) -> None:
        if not self._open_ignored_tags:
            self._text_parts.append(data)

    def end_block(self) -> None:
        """Ends the current paragraph or heading."""
        text = " ".join("".join(self._text_parts).split())
        self._text_parts = []
        if not text:
            return
        if self._open_tag == "title":
            self.title = text
        elif self._open_tag:
            # The text after a heading is prose, even if the heading is not closed.
            self.title, self.heading, self._open_tag = self.title or text, text, ""
        else:
            self.blocks.append(TextBlock(self.heading, text))
