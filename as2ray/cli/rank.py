"""`as2ray rank`: one question, a file of candidates or of passages."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from as2ray.cli.console import parse_drop_ratios
from as2ray.errors import CheckpointError, ConfigError, CorpusError
from as2ray.models.ranker import Dtype, Ranker
from as2ray.outputs import RankedCandidate, RankedPassage


def rank(
    model: str,
    question: str,
    candidates: str = "-",
    passages: str | None = None,
    top_k: int | None = None,
    dtype: Dtype = "auto",
    drop_ratio: str | None = None,
    jsonl: bool = False,
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
    if passages is not None and (drop_ratio is not None or candidates != "-"):
        raise ConfigError(
            f"passages={passages} with drop={drop_ratio}, candidates={candidates}"
            "; expected passages alone, or candidates with drop ratios",
        )
    from as2ray.checkpoints.loading import load

    ranker = load(model, dtype=dtype)
    found: list[RankedCandidate | RankedPassage] = []
    if passages is None:
        found += ranker.rank(
            question, _read_lines(candidates), top_k, parse_drop_ratios(drop_ratio)
        )
    else:
        found += _rank_passages(ranker, model, question, passages, top_k)
    for place, one in enumerate(found, 1):
        if jsonl:
            sys.stdout.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{place:3d}  {_format_result(one)}\n")


def _rank_passages(
    ranker: Ranker, model: str, question: str, path: str, top_k: int | None
) -> list[RankedPassage]:
    from as2ray.models.two_in_one import TwoInOneRanker

    if not isinstance(ranker, TwoInOneRanker):
        raise CheckpointError(
            f"passages for {model}, a {type(ranker).__name__}; expected a joint model (Two-in-One)",
            fix="train one with pipelines.two_in_one, or give candidates",
        )
    texts = [_parse_passage(line, number) for number, line in enumerate(_read_lines(path), 1)]
    return ranker.rank_passages(question, texts, top_k)


def _parse_passage(line: str, passage_number: int) -> list[str]:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError:
        found = line
    fine = isinstance(found, list) and found and all(isinstance(text, str) for text in found)
    if not fine:
        raise CorpusError(
            f"passage {passage_number}: {line[:80]!r}"
            '; expected a JSON list of sentences, such as ["One.", "Two."]',
            fix="write one such list a line",
        )
    return list(found)


def _read_lines(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{path}: {error}; expected a file of UTF-8 text",
            fix="check the path",
        ) from error
    # A sentence may hold what `splitlines` takes for an end, such as U+2028.
    lines = text.removeprefix("\ufeff").split("\n")  # the mark that some editors begin a file with
    return [line.strip() for line in lines if line.strip()]


def _format_result(result: RankedCandidate | RankedPassage) -> str:
    if isinstance(result, RankedPassage):
        inside = "".join(f"\n       {s.score:+.4f}  {s.text}" for s in result.sentences)
        return f"{result.score:+.4f}  passage {result.index}{inside}"
    layer = "" if result.exit_layer is None else f"  layer {result.exit_layer:2d}"
    return f"{result.score:.4f}{layer}  {result.text}"
