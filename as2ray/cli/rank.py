"""`as2ray rank`: ranks a file of candidates or passages for one question."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from as2ray.cli.console import parse_drop_ratios, read_lines
from as2ray.errors import CheckpointError, ConfigError, CorpusError
from as2ray.models.precision import Dtype
from as2ray.outputs import RankedCandidate, RankedPassage

if TYPE_CHECKING:
    from as2ray.models.ranker import Ranker


def rank(
    *,
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
        candidates: A file with one candidate per line; `-` reads standard input.
        passages: For a joint model, instead of candidates: a file with one passage per line, each
            a JSON list of its sentences; `-` reads standard input.
        top_k: Maximum number of results; by default all.
        dtype: Number format of matrix products.
        drop_ratio: Drop ratio instead of a cascade's own: 0.3 for all stages, or 0.3,0.5 for each.
        jsonl: Print one JSON object per line.
    """
    if passages is not None and (drop_ratio is not None or candidates != "-"):
        raise ConfigError(
            f"passages={passages} with drop_ratio={drop_ratio}, candidates={candidates}; "
            "--passages cannot be combined with the other two"
        )
    from as2ray.checkpoints.loading import load

    ranker = load(model, dtype=dtype)
    results: list[RankedCandidate | RankedPassage] = []
    if passages is None:
        drop_ratios = parse_drop_ratios(drop_ratio)
        results += ranker.rank(question, read_lines(candidates), top_k, drop_ratios)
    else:
        results += _rank_passages(ranker, model, question, passages, top_k)
    for position, result in enumerate(results, 1):
        if jsonl:
            sys.stdout.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{position:3d}  {_format_result(result)}\n")


def _rank_passages(
    ranker: "Ranker", model: str, question: str, path: str, top_k: int | None
) -> list[RankedPassage]:
    from as2ray.models.two_in_one import TwoInOneRanker

    if not isinstance(ranker, TwoInOneRanker):
        raise CheckpointError(
            f"{model} is a {type(ranker).__name__}; only a joint model (Two-in-One) ranks passages",
            fix="train one with pipelines.two_in_one, or give candidates",
        )
    texts = [_parse_passage(line, number) for number, line in enumerate(read_lines(path), 1)]
    return ranker.rank_passages(question, texts, top_k)


def _parse_passage(line: str, passage_number: int) -> list[str]:
    try:
        sentences: Any = json.loads(line)
    except json.JSONDecodeError:
        sentences = None
    is_list = isinstance(sentences, list) and bool(sentences)
    if not is_list or not all(isinstance(sentence, str) for sentence in sentences):
        raise CorpusError(
            f"passage {passage_number}: {line[:80]!r} is not a JSON list of sentences, such as "
            '["One.", "Two."]'
        )
    return list(sentences)


def _format_result(result: RankedCandidate | RankedPassage) -> str:
    if isinstance(result, RankedPassage):
        sentences = "".join(f"\n       {s.score:+.4f}  {s.text}" for s in result.sentences)
        return f"{result.score:+.4f}  passage {result.index}{sentences}"
    layer = "" if result.exit_layer is None else f"  layer {result.exit_layer:2d}"
    return f"{result.score:.4f}{layer}  {result.text}"
