"""Measures time and quality of ranking within a time budget, beside a blind cap.

    python -m benchmarks.budget --model RANKER --cascade CASCADE

The lists are the sentences of SQuAD's dev articles, at most `--candidates` of each, in BM25's order
(with `--small` those of the Python reference). The cascade passes as many as it can through each
exit. The ranker that it was made of scores as many of the first ones as there is time for, which is
what a user does without exits.
"""

import gc
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.checkpoints.loading import load
from as2ray.corpora.preparation import read_split
from as2ray.evaluation.measures import evaluate
from as2ray.models.ranker import Ranker
from as2ray.tables.schema import question_indices
from as2ray.text.bm25 import BM25
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

BUDGETS_MS = (25, 50, 100, 200, 500)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    if not args.small and not (args.data / "squad").is_dir():
        sys.exit("skipped: needs the articles of SQuAD under --data")
    rankers = {"cascade": load(args.cascade), "blind cap": load(args.model)}
    if args.small:
        args.questions, args.candidates = 2, 10
        rows = read_split("python_reference", "test")
    else:
        rows = read_split("squad", "dev", args.data / "squad", candidate_scope="article")
    table = _select_lists(rows, args.questions, args.candidates)
    results: dict[str, Any] = {"questions": args.questions, "candidates": args.candidates}
    bm25 = evaluate(table, -np.arange(len(table), dtype=float), ["AP"])
    results["BM25"] = bm25.measures["AP"]
    for budget_ms in (*BUDGETS_MS, None):
        name = "none" if budget_ms is None else f"{budget_ms} ms"
        results[name] = {
            side: _measure(ranker, table, budget_ms) for side, ranker in rankers.items()
        }
    write_report("budget", args, _list_claims(results), results)


def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="checkpoint of a pointwise ranker")
    parser.add_argument("--cascade", required=True, help="the cascade that was made of it")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=400, help="of a question, at most")


def _select_lists(rows: pa.Table, num_questions: int, num_candidates: int) -> pa.Table:
    """Returns some questions with the candidates that BM25 finds first."""
    questions = question_indices(rows)
    chosen = np.random.default_rng(0).permutation(questions[-1] + 1)[:num_questions]
    rows = rows.filter(pa.array(np.isin(questions, chosen)))
    questions = question_indices(rows)
    scores = BM25().score_candidates(rows)
    order = np.lexsort((-scores, questions))
    starts = np.searchsorted(questions[order], np.arange(questions[-1] + 1))
    ranks = np.arange(len(order)) - starts[questions[order]]
    return rows.take(pa.array(order[ranks < num_candidates]))


def _measure(ranker: Ranker, table: pa.Table, budget_ms: float | None) -> dict[str, float]:
    """Returns MAP, and percentiles of the time of a question."""
    questions = question_indices(table)
    starts = np.searchsorted(questions, np.arange(questions[-1] + 2))
    texts, scores, times_ms = table["candidate"].to_pylist(), np.empty(len(table)), []
    first = slice(*starts[:2])
    ranker.rank(table["question"][0].as_py(), texts[first], budget_ms=budget_ms)  # warm-up
    gc.disable()
    for start, end in pairwise(starts):
        question = table["question"][int(start)].as_py()
        started_at = time.perf_counter()
        ranking = ranker.rank(question, texts[start:end], budget_ms=budget_ms)
        times_ms.append(1e3 * (time.perf_counter() - started_at))
        scores[start + np.array([r.index for r in ranking])] = -np.arange(len(ranking))
    gc.enable()
    p50, p99 = np.percentile(times_ms, (50, 99))
    return {"MAP": evaluate(table, scores, ["AP"]).measures["AP"], "p50": p50, "p99": p99}


def _list_claims(results: dict[str, Any]) -> list[Claim]:
    claims = [Claim("MAP of BM25's order", f"{results['BM25']:.4f}", None)]
    for budget_ms in BUDGETS_MS:
        cascade, cap = (results[f"{budget_ms} ms"][side] for side in ("cascade", "blind cap"))
        limit_ms = 1.1 * budget_ms + 5
        claims += [
            Claim(
                f"{budget_ms} ms: p99 <= {limit_ms:g} ms",
                f"{cascade['p99']:.0f} ms; p50 {cascade['p50']:.0f} ms",
                bool(cascade["p99"] <= limit_ms),
            ),
            Claim(
                f"{budget_ms} ms: MAP at least that of the blind cap",
                f"{cascade['MAP']:.4f}; {cap['MAP']:.4f}",
                bool(cascade["MAP"] >= cap["MAP"]),
            ),
        ]
    for side, measured in results["none"].items():
        name = side.replace("blind cap", "ranker")
        shown = f"MAP {measured['MAP']:.4f}, p50 {measured['p50']:.0f} ms"
        claims.append(Claim(f"without a budget: {name}", shown, None))
    return claims


if __name__ == "__main__":
    main()
