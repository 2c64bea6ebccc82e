"""`as2ray rank`: one question, a file of candidates or of passages."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from as2ray.commands.shown import ratios_of
from as2ray.errors import CheckpointError, CorpusError, RecipeError
from as2ray.models.ranker import Precision, Ranker
from as2ray.records import Ranked, RankedPassage


def rank(
    model: str,
    question: str,
    candidates: str = "-",
    passages: str | None = None,
    top_k: int | None = None,
    precision: Precision = "auto",
    drop: str | None = None,
    json_lines: bool = False,
) -> None:
    """Ranks sentences by how well they answer a question, or passages with their best sentences.

    Args:
        model: Checkpoint folder or hub id.
        question: The question.
        candidates: A file with one candidate a line; `-` reads standard input.
        passages: Instead, for a joint model: a file with one passage a line, a JSON list of its
            sentences; `-` reads standard input.
        top_k: How many to show.
        precision: Number format of the matrix products.
        drop: Other drop ratios than a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        json_lines: Print one JSON object a line.
    """
    if passages is not None and (drop is not None or candidates != "-"):
        raise RecipeError(
            f"passages={passages} with drop={drop}, candidates={candidates}",
            expected="passages alone, or candidates with drop ratios",
            mend="leave one out",
        )
    from as2ray.checkpoint import load

    ranker = load(model, precision=precision)
    found: list[Ranked | RankedPassage] = []
    if passages is None:
        found += ranker.rank(question, _lines(candidates), top_k, ratios_of(drop))
    else:
        found += _passages(ranker, model, question, passages, top_k)
    for place, one in enumerate(found, 1):
        if json_lines:
            sys.stdout.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{place:3d}  {_shown(one)}\n")


def _passages(
    ranker: Ranker, model: str, question: str, source: str, top_k: int | None
) -> list[RankedPassage]:
    from as2ray.models.two_in_one import TwoInOneRanker

    if not isinstance(ranker, TwoInOneRanker):
        raise CheckpointError(
            f"passages for {model}, a {type(ranker).__name__}",
            expected="a joint model (Two-in-One)",
            mend="train one with pipelines.two_in_one, or give candidates",
        )
    texts = [_passage(line, number) for number, line in enumerate(_lines(source), 1)]
    return ranker.rank_passages(question, texts, top_k)


def _passage(line: str, number: int) -> list[str]:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError:
        found = line
    fine = isinstance(found, list) and found and all(isinstance(text, str) for text in found)
    if not fine:
        raise CorpusError(
            f"passage {number}: {line[:80]!r}",
            expected='a JSON list of sentences, such as ["One.", "Two."]',
            mend="write one such list a line",
        )
    return list(found)


def _lines(source: str) -> list[str]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{source}: {error}", expected="a file of UTF-8 text", mend="check the path"
        ) from error
    # A sentence may hold what `splitlines` takes for an end, such as U+2028.
    lines = text.removeprefix("\ufeff").split("\n")  # the mark that some editors begin a file with
    return [line.strip() for line in lines if line.strip()]


def _shown(found: Ranked | RankedPassage) -> str:
    if isinstance(found, RankedPassage):
        inside = "".join(f"\n       {s.score:+.4f}  {s.text}" for s in found.sentences)
        return f"{found.score:+.4f}  passage {found.index}{inside}"
    layer = "" if found.exit_layer is None else f"  layer {found.exit_layer:2d}"
    return f"{found.score:.4f}{layer}  {found.text}"
