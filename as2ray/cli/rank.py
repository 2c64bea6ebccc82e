"""`as2ray rank`: ranks a file of candidates or passages for one question."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat

from as2ray.cli.console import parse_drop_ratios, read_lines
from as2ray.errors import CheckpointError, ConfigError, CorpusError
from as2ray.models.precision import Dtype
from as2ray.outputs import RankedCandidate, RankedPassage
from as2ray.text.input_checks import check_top_k

if TYPE_CHECKING:
    from as2ray.models.ranker import Ranker

UNSCORED_LOGIT = -80.0
"""Highest logit of a candidate for which there was no time, whose score is 0; BM25 gives more."""


def rank(
    *,
    model: str,
    question: str,
    candidates: str = "-",
    passages: str | None = None,
    top_k: int | None = None,
    dtype: Dtype = "auto",
    drop_ratio: str | None = None,
    budget_ms: PositiveFloat | None = None,
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
        budget_ms: Milliseconds in which the candidates should be ranked; see `Ranker.rank`.
        jsonl: Print one JSON object per line.
    """
    of_candidates = {"drop_ratio": drop_ratio, "budget_ms": budget_ms}
    if passages is not None and (any(of_candidates.values()) or candidates != "-"):
        raise ConfigError(
            f"passages={passages} with drop_ratio={drop_ratio}, budget_ms={budget_ms}, "
            f"candidates={candidates}; --passages cannot be combined with the others"
        )
    from as2ray.checkpoints.loading import load
    from as2ray.models.cascade import CascadeRanker

    ranker = load(model, dtype=dtype)
    results: list[RankedCandidate | RankedPassage] = []
    if passages is None:
        drop_ratios = parse_drop_ratios(drop_ratio)
        check_top_k(top_k)
        ranking = ranker.rank(question, read_lines(candidates), None, drop_ratios, budget_ms)
        if isinstance(ranker, CascadeRanker) and ranking:
            sys.stderr.write(_describe_exits(ranking, ranker.exit_layers) + "\n")
        results += ranking[:top_k]
    else:
        results += _rank_passages(ranker, model, question, passages, top_k)
    if not results:
        source = candidates if passages is None else passages
        name = "standard input" if source == "-" else source
        raise CorpusError(f"{name} has no line with a text, so there is nothing to rank")
    for position, result in enumerate(results, 1):
        if jsonl:
            sys.stdout.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{position:3d}  {_format_result(result)}\n")


def _describe_exits(ranking: Sequence[RankedCandidate], exit_layers: Sequence[int]) -> str:
    """Returns how many candidates left after which exit, and the share of the layers that ran."""
    layers = [candidate.exit_layer or 0 for candidate in ranking]
    unscored = [
        each
        for each in ranking
        if not each.exit_layer and each.score <= (UNSCORED_LOGIT if each.is_logit else 0)
    ]
    num_dropped = layers.count(0) - len(unscored)
    counts = [f"{len(unscored)} were not scored"] if unscored else []
    counts += [f"{num_dropped} left before layer 1"] if num_dropped else []
    counts += [f"{layers.count(layer)} left after layer {layer}" for layer in exit_layers[:-1]]
    counts.append(f"{layers.count(exit_layers[-1])} passed all {exit_layers[-1]}")
    share = sum(layers) / (len(layers) * exit_layers[-1])
    return f"{'; '.join(counts)}: {share:.0%} of the layers"


def _rank_passages(
    ranker: "Ranker", model: str, question: str, path: str, top_k: int | None
) -> list[RankedPassage]:
    from as2ray.models.two_in_one import TwoInOneRanker

    if not isinstance(ranker, TwoInOneRanker):
        raise CheckpointError(
            f"{model} is a {type(ranker).__name__}; only a joint model (Two-in-One) ranks passages",
            fix="train one with pipelines.two_in_one, or give candidates",
        )
    texts = [_parse_passage(line, number) for number, line in enumerate(read_lines(path))]
    return ranker.rank_passages(question, texts, top_k)


def _parse_passage(line: str, passage_number: int) -> list[str]:
    try:
        sentences: Any = json.loads(line)
        "".join(sentences).encode()  # refuses what is no text, and half characters
    except (ValueError, TypeError, RecursionError):
        sentences = None
    if not sentences or not isinstance(sentences, list):
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
