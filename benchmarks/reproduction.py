"""Renders docs/reproduction.md: what of the five papers is built, row by row.

python -m benchmarks.reproduction
"""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from as2ray.evaluation.report import markdown_table

DOCS = Path(__file__).parents[1] / "docs"
STATES = ("ok", "deviates", "absent", "private")
"""As the paper says, or as its recipe's header says; otherwise; not at all; closed data."""


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
        "Rendered from `reproduction.yaml` by `python -m benchmarks.reproduction`. ok: as the "
        "paper says, or with a deviation that the recipe's header names with its reason; private: "
        "on closed data. Modules are those of `as2ray/`, recipes those of `pipelines/recipes/`. No "
        "table of a paper was run by us at its size, for which there was no GPU; `results.md` has "
        "what was run.",
        markdown_table(("paper", *STATES), totals),
    ]
    for paper in papers:
        keys = ("id", "section", "item", "state", "where", "note")
        cells = [
            tuple(str(row.get(key, "")) for key in keys) for row in rows if row["paper"] == paper
        ]
        parts += [f"## {paper}", markdown_table(("#", *keys[1:]), cells)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (DOCS / "reproduction.md").write_text(render(read_rows()), encoding="utf-8")
