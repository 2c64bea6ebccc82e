"""Prose out of plain text, Markdown and HTML: paragraphs, each under the heading above it.

Knows strings. Must not know files or sentences. Code, tables' rulers, scripts and navigation are
left out: they answer no question in words.
"""

import re
from html.parser import HTMLParser
from itertools import groupby
from typing import Any, Final, NamedTuple

from markdown_it import MarkdownIt


class TextBlock(NamedTuple):
    """A paragraph."""

    heading: str
    """The heading that it stands under; empty before the first."""
    text: str
    """On one line; of plain text on its own lines."""


def parse_plain_text(text: str) -> tuple[str, list[TextBlock]]:
    """Paragraphs between blank lines; plain text has neither title nor headings."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    paragraphs = ("\n".join(p) for said, p in groupby(lines, bool) if said)
    return "", [TextBlock("", p) for p in paragraphs]


def parse_markdown(text: str) -> tuple[str, list[TextBlock]]:
    """Title (the first heading) and paragraphs of Markdown; front matter and code are left out."""
    title, heading, blocks, inside = "", "", list[TextBlock](), ""
    front = _FRONT_MATTER.match(text)
    for token in _MARKDOWN.parse(text[front.end() :] if front else text):
        if token.type == "heading_open":
            inside = "heading"
        elif token.type == "inline":
            said = " ".join(_inline_text(token).split())
            if inside == "heading":
                title, heading, inside = title or said, said, ""
            elif said:
                blocks.append(TextBlock(heading, said))
        elif token.type == "html_block":
            page = _extract_html(token.content)
            blocks += [TextBlock(block.heading or heading, block.text) for block in page.blocks]
            title, heading = title or page.title, page.heading or heading
    return title, blocks


def parse_html(text: str) -> tuple[str, list[TextBlock]]:
    """Title and paragraphs of a page."""
    page = _extract_html(text)
    return page.title, page.blocks


_MARKDOWN: Final = MarkdownIt("commonmark").enable("table")
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\r?\n(?!\s*\n)"
    r"(?:(?:[ \t].*|-(?: .*)?|#.*|[\w\"'][^:\n]*:(?:[ \t].*)?|)\r?\n)*?"
    r"---[ \t]*(?:\r?\n|$)"
)
"""YAML between two rulers: keys, what is indented, lists, comments. Prose there is none."""
_TAG: Final = re.compile(r"</?(\w+)")


def _inline_text(token: object) -> str:
    parts = []
    for child in getattr(token, "children", None) or []:
        if child.type in ("text", "code_inline"):
            parts.append(child.content)
        elif child.type in ("softbreak", "hardbreak") or _is_block_tag(child):
            parts.append(" ")
    return "".join(parts)


def _is_block_tag(token: Any) -> bool:
    """Whether it is a tag inside a line that ends a word, as `<br>` in a table's cell does."""
    tag = _TAG.match(token.content) if token.type == "html_inline" else None
    return tag is not None and tag[1].lower() in _BLOCK_TAGS


_HEADING_TAGS: Final = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_IGNORED_TAGS: Final = frozenset({"script", "style", "noscript", "template", "nav", "pre", "svg"})
_BLOCK_TAGS: Final = _HEADING_TAGS | {
    *("p", "div", "section", "article", "li", "ul", "ol", "dl", "dt", "dd", "tr", "td", "th"),
    *("table", "blockquote", "br", "hr", "figure", "figcaption", "header", "footer", "main"),
    *("aside", "body", "title", "head", "form", "fieldset", "legend", "label", "button"),
    *("select", "option", "textarea", "details", "summary", "dialog", "address", "caption"),
}


def _extract_html(text: str) -> "_HTMLTextExtractor":
    page = _HTMLTextExtractor()
    page.feed(text)
    page.close()
    page.end_block()
    return page


class _HTMLTextExtractor(HTMLParser):
    """Gathers a page's text, block by block."""

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
            # What was left open inside ends with it.
            del self._open_ignored_tags[self._open_ignored_tags.index(tag) :]
        if tag in _BLOCK_TAGS | _IGNORED_TAGS:
            self.end_block()
        if tag == self._open_tag:
            self._open_tag = ""

    def handle_data(self, data: str) -> None:
        if not self._open_ignored_tags:
            self._text_parts.append(data)

    def end_block(self) -> None:
        """Closes the paragraph or heading in work."""
        said = " ".join("".join(self._text_parts).split())
        self._text_parts = []
        if not said:
            return
        if self._open_tag == "title":
            self.title = said
        elif self._open_tag:
            # What follows is prose, even where the heading is not closed.
            self.title, self.heading, self._open_tag = self.title or said, said, ""
        else:
            self.blocks.append(TextBlock(self.heading, said))
