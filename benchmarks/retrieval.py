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

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.question_answering import QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.parquet import ParquetTable
from as2ray.text.bm25 import BM25
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

TOP_K = 100


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    num_sentences: int
    num_repeats: int
    num_queries: int
    """Of a repeat."""
    num_rank_bm25_queries: int
    """Of a repeat of rank_bm25."""
    num_ask_questions: int
    """Questions end to end."""


FULL = Size(1_000_000, 3, 200, 3, 200)
SMALL = Size(2_000, 1, 10, 3, 5)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    if not args.small and not asnq_shaped.has_source_files(args.data):
        sys.exit("skipped: needs the questions of ASNQ and the articles of SQuAD under --data")
    with TemporaryDirectory(prefix="as2ray-retrieval-") as folder:
        rows = asnq_shaped.write_corpus(
            Path(folder) / "rows", size.num_sentences, None if args.small else args.data
        )
        table = ParquetTable.open(rows).to_table()
        texts = table["candidate"].to_pylist()
        questions = list(dict.fromkeys(table["question"].to_pylist()))
        results, claims = _compare(texts, questions, size)
        asked = _measure_ask(Path(folder), texts, questions[: size.num_ask_questions])
    results["ask"] = asked
    claims.append(
        Claim(
            f"ask over {len(texts):,} sentences: p50 and p95 in ms",
            f"{asked['p50']:.0f}, {asked['p95']:.0f}; "
            f"retrieval {asked['retrieval share']:.0%} of the time",
            None,
        )
    )
    write_report("retrieval", args, claims, results)


def _compare(
    texts: list[str], questions: list[str], size: Size
) -> tuple[dict[str, Any], list[Claim]]:
    ours, alone = BM25(), bm25s.BM25(k1=BM25.k1, b=BM25.b)
    words = ours.tokenize(texts)
    index_alone, index_rank = measure_alternately(
        _build_workload(lambda: ours.build_index(texts), len(texts)),
        [
            _build_workload(lambda: _index_with_bm25s(alone, texts), len(texts)),
            _build_workload(lambda: BM25Okapi(words), len(texts)),
        ],
        size.num_repeats,
        warm_up=False,
    )
    index, okapi = ours.build_index(texts), BM25Okapi(words)
    random = np.random.default_rng(0)
    drawn = [questions[i] for i in random.integers(len(questions), size=size.num_queries)]
    few = drawn[: size.num_rank_bm25_queries]
    search_alone, search_rank = measure_alternately(
        _build_workload(lambda: [index.search(q, TOP_K) for q in drawn], len(drawn)),
        [
            _build_workload(
                lambda: [_search_with_bm25s(alone, q, len(texts)) for q in drawn], len(drawn)
            ),
            _build_workload(
                lambda: [okapi.get_top_n(w, texts, TOP_K) for w in ours.tokenize(few)], len(few)
            ),
        ],
        size.num_repeats,
    )
    pairs = {
        "index, to bm25s alone": index_alone,
        "index, to rank_bm25": index_rank,
        "search, to bm25s alone": search_alone,
        "search, to rank_bm25": search_rank,
    }
    claims = [_build_claim(name, ratio, len(texts)) for name, ratio in pairs.items()]
    return {name: ratio.as_json() for name, ratio in pairs.items()}, claims


def _build_claim(name: str, ratio: SpeedRatio, num_sentences: int) -> Claim:
    least = 0.9 if "alone" in name else None
    told = f"{name}, {num_sentences:,} sentences" + ("" if least is None else ": >= 0.9 x")
    return Claim(told, str(ratio), None if least is None else ratio.median >= least)


def _build_workload(function: Callable[[], Any], num_units: int) -> Callable[[], float]:
    def side() -> float:
        began = time.perf_counter()
        function()
        return num_units / (time.perf_counter() - began)

    return side


def _index_with_bm25s(retriever: bm25s.BM25, texts: list[str]) -> None:
    retriever.index(bm25s.tokenize(texts, stopwords=None, show_progress=False), show_progress=False)


def _search_with_bm25s(retriever: bm25s.BM25, question: str, num_texts: int) -> Any:
    words = bm25s.tokenize([question], stopwords=None, return_ids=False, show_progress=False)
    return retriever.retrieve(words, k=min(TOP_K, num_texts), show_progress=False)


def _measure_ask(folder: Path, texts: list[str], questions: list[str]) -> dict[str, float]:
    """Milliseconds of `ask` with the packaged MiniLM, and where they go."""
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    write_index(folder / "texts.parquet", folder / "index", IndexConfig(sentence_splitter="lines"))
    path = save(init_ranker(packaged_minilm(), max_length=128), folder / "ranker")
    answerer = QuestionAnswerer(SentenceIndex.open(folder / "index"), load(path))
    answerer.ask(questions[0])
    whole, retrieval = [], []
    for question in questions:
        began = time.perf_counter()
        reply = answerer.ask(question)
        whole.append(1e3 * (time.perf_counter() - began))
        retrieval.append(1e3 * reply.retrieval_time_s)
    return {
        "questions": len(questions),
        "p50": float(np.percentile(whole, 50)),
        "p95": float(np.percentile(whole, 95)),
        "retrieval share": sum(retrieval) / sum(whole),
    }


if __name__ == "__main__":
    main()
