"""`as2ray rank`: one question, a file of candidates."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from as2ray.commands.shown import ratios_of
from as2ray.models.ranker import Precision


def rank(
    model: str,
    question: str,
    candidates: str = "-",
    top_k: int | None = None,
    precision: Precision = "auto",
    drop: str | None = None,
    json_lines: bool = False,
) -> None:
    """Ranks sentences by how well they answer a question.

    Args:
        model: Checkpoint folder or hub id.
        question: The question.
        candidates: A file with one candidate a line; `-` reads standard input.
        top_k: How many to show.
        precision: Number format of the matrix products.
        drop: Other drop ratios than a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        json_lines: Print one JSON object a line.
    """
    from as2ray.checkpoint import load

    text = sys.stdin.read() if candidates == "-" else Path(candidates).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ranked = load(model, precision=precision).rank(question, lines, top_k, ratios_of(drop))
    for place, found in enumerate(ranked, 1):
        if json_lines:
            sys.stdout.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")
        else:
            layer = "" if found.exit_layer is None else f"  layer {found.exit_layer:2d}"
            sys.stdout.write(f"{place:3d}  {found.score:.4f}{layer}  {found.text}\n")
