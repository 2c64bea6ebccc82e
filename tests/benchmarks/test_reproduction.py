"""The page of what is built is that of its data, and names recipes that exist."""

import re
from pathlib import Path

from benchmarks.reproduction import DOCS, STATES, read_rows, render

RECIPES = {path.stem for path in Path("pipelines/recipes").glob("*.yaml")}


def test_page_is_rendered_from_the_data():
    assert (DOCS / "reproduction.md").read_text() == render(read_rows())


def test_every_row_has_a_state_and_a_reason_where_it_is_not_ok():
    rows = read_rows()
    assert [row["id"] for row in rows] == list(range(1, 176))
    assert {row["state"] for row in rows} == set(STATES)
    assert not [row["id"] for row in rows if row["state"] != "ok" and not row.get("note")]


def test_recipes_that_rows_name_exist():
    named = set()
    for row in read_rows():
        for word in re.split(r"[ ,:]+", row.get("where", "")):
            if re.match(r"(cascade|cerberus|tanda|two_in_one|pseudo_label|mokrii)_", word):
                named.add(word)
    missing = [
        name
        for name in named
        if not any(re.fullmatch(name.replace("*", r"\w*"), recipe) for recipe in RECIPES)
    ]
    assert not missing
