"""Indexing and searching sentences: our layer against bm25s alone and rank_bm25; `ask` end to end.

Knows our index, bm25s and rank_bm25. Must not know Ray: every side runs in this process.

All sides read the same sentences in the same words, for rank_bm25 split by our tokeniser before its
clock starts. bm25s alone has its defaults: `index` and, a query at a time, `retrieve` of the top
100. rank_bm25 scores a million sentences in seconds a query: it gets few.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rank_bm25 import BM25Okapi

from as2ray import checkpoint
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.packaged import minilm
from as2ray.retrieval.answers import Answerer
from as2ray.retrieval.bm25 import BM25
from as2ray.retrieval.build import Settings, build
from as2ray.retrieval.index import SentenceIndex
from as2ray.text.files import PairFiles
from benchmarks import asnq_shaped
from benchmarks.report import Claim, arguments, finish, hold_to_cores

TOP = 100


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    sentences: int
    repeats: int
    queries: int
    """Of a repeat."""
    few: int
    """Of a repeat of rank_bm25."""
    asked: int
    """Questions end to end."""


FULL = Size(1_000_000, 3, 200, 3, 200)
SMALL = Size(2_000, 1, 10, 3, 5)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    hold_to_cores(args.cores)
    if not args.small and not asnq_shaped.present(args.data):
        sys.exit("skipped: needs the questions of ASNQ and the articles of SQuAD under --data")
    with TemporaryDirectory(prefix="as2ray-retrieval-") as folder:
        rows = asnq_shaped.write(
            Path(folder) / "rows", size.sentences, None if args.small else args.data
        )
        table = PairFiles.find(rows).table()
        texts = table["candidate"].to_pylist()
        questions = list(dict.fromkeys(table["question"].to_pylist()))
        results, claims = _compared(texts, questions, size)
        asked = _asked(Path(folder), texts, questions[: size.asked])
    results["ask"] = asked
    claims.append(
        Claim(
            f"ask over {len(texts):,} sentences: p50 and p95 in ms",
            f"{asked['p50']:.0f}, {asked['p95']:.0f}; "
            f"retrieval {asked['retrieval share']:.0%} of the time",
            None,
        )
    )
    finish("retrieval", args, claims, results)


def _compared(
    texts: list[str], questions: list[str], size: Size
) -> tuple[dict[str, Any], list[Claim]]:
    ours, alone = BM25(), bm25s.BM25(k1=BM25.k1, b=BM25.b)
    words = ours.words(texts)
    index_alone, index_rank = alternate(
        _timed(lambda: ours.index(texts), len(texts)),
        [
            _timed(lambda: _index_alone(alone, texts), len(texts)),
            _timed(lambda: BM25Okapi(words), len(texts)),
        ],
        size.repeats,
        warm_up=False,
    )
    index, okapi = ours.index(texts), BM25Okapi(words)
    random = np.random.default_rng(0)
    drawn = [questions[i] for i in random.integers(len(questions), size=size.queries)]
    few = drawn[: size.few]
    search_alone, search_rank = alternate(
        _timed(lambda: [index.top(q, TOP) for q in drawn], len(drawn)),
        [
            _timed(lambda: [_search_alone(alone, q, len(texts)) for q in drawn], len(drawn)),
            _timed(lambda: [okapi.get_top_n(w, texts, TOP) for w in ours.words(few)], len(few)),
        ],
        size.repeats,
    )
    pairs = {
        "index, to bm25s alone": index_alone,
        "index, to rank_bm25": index_rank,
        "search, to bm25s alone": search_alone,
        "search, to rank_bm25": search_rank,
    }
    claims = [_claim(name, ratio, len(texts)) for name, ratio in pairs.items()]
    return {name: ratio.as_json() for name, ratio in pairs.items()}, claims


def _claim(name: str, ratio: Ratio, sentences: int) -> Claim:
    least = 0.9 if "alone" in name else None
    told = f"{name}, {sentences:,} sentences" + ("" if least is None else ": >= 0.9 x")
    return Claim(told, str(ratio), None if least is None else ratio.median >= least)


def _timed(work: Callable[[], Any], units: int) -> Callable[[], float]:
    def side() -> float:
        began = time.perf_counter()
        work()
        return units / (time.perf_counter() - began)

    return side


def _index_alone(retriever: bm25s.BM25, texts: list[str]) -> None:
    retriever.index(bm25s.tokenize(texts, stopwords=None, show_progress=False), show_progress=False)


def _search_alone(retriever: bm25s.BM25, question: str, texts: int) -> Any:
    words = bm25s.tokenize([question], stopwords=None, return_ids=False, show_progress=False)
    return retriever.retrieve(words, k=min(TOP, texts), show_progress=False)


def _asked(folder: Path, texts: list[str], questions: list[str]) -> dict[str, float]:
    """Milliseconds of `ask` with the packaged MiniLM, and where they go."""
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    build(folder / "texts.parquet", folder / "index", Settings(splitter="lines"))
    path = checkpoint.save(checkpoint.start(minilm(), max_length=128), folder / "ranker")
    answerer = Answerer(SentenceIndex.open(folder / "index"), checkpoint.load(path))
    answerer.ask(questions[0])
    whole, retrieval = [], []
    for question in questions:
        began = time.perf_counter()
        reply = answerer.ask(question)
        whole.append(1e3 * (time.perf_counter() - began))
        retrieval.append(1e3 * reply.retrieval_seconds)
    return {
        "questions": len(questions),
        "p50": float(np.percentile(whole, 50)),
        "p95": float(np.percentile(whole, 95)),
        "retrieval share": sum(retrieval) / sum(whole),
    }


if __name__ == "__main__":
    main()
