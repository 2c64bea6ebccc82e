import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.errors import CorpusError
from as2ray.retrieval.documents import (
    READERS,
    DocumentColumns,
    SkippedDocuments,
    list_parts,
    read_documents,
)
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.retrieval.text_extraction import TextBlock, parse_html, parse_markdown, parse_plain_text


def read_all(source, columns=DocumentColumns()):  # noqa: B008
    skipped = SkippedDocuments()
    return list(read_documents(list_parts(source), columns, skipped)), skipped


def test_folder_gives_its_documents_in_order_and_counts_what_is_none(documents):
    found, skipped = read_all(documents)
    ids = ["insects/ants.html", "notes.txt", "a", "rows.jsonl#2", "whales.md"]
    assert [document.id for document in found] == ids
    assert [document.title for document in found] == ["Ants & bees", "notes", "Cats", "", "Whales"]
    assert skipped.counts == {"without text": 2, "of another kind": 1, "binary or not UTF-8": 2}
    assert set(str(skipped).split(", ")) == {
        "2 without text (such as empty.md)",
        "1 of another kind (such as picture.png)",
        "2 binary or not UTF-8 (such as broken.txt)",
    }
    assert str(SkippedDocuments()) == "nothing skipped"


def test_markdown_gives_prose_under_its_headings(documents):
    title, blocks = parse_markdown((documents / "whales.md").read_text())
    assert title == "Whales"
    assert blocks[0].text.endswith("It weighs up to 199 tonnes. It eats krill.")
    assert [block.heading for block in blocks] == ["Whales", *["Songs"] * 6]
    texts = [block.text for block in blocks]
    assert texts[1:3] == ["Humpback whales sing for hours.", "Nobody knows why."]
    assert not any("draft" in text or "whale = 1" in text for text in texts)


def test_html_gives_paragraphs_without_scripts_and_navigation(documents):
    title, blocks = parse_html((documents / "insects" / "ants.html").read_text())
    assert title == "Ants & bees"
    assert blocks == [
        TextBlock("Work", "An ant carries fifty times its weight."),
        TextBlock("Work", "Bees dance."),
        TextBlock("Work", "They sleep at night."),
    ]


