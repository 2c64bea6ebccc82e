import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.errors import CorpusError
from as2ray.retrieval.build import build
from as2ray.retrieval.documents import Columns, Skipped, pieces, read
from as2ray.retrieval.markup import Block, html, markdown, plain


def all_of(source, columns=Columns()):  # noqa: B008
    skipped = Skipped()
    return list(read(pieces(source), source, columns, skipped)), skipped


def test_folder_gives_its_documents_in_order_and_counts_what_is_none(documents):
    found, skipped = all_of(documents)
    ids = ["insects/ants.html", "notes.txt", "a", "rows.jsonl#2", "whales.md"]
    assert [document.id for document in found] == ids
    assert [document.title for document in found] == ["Ants & bees", "notes", "Cats", "", "Whales"]
    assert skipped.counts == {"without text": 2, "of another kind": 1, "binary or not UTF-8": 2}
    assert "1 of another kind (such as picture.png)" in str(skipped)


def test_markdown_gives_prose_under_its_headings(documents):
    title, blocks = markdown((documents / "whales.md").read_text())
    assert title == "Whales"
    assert blocks[0].text.endswith("It weighs up to 199 tonnes. It eats krill.")
    assert [block.heading for block in blocks] == ["Whales", *["Songs"] * 6]
    texts = [block.text for block in blocks]
    assert texts[1:3] == ["Humpback whales sing for hours.", "Nobody knows why."]
    assert not any("draft" in text or "whale = 1" in text for text in texts)


def test_html_gives_paragraphs_without_scripts_and_navigation(documents):
    title, blocks = html((documents / "insects" / "ants.html").read_text())
    assert title == "Ants & bees"
    assert blocks == [
        Block("Work", "An ant carries fifty times its weight."),
        Block("Work", "Bees dance."),
        Block("Work", "They sleep at night."),
    ]


def test_html_inside_markdown_is_prose_too():
    text = (
        "# Ants\n\n<div>\n<p>They dig.</p>\n<!-- no --></div>\n\n<pre>x</pre>\n\nThey <b>run</b>.\n"
    )
    assert markdown(text)[1] == [Block("Ants", "They dig."), Block("Ants", "They run.")]


def test_html_picture_s_title_ends_no_heading():
    drawn = "<h2><a><svg><title>link</title></svg></a>Play</h2><p>Bees.</p>"
    assert html(drawn) == ("Play", [Block("Play", "Bees.")])


def test_html_heading_that_is_not_closed_swallows_no_prose():
    assert html("<h1>Bees<p>They dance.<p>They sleep.") == (
        "Bees",
        [Block("Bees", "They dance."), Block("Bees", "They sleep.")],
    )


def test_html_left_open_inside_what_is_silent_comes_back():
    assert html("<nav><svg><p>Home</nav><p>Text.")[1] == [Block("", "Text.")]


def test_plain_text_is_cut_at_blank_lines():
    assert plain("One\ntwo.\n \nThree.\n")[1] == [Block("", "One two."), Block("", "Three.")]


def test_parquet_is_read_by_row_groups_with_columns_of_any_name(tmp_path):
    rows = pa.table({"body": ["One here.", "Two here.", "Three here."], "url": [7, 8, 9]})
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=2)
    assert [piece.group for piece in pieces(tmp_path / "t.parquet")] == [0, 1]
    found, _ = all_of(tmp_path / "t.parquet", Columns(text="body", id="url"))
    assert [(d.id, d.blocks[0].text) for d in found] == [
        ("7", "One here."),
        ("8", "Two here."),
        ("9", "Three here."),
    ]
    numbered, _ = all_of(tmp_path, Columns(text="body", id="none"))
    assert [d.id for d in numbered] == ["t.parquet#1", "t.parquet#2", "t.parquet#3"]


@pytest.mark.parametrize(
    ("name", "content", "came"),
    [
        ("a.jsonl", '{"body": "x"}', r"row 1: \['body'\], without \['text'\]"),
        ("a.jsonl", '{"text": 3}', "'text' is int"),
        ("a.jsonl", '{"text": "x"', "line 1"),
        ("a.parquet", "no table", "a.parquet"),
    ],
)
def test_damaged_table_is_refused(tmp_path, name, content, came):
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=came):
        all_of(tmp_path)


def test_blank_lines_between_json_lines_are_no_rows(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "One here."}\n\n{"text": "Two here."}\n \n')
    found, _ = all_of(tmp_path)
    assert [(d.id, d.blocks[0].text) for d in found] == [
        ("t.jsonl#1", "One here."),
        ("t.jsonl#3", "Two here."),
    ]


def test_names_and_texts_that_are_no_unicode_are_told_and_do_no_harm(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "half \\ud800"}\n{"text": "Whole."}\n')
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("Coffee here.")
    found, skipped = all_of(tmp_path)
    assert [d.id for d in found] == ["caf\\udce9.txt", "t.jsonl#2"]
    assert skipped.counts == {"with broken characters": 1}
    assert build(tmp_path, tmp_path.with_name("index"))["documents"] == 2


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="an empty folder"):
        pieces(tmp_path)
    with pytest.raises(CorpusError, match="no such folder"):
        pieces(tmp_path / "nowhere")
