"""Measures time and quality of ranking within a time budget, beside a blind cap.

    python -m benchmarks.budget --model RANKER --cascade CASCADE [--http]

The lists are the sentences of SQuAD's dev articles, at most `--candidates` of each, in BM25's order
(with `--small` those of the Python reference). The cascade passes as many as it can through each
exit. The ranker that it was made of scores as many of the first ones as there is time for, which is
what a user does without exits. `--encoder` adds the order of an encoder's cosine, and of its sum
with BM25, with embeddings of the sentences that were stored before, as an index has them. With
`--http`, 8 clients at the same time ask a service, and a budget counts from the arrival of a
request.
"""

import gc
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.corpora.preparation import read_split
from as2ray.evaluation.measures import evaluate
from as2ray.models.sentence_encoder import SentenceEncoder
from as2ray.retrieval.answer_scoring import DEFAULT_WEIGHTS, AnswerScoring
from as2ray.tables.schema import question_indices, question_offsets
from as2ray.text.bm25 import BM25
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.service import run_service, serve_command

BUDGETS_MS = (25, 50, 100, 200, 500)

TIMEOUT_S = 120.0
"""Of a request over HTTP: eight without a budget wait for one another."""

UNTRAINED = {"cosine": ("similarity",), "hybrid": ("similarity", "bm25")}
"""Parts of the scores of what ranks without training."""

RankWithin = Callable[[str, list[str], float | None], list[int]]
"""Returns the order in which the candidates of a question are ranked within a budget in ms."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    if not args.small and not (args.data / "squad").is_dir():
        sys.exit("skipped: needs the articles of SQuAD under --data")
    if args.small:
        args.questions, args.candidates = 2, 10
        rows = read_split("python_reference", "test")
    else:
        rows = read_split("squad", "dev", args.data / "squad", candidate_scope="article")
    table = _select_lists(rows, args.questions, args.candidates)
    results: dict[str, Any] = {"questions": args.questions, "candidates": args.candidates}
    bm25 = evaluate(table, -np.arange(len(table), dtype=float), ["AP"])
    results["BM25"] = bm25.measures["AP"]
    results["clients"] = num_clients = args.clients if args.http else 1
    if args.encoder:
        encoder = load_sentence_encoder(args.encoder)
        for name, parts in UNTRAINED.items():
            results[name] = _measure(_rank_untrained(encoder, table, parts), table, None, 1)
    for side in ("cascade", "blind cap"):
        with _open_ranker(args, side) as rank:
            for budget_ms in (*BUDGETS_MS, None):
                name = "none" if budget_ms is None else f"{budget_ms} ms"
                measured = _measure(rank, table, budget_ms, num_clients)
                results.setdefault(name, {})[side] = measured
    write_report("budget", args, _list_claims(results), results)


def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="checkpoint of a pointwise ranker")
    parser.add_argument("--cascade", required=True, help="the cascade that was made of it")
    parser.add_argument("--encoder", help="sentence encoder, as in `as2ray index`")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=400, help="of a question, at most")
    parser.add_argument("--http", action="store_true", help="rank over HTTP")
    parser.add_argument("--clients", type=int, default=8, help="with --http: at the same time")
    parser.add_argument("--url", help="with --http: a service, for both sides")


@contextmanager
def _open_ranker(args: Namespace, side: str) -> Iterator[RankWithin]:
    """Yields what ranks in this process, or over HTTP."""
    path = args.cascade if side == "cascade" else args.model
    if not args.http:
        ranker = load(path)
        yield lambda question, texts, budget_ms: [
            candidate.index for candidate in ranker.rank(question, texts, budget_ms=budget_ms)
        ]
    elif args.url:
        yield _rank_at(args.url)
    else:
        settings = {
            "replicas.num_cpus": max(1, args.cores - 0.5),
            "replicas.gateway_num_cpus": 0.1,
            "limits.request_timeout_s": TIMEOUT_S,
        }
        flags = [f"--settings.{name}={value}" for name, value in settings.items()]
        with run_service(serve_command(path, *flags), 300.0) as service:
            yield _rank_at(service.url.removesuffix("/rerank"))


def _rank_at(url: str) -> RankWithin:
    client = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def rank(question: str, texts: list[str], budget_ms: float | None) -> list[int]:
        body = {"question": question, "candidates": texts, "return_text": False}
        body |= {} if budget_ms is None else {"budget_ms": budget_ms}
        response = client.post("/rank", json=body)
        response.raise_for_status()
        return [candidate["index"] for candidate in response.json()["ranking"]]

    return rank


def _rank_untrained(encoder: SentenceEncoder, table: pa.Table, parts: Sequence[str]) -> RankWithin:
    """Returns what adds up similarities to stored embeddings, and BM25, which is given."""
    sentences = list(dict.fromkeys(table["candidate"].to_pylist()))
    places = {sentence: place for place, sentence in enumerate(sentences)}
    embeddings = encoder.encode_documents(sentences)
    starts = question_offsets(table["question_id"])
    questions = table["question"].take(starts).to_pylist()
    bm25 = dict(zip(questions, np.split(BM25().score_candidates(table), starts[1:])))
    scoring = AnswerScoring({name: DEFAULT_WEIGHTS[name] for name in parts})

    def rank(question: str, texts: list[str], budget_ms: float | None) -> list[int]:
        query = encoder.encode_queries([question])[0]
        similarities = embeddings[[places[text] for text in texts]] @ query
        scores = scoring.score({"similarity": similarities, "bm25": bm25[question]})
        order: list[int] = np.argsort(-scores, kind="stable").tolist()
        return order

    return rank


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


def _measure(
    rank: RankWithin, table: pa.Table, budget_ms: float | None, num_clients: int
) -> dict[str, float]:
    """Returns MAP, and percentiles of the time of a question."""
    questions = question_indices(table)
    starts = np.searchsorted(questions, np.arange(questions[-1] + 2))
    texts, scores = table["candidate"].to_pylist(), np.empty(len(table))

    def ask(bounds: tuple[int, int]) -> float:
        start, end = bounds
        question = table["question"][int(start)].as_py()
        started_at = time.perf_counter()
        order = rank(question, texts[start:end], budget_ms)
        duration_ms = 1e3 * (time.perf_counter() - started_at)
        scores[start + np.array(order)] = -np.arange(len(order))
        return duration_ms

    bounds = list(pairwise(starts.tolist()))
    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(ask, bounds[:num_clients]))  # warm-up
        gc.disable()
        times_ms = list(pool.map(ask, bounds))
        gc.enable()
    p50, p99 = np.percentile(times_ms, (50, 99))
    return {"MAP": evaluate(table, scores, ["AP"]).measures["AP"], "p50": p50, "p99": p99}


def _list_claims(results: dict[str, Any]) -> list[Claim]:
    claims = [Claim("MAP of BM25's order", f"{results['BM25']:.4f}", None)]
    for name in [name for name in UNTRAINED if name in results]:
        shown = f"{results[name]['MAP']:.4f}, p50 {results[name]['p50']:.0f} ms"
        claims.append(Claim(f"MAP of {name}, stored embeddings", shown, None))
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