def write_pdf(path, *pages):
    """Writes a line of text on each page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    with rc_context({"pdf.fonttype": 42}), PdfPages(path, metadata={"Title": "On bees"}) as file:
        for lines in pages:
            figure = Figure(figsize=(8, 4))
            for number, line in enumerate(lines):
                figure.text(0.1, 0.8 - 0.1 * number, line)
            file.savefig(figure)


def test_pdf_gives_its_pages_as_places(tmp_path):
    write_pdf(
        tmp_path / "bees.pdf", ["Bees dance in the dark and com-", "municate."], ["Ants dig."]
    )
    [found], _ = read_all(tmp_path)
    assert found.title == "On bees"
    assert [(b.heading, " ".join(b.text.split())) for b in found.blocks] == [
        ("page 1", "Bees dance in the dark and communicate."),
        ("page 2", "Ants dig."),
    ]


def test_slides_and_workbooks_give_their_text(tmp_path):
    from openpyxl import Workbook
    from pptx import Presentation

    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text = "Ants"
    slide.placeholders[1].text = "An ant carries fifty times its weight."
    slides.save(tmp_path / "ants.pptx")
    workbook = Workbook()
    workbook.active.append(["animal", "sound"])
    workbook.active.append(["bee", "It hums at night."])
    workbook.save(tmp_path / "bees.xlsx")
    found, _ = read_all(tmp_path)
    texts = [" ".join(block.text for block in document.blocks) for document in found]
    assert "An ant carries fifty times its weight." in texts[0]
    assert "It hums at night." in texts[1]


def test_document_without_a_title_has_the_name_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, ".pdf", lambda path: ("", [TextBlock("page 1", "Bees dance.")]))
    (tmp_path / "bees.pdf").touch()
    [document], _ = read_all(tmp_path)
    assert document.title == "bees"


def test_file_that_is_removed_while_others_are_read_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("Bees dance.")
    (tmp_path / "b.txt").write_text("Ants dig.")
    parts, skipped = list_parts(tmp_path), SkippedDocuments()
    (tmp_path / "b.txt").unlink()
    documents = read_documents(parts, DocumentColumns(), skipped)
    assert [document.id for document in documents] == ["a.txt"]
    assert (skipped.counts, skipped.examples) == ({"unreadable": 1}, {"unreadable": "b.txt"})
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"text": ["Owls hunt."]}), path)
    parts = list_parts(path)
    path.unlink()
    with pytest.raises(CorpusError) as error:
        list(read_documents(parts, DocumentColumns(), skipped))
    assert error.value.problem.startswith(f"{path} is damaged")


def test_damaged_files_and_missing_readers_are_reported(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 broken")
    (tmp_path / "b.docx").write_bytes(b"no archive")
    (tmp_path / "c.txt").write_text("Bees dance.")
    found, skipped = read_all(tmp_path)
    assert [document.id for document in found] == ["c.txt"]
    assert skipped.counts == {"unreadable": 2}
    monkeypatch.setitem(sys.modules, "pypdf", None)
    _, skipped = read_all(tmp_path)
    assert skipped.examples["that need `pip install 'as2ray[documents]'`"] == "a.pdf"


def test_html_inside_markdown_is_prose_too():
    text = (
        "# Ants\n\n<div>\n<p>They dig.</p>\n<!-- no --></div>\n\n<pre>x</pre>\n\nThey <b>run</b>.\n"
    )
    assert parse_markdown(text)[1] == [
        TextBlock("Ants", "They dig."),
        TextBlock("Ants", "They run."),
    ]


def test_html_title_and_empty_headings_end_before_the_text():
    for page in ("<title>A</title><p>One.</p>", "<title>A</title><h1></h1>One."):
        assert parse_html(page) == ("A", [TextBlock("", "One.")])


def test_html_picture_s_title_ends_no_heading():
    drawn = "<h2><a><svg><title>link</title></svg></a>Play</h2><p>Bees.</p>"
    assert parse_html(drawn) == ("Play", [TextBlock("Play", "Bees.")])


def test_html_heading_that_is_not_closed_swallows_no_prose():
    assert parse_html("<h1>Bees<p>They dance.<p>They sleep.") == (
        "Bees",
        [TextBlock("Bees", "They dance."), TextBlock("Bees", "They sleep.")],
    )


def test_html_left_open_inside_what_is_silent_comes_back():
    assert parse_html("<nav><svg><p>Home</nav><p>Text.")[1] == [TextBlock("", "Text.")]


def test_plain_text_is_cut_at_blank_lines():
    assert parse_plain_text("One\ntwo.\n \nThree.\n")[1] == [
        TextBlock("", "One\ntwo."),
        TextBlock("", "Three."),
    ]


def test_parquet_is_read_by_row_groups_with_columns_of_any_name(tmp_path):
    rows = pa.table({"body": ["One here.", "Two here.", "Three here."], "url": [7, 8, 9]})
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=2)
    assert [piece.row_group for piece in list_parts(tmp_path / "t.parquet")] == [0, 1]
    found, _ = read_all(tmp_path / "t.parquet", DocumentColumns(text="body", id="url"))
    assert [(d.id, d.blocks[0].text) for d in found] == [
        ("7", "One here."),
        ("8", "Two here."),
        ("9", "Three here."),
    ]
    numbered, _ = read_all(tmp_path, DocumentColumns(text="body", id="none"))
    assert [d.id for d in numbered] == ["t.parquet#1", "t.parquet#2", "t.parquet#3"]
    (tmp_path / "t.jsonl").write_text('{"body": "One here."}')
    for name in ("t.jsonl", "t.parquet"):
        with pytest.raises(CorpusError, match="name the column that holds the text"):
            read_all(tmp_path / name)


def test_tag_inside_a_line_of_markdown_ends_a_word_where_a_page_s_does():
    text = "| part | note |\n|---|---|\n| A | valve<br>gasket |\n\nOne<b>two</b> three\n"
    assert [block.text for block in parse_markdown(text)[1]][-2:] == [
        "valve gasket",
        "Onetwo three",
    ]


def test_html_summaries_and_fields_end_a_paragraph():
    page = "<details><summary>Resetting the pump</summary>Hold it.</details><label>One</label>Two"
    assert [block.text for block in parse_html(page)[1]] == [
        "Resetting the pump",
        "Hold it.",
        "One",
        "Two",
    ]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("---\ntitle: x\ntags:\n  - a\n- b\n# c\n---\nText.\n", ["Text."]),
        ("---\r\ntitle: x\r\n---\r\nText.\r\n", ["Text."]),
        ("---\n---\nText.\n\n---\n\nMore.\n", ["Text.", "More."]),
        ("---\n\nPenguins swim.\n\n---\n\nText.\n", ["Penguins swim.", "Text."]),
        ("---\nPenguins swim.\n\n---\n\nText.\n", ["Penguins swim.", "Text."]),
    ],
)
def test_front_matter_is_left_out_and_prose_after_a_ruler_is_not(text, left):
    assert [block.text for block in parse_markdown(text)[1]] == left


def test_front_matter_without_an_end_takes_no_longer_than_its_length():
    assert parse_markdown("---\nkey: x\n" + "  \n \t\n" * 20_000 + "Text.")[1][-1].text == "Text."


@pytest.mark.parametrize(
    ("front_matter", "title"),
    [
        ("title: npm-ci", "npm-ci"),
        ("title: Generation X", "Generation X"),
        ('title: "Install:  clean"', "Install: clean"),
        ("section: 1", "Synopsis"),
        ("title:", "Synopsis"),
        ("title: {", "Synopsis"),
    ],
)
def test_title_of_the_front_matter_comes_before_the_first_heading(front_matter, title):
    assert parse_markdown(f"---\n{front_matter}\n---\n### Synopsis\n\nText.\n")[0] == title


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Call __init__, then object.__eq__(x): see __class_getitem__.", None),
        ("`__a` and __FILE__ in __init__.py, **__new__** too", None),
        ("# __slots__", None),
        ("__Note__: __two words__, **bold**, __*one*__, __2__", "Note: two words, bold, one, 2"),
        ("__bold__ stays, _word_ does not, nor ___both___", "__bold__ stays, word does not, nor"),
        ("__one\ntwo__ and __a `b`__", "one two and a b"),
    ],
)
def test_underscores_of_names_in_markdown_survive(text, read):
    title, blocks = parse_markdown(text)
    found = title or blocks[0].text
    assert found.startswith(read or text.strip("# ").replace("`", "").replace("**", ""))


def test_heading_of_raw_html_in_markdown_is_the_title():
    text = '<h1 align="center">Ants</h1>\n\nThey dig.\n'
    assert parse_markdown(text) == ("Ants", [TextBlock("Ants", "They dig.")])


def test_splitter_lines_takes_each_line_of_plain_text_and_others_none(tmp_path):
    (tmp_path / "faq.txt").write_text("Whales sing. Dogs bark\nCats\tpurr\n\nOwls\nhunt.\n")
    split = {}
    for splitter in ("lines", "syntok"):
        write_index(
            tmp_path / "faq.txt", tmp_path / splitter, IndexConfig(sentence_splitter=splitter)
        )
        index = SentenceIndex.open(tmp_path / splitter)
        split[splitter] = index.texts(range(len(index)))
    assert split["lines"] == ["Whales sing. Dogs bark", "Cats purr", "Owls", "hunt."]
    assert split["syntok"] == ["Whales sing.", "Dogs bark Cats purr", "Owls hunt."]


def test_table_s_other_columns_are_not_read_and_endings_may_be_in_capitals(tmp_path):
    rows = {"text": ["One here."], "expires": pa.array([4_000_000], pa.date32())}
    pq.write_table(pa.table(rows), tmp_path / "T.PARQUET")
    (tmp_path / "u.JSONL").write_bytes(b'\xef\xbb\xbf{"text": "Two here."}\n')
    found, skipped = read_all(tmp_path)
    assert [d.blocks[0].text for d in found] == ["One here.", "Two here."]
    assert not skipped.counts


def test_document_with_broken_characters_is_left_out_with_its_reason(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "Half \\ud800."}\n{"text": "Whole."}\n')
    found, skipped = read_all(tmp_path)
    assert [d.blocks[0].text for d in found] == ["Whole."]
    assert (skipped.counts, skipped.examples) == (
        {"with broken characters": 1},
        {"with broken characters": "x"},
    )


@pytest.mark.parametrize(
    "value", [pa.array([b"\xff"]).cast(pa.binary()).view(pa.string()), pa.array([4], pa.int64())]
)
def test_table_whose_text_is_none_is_refused(tmp_path, value):
    pq.write_table(pa.table({"text": value}), tmp_path / "t.parquet")
    with pytest.raises(CorpusError) as error:
        read_all(tmp_path)
    assert error.value.problem.startswith(str(tmp_path / "t.parquet"))


def test_parquet_without_the_text_column_is_refused_by_its_name(tmp_path):
    pq.write_table(pa.table({"body": ["One here."]}), tmp_path / "t.parquet")
    with pytest.raises(CorpusError, match=r"\['body'\], without \['text'\]") as error:
        read_all(tmp_path)
    assert error.value.problem.startswith(str(tmp_path / "t.parquet"))


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf# Ants\n\nThey dig.\n")
    [document], _ = read_all(tmp_path)
    assert (document.title, document.blocks) == ("Ants", (TextBlock("Ants", "They dig."),))


@pytest.mark.parametrize("value", ["1" * 5_000, "[" * 100_000], ids=["digits", "brackets"])
def test_json_that_python_cannot_hold_is_refused(tmp_path, value):
    (tmp_path / "t.jsonl").write_text(f'{{"text": "x", "n": {value}}}\n')
    with pytest.raises(CorpusError, match="line 1"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"body": "x"}', r"row 1: \['body'\], without \['text'\]"),
        ("a.jsonl", '{"text": 3}', "'text' is int"),
        ("a.jsonl", '{"text": "x"', "line 1"),
        ("a.parquet", "no table", "a.parquet"),
    ],
)
def test_damaged_table_is_refused(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=problem) as error:
        read_all(tmp_path)
    assert error.value.problem.startswith(str(tmp_path / name))


def test_blank_lines_between_json_lines_are_no_rows(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "One here."}\n\n{"text": "Two here."}\n \n')
    found, _ = read_all(tmp_path)
    assert [(d.id, d.blocks[0].text) for d in found] == [
        ("t.jsonl#1", "One here."),
        ("t.jsonl#3", "Two here."),
    ]


def test_names_and_texts_that_are_no_unicode_are_told_and_do_no_harm(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "half \\ud800"}\n{"text": "Whole."}\n')
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("Coffee here.")
    found, skipped = read_all(tmp_path)
    assert [d.id for d in found] == ["caf\\udce9.txt", "t.jsonl#2"]
    assert skipped.counts == {"with broken characters": 1}
    assert write_index(tmp_path, tmp_path / "i")["documents"] == 2


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="an empty folder") as error:
        list_parts(tmp_path)
    assert ".txt, .text, .rst, .md," in error.value.fix
    with pytest.raises(CorpusError, match="no such folder"):
        list_parts(tmp_path / "nowhere")


def test_markdown_line_breaks_images_and_entities_become_words():
    text = "One  \ntwo\\\nthree\nfour &amp; `a < b` ![picture](x.png) [link](y)\n"
    assert parse_markdown(text)[1] == [TextBlock("", "One two three four & a < b link")]
