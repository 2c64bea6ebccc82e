"""Measures indexing and search against bm25s alone and rank_bm25, and `ask` end to end.

All systems index the same sentences; those for rank_bm25 are split into words by our tokenizer,
which is not timed. bm25s alone has its defaults: `index`, and `retrieve` of the top 100 for one
query at a time. rank_bm25 gets few queries, because it takes seconds per query to score a million
sentences.
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
    """Size of a run."""

    num_sentences: int
    num_repeats: int
    num_queries: int
    """Queries per repeat."""
    num_rank_bm25_queries: int
    """Queries per repeat of rank_bm25."""
    num_ask_questions: int
    """Questions that `ask` answers end to end."""


FULL = Size(1_000_000, 3, 200, 3, 200)
SMALL = Size(2_000, 1, 10, 3, 2)


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
        ask_results = _measure_ask(Path(folder), texts, questions[: size.num_ask_questions])
    results["ask"] = ask_results
    claims.append(
        Claim(
            f"ask over {len(texts):,} sentences: p50 and p95 in ms",
            f"{ask_results['p50']:.0f}, {ask_results['p95']:.0f}; "
            f"retrieval {ask_results['retrieval share']:.0%} of the time",
            None,
        )
    )
    write_report("retrieval", args, claims, results)


def _compare(
    texts: list[str], questions: list[str], size: Size
) -> tuple[dict[str, Any], list[Claim]]:
    bm25, bm25s_alone = BM25(), bm25s.BM25(k1=BM25.k1, b=BM25.b)
    words = bm25.tokenize(texts)
    index_alone, index_rank = measure_alternately(
        _build_workload(lambda: bm25.build_index(texts), len(texts)),
        [
            _build_workload(lambda: _index_with_bm25s(bm25s_alone, texts), len(texts)),
            _build_workload(lambda: BM25Okapi(words), len(texts)),
        ],
        size.num_repeats,
        warm_up=False,
    )
    index, okapi = bm25.build_index(texts), BM25Okapi(words)
    random = np.random.default_rng(0)
    queries = [questions[i] for i in random.integers(len(questions), size=size.num_queries)]
    few_queries = queries[: size.num_rank_bm25_queries]
    search_alone, search_rank = measure_alternately(
        _build_workload(lambda: [index.search(q, TOP_K) for q in queries], len(queries)),
        [
            _build_workload(
                lambda: [_search_with_bm25s(bm25s_alone, q, len(texts)) for q in queries],
                len(queries),
            ),
            _build_workload(
                lambda: [okapi.get_top_n(w, texts, TOP_K) for w in bm25.tokenize(few_queries)],
                len(few_queries),
            ),
        ],
        size.num_repeats,
    )
    ratios = {
        "index, to bm25s alone": index_alone,
        "index, to rank_bm25": index_rank,
        "search, to bm25s alone": search_alone,
        "search, to rank_bm25": search_rank,
    }
    claims = [_build_claim(name, ratio, len(texts)) for name, ratio in ratios.items()]
    return {name: ratio.as_json() for name, ratio in ratios.items()}, claims


def _build_claim(name: str, ratio: SpeedRatio, num_sentences: int) -> Claim:
    claim = f"{name}, {num_sentences:,} sentences"
    if "alone" not in name:
        return Claim(claim, str(ratio), None)
    return Claim(f"{claim}: >= 0.9 x", str(ratio), ratio.median >= 0.9)


def _build_workload(function: Callable[[], Any], num_units: int) -> Callable[[], float]:
    def workload() -> float:
        started_at = time.perf_counter()
        function()
        return num_units / (time.perf_counter() - started_at)

    return workload


def _index_with_bm25s(retriever: bm25s.BM25, texts: list[str]) -> None:
    retriever.index(bm25s.tokenize(texts, stopwords=None, show_progress=False), show_progress=False)


def _search_with_bm25s(retriever: bm25s.BM25, question: str, num_texts: int) -> Any:
    words = bm25s.tokenize([question], stopwords=None, return_ids=False, show_progress=False)
    return retriever.retrieve(words, k=min(TOP_K, num_texts), show_progress=False)


def _measure_ask(folder: Path, texts: list[str], questions: list[str]) -> dict[str, float]:
    """Measures the milliseconds of `ask` with the packaged MiniLM, and the share of retrieval."""
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    write_index(folder / "texts.parquet", folder / "index", IndexConfig(sentence_splitter="lines"))
    path = save(init_ranker(packaged_minilm(), max_length=128), folder / "ranker")
    answerer = QuestionAnswerer(SentenceIndex.open(folder / "index"), load(path))
    answerer.ask(questions[0])
    total_ms, retrieval_ms = [], []
    for question in questions:
        started_at = time.perf_counter()
        answer = answerer.ask(question)
        total_ms.append(1e3 * (time.perf_counter() - started_at))
        retrieval_ms.append(1e3 * answer.retrieval_time_s)
    return {
        "questions": len(questions),
        "p50": float(np.percentile(total_ms, 50)),
        "p95": float(np.percentile(total_ms, 95)),
        "retrieval share": sum(retrieval_ms) / sum(total_ms),
    }


if __name__ == "__main__":
    main()
