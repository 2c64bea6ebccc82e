"""Renders docs/reproduction.md: what of the five papers is built, recipes, sizes of their data.

python -m benchmarks.reproduction
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from as2ray.corpora.registry import CORPORA
from as2ray.evaluation.report import markdown_table

DOCS = Path(__file__).parents[1] / "docs"
RECIPES = Path(__file__).parents[1] / "pipelines" / "recipes"
STATES = ("ok", "deviates", "absent", "private")
"""As the paper says, or as its recipe's header says; otherwise; not at all; closed data."""


HEADER_FIELDS = ("Reproduces", "Settings", "Deviates in", "Needs")
"""Fields of the comment that every recipe begins with."""


def read_rows() -> list[dict[str, Any]]:
    """Returns the rows of docs/reproduction.yaml."""
    rows: list[dict[str, Any]] = yaml.safe_load((DOCS / "reproduction.yaml").read_text())["rows"]
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """Returns the page: the number of rows in each state, then the rows of each paper."""
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    counts = {paper: Counter(r["state"] for r in rows if r["paper"] == paper) for paper in papers}
    totals = [(p, *(str(counts[p][state]) for state in STATES)) for p in papers]
    totals.append(("all", *(str(sum(c[state] for c in counts.values())) for state in STATES)))
    parts = [
        "# What of the papers is built",
        "`python -m benchmarks.reproduction` writes this page from `reproduction.yaml`. **ok**: as "
        "the paper says, or as the header of the recipe says, with the reason. **deviates**: in "
        "another way. **private**: it needs data that is not public. *Where* names modules of "
        "`as2ray/` and recipes of `pipelines/recipes/`. We had a GPU for minutes, not for the "
        "hours of a table at its paper's size. What was run is in [Results](results.md).",
        markdown_table(("paper", *STATES), totals),
    ]
    for paper in papers:
        keys = ("id", "section", "item", "state", "where", "note")
        cells = [
            tuple(str(row.get(key, "")) for key in keys) for row in rows if row["paper"] == paper
        ]
        parts += [f"## {paper}", markdown_table(("#", *keys[1:]), cells)]
    return "\n\n".join([*parts, *render_recipes(), *render_data_tables()]) + "\n"


def read_header(text: str) -> dict[str, str]:
    """Returns the fields of a recipe's header; lines of a field stay apart."""
    lines = text.splitlines()
    block = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    joined = "\n".join(line[1:].strip() for line in block)
    parts = re.split(rf"^({'|'.join(HEADER_FIELDS)}):\s*", joined, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def list_deviations(header: Mapping[str, str]) -> list[str]:
    """Returns what a recipe does otherwise than its paper, each with its reason."""
    items = re.split(r"^- ", header.get("Deviates in", ""), flags=re.MULTILINE)[1:]
    return [" ".join(item.split()) for item in items]


def render_recipes() -> list[str]:
    """Returns the section of the recipes: tables, printed cells, and whether they were run."""
    rows = []
    for path in sorted(RECIPES.glob("*.yaml")):
        text = path.read_text()
        header, recipe = read_header(text), yaml.safe_load(text)
        deviations = list_deviations(header)
        runs = [item for item in deviations if "run by us" in item]
        published = recipe.get("published_results", {})
        num_cells = sum(
            len(published[test][name])
            for test, pairs in recipe.get("reproduces", {}).items()
            for name in pairs.values()
        )
        num_cells += len(recipe.get("few_shot", {}).get("published_results", {}))
        title = " ".join(header["Reproduces"].split()).rstrip(".")
        num_others = len(deviations) - len(runs)
        rows.append((path.stem, title, str(num_cells), str(num_others), *(runs or ["yes"])))
    columns = ("recipe", "what", "printed cells", "deviations", "run by us")
    return [
        "## Recipes",
        "Printed cells stand beside ours in the reports, with the difference; claims are computed "
        "against the recipe's baseline. The header of a recipe has each deviation with its reason.",
        markdown_table(columns, rows),
    ]


def render_data_tables() -> list[str]:
    """Returns the section of published sizes, which a split must have when it is prepared."""
    rows, collections = [], []
    for corpus in CORPORA.values():
        for entry in corpus.published_counts:
            options = (f"{name}: {value}" for name, value in entry.options.items())
            counts = entry.counts
            numbers = (counts.num_questions, counts.num_pairs, counts.num_positives)
            rows.append(
                (
                    corpus.name,
                    entry.split,
                    ", ".join([entry.question_filter, *options]),
                    *(f"{number:,}" for number in numbers),
                    f"{counts.num_pairs / counts.num_questions:.1f}",
                    f"{counts.num_positives / counts.num_questions:.1f}",
                    "no" if entry.is_private else "yes",
                )
            )
        for name, (size, _) in corpus.collection_sizes.items():
            collections.append((corpus.name, name, f"{size:,}"))
    columns = ("corpus", "split", "filter", "questions", "pairs", "positives")
    return [
        "## Data tables",
        "Sizes that papers and publishers print (TANDA, Tables 1 and 2; Cascade Transformer and "
        "CERBERUS, Table 1). A split that is prepared must have them; "
        "`as2ray corpora verify` compares the releases at hand, also those of HotpotQA, SQuAD and "
        "others whose counts are of files; `as2ray corpora stats` has lengths.",
        markdown_table((*columns, "pairs a question", "positives a question", "public"), rows),
        "Texts of whole collections, as Mokrii et al. round them (Table 2):",
        markdown_table(("corpus", "collection", "texts"), collections),
    ]


if __name__ == "__main__":
    (DOCS / "reproduction.md").write_text(render(read_rows()), encoding="utf-8")
