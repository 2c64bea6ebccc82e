"""Compares a cascade with the ranker that it was made of: speed, latency, and what it loses."""

import gc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from as2ray.models.padded_reference import predict_padded
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.ranker import Ranker
from as2ray.tables.schema import question_offsets

TOP = 10
"""First places whose candidates are compared."""

MAX_QUESTIONS, MAX_SECONDS = 50, 45.0
"""Bounds of the questions that are measured."""

REFERENCE, PACKED, CASCADE = "transformers, padded", "packed", "cascade"
BLIND_CAP = "packed, fewer candidates"

RankQuestion = Callable[[str, Sequence[str]], Sequence[int]]
"""Returns the indices of a question's candidates, best first."""


@dataclass(frozen=True)
class SystemReport:
    """What a system does with the measured questions."""

    name: str
    num_pairs: int
    times_ms: tuple[float, ...]
    """Time of each question."""
    overlap: float
    """Mean share of the reference's first `TOP` candidates among this system's."""

    @property
    def pairs_per_second(self) -> float:
        """Pairs that are given, scored or not, per second."""
        return 1e3 * self.num_pairs / sum(self.times_ms)

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the time of a question."""
        return float(np.percentile(self.times_ms, percent))


def rank_padded(ranker: PointwiseRanker) -> RankQuestion:
    """Returns what ranks with a copy of the ranker's network as transformers runs it.

    The copy is in bf16 if the ranker's products are, and else in fp32.
    """
    network: Any = deepcopy(ranker.network)
    if network.config._attn_implementation != "eager":  # DeBERTa knows no other
        network.set_attn_implementation("sdpa")
    if ranker.resolved_dtype == torch.bfloat16:
        network.to(torch.bfloat16)

    def rank(question: str, candidates: Sequence[str]) -> list[int]:
        sequences = ranker.tokenizer.encode([question] * len(candidates), candidates)
        logits = predict_padded(network, sequences)
        values = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)
        order: list[int] = np.argsort(-values, kind="stable").tolist()
        return order

    return rank


def rank_packed(ranker: Ranker) -> RankQuestion:
    """Returns what ranks with a ranker or a cascade."""
    return lambda question, candidates: [c.index for c in ranker.rank(question, candidates)]


def measure_systems(
    ranker: PointwiseRanker,
    cascade: Ranker,
    table: pa.Table,
    others: Mapping[str, Ranker] | None = None,
) -> list[SystemReport]:
    """Measures all systems in turns, question by question.

    The last one is the ranker on as many of each question's first candidates as take the time of
    the cascade: what a user does without one. It presumes that candidates come in the order of a
    search.

    Args:
        ranker: The ranker.
        cascade: The cascade that was made of it.
        table: Questions that did not train the exits; some of them are measured.
        others: Further rankers by name, such as the cascade in int8, or a smaller model.
    """
    systems: dict[str, RankQuestion] = {
        REFERENCE: rank_padded(ranker),
        PACKED: rank_packed(ranker),
        CASCADE: rank_packed(cascade),
        **{name: rank_packed(other) for name, other in (others or {}).items()},
    }
    questions = _list_questions(table)
    for rank in systems.values():  # warm-up
        rank(*questions[0])
    times: dict[str, list[float]] = {name: [] for name in systems}
    orders: dict[str, list[Sequence[int]]] = {name: [] for name in systems}
    started_at = perf_counter()
    gc.disable()
    try:
        for question in questions:
            for name, rank in systems.items():
                order, duration_ms = _time(rank, question)
                times[name].append(duration_ms)
                orders[name].append(order)
            if perf_counter() - started_at > MAX_SECONDS:
                break
        questions = questions[: len(times[CASCADE])]
        share = min(1.0, sum(times[CASCADE]) / sum(times[PACKED]))
        times[BLIND_CAP], orders[BLIND_CAP] = [], []
        for text, candidates in questions:
            num_scored = max(1, round(share * len(candidates)))
            order, duration_ms = _time(systems[PACKED], (text, candidates[:num_scored]))
            times[BLIND_CAP].append(duration_ms)
            orders[BLIND_CAP].append([*order, *range(num_scored, len(candidates))])
    finally:
        gc.enable()
    num_pairs = sum(len(candidates) for _, candidates in questions)
    return [
        SystemReport(
            name,
            num_pairs,
            tuple(times[name]),
            float(np.mean([_overlap(*pair) for pair in zip(orders[name], orders[REFERENCE])])),
        )
        for name in times
    ]


def _time(rank: RankQuestion, question: tuple[str, list[str]]) -> tuple[Sequence[int], float]:
    started_at = perf_counter()
    order = rank(*question)
    return order, 1e3 * (perf_counter() - started_at)


def _list_questions(table: pa.Table) -> list[tuple[str, list[str]]]:
    starts = [*question_offsets(table["question_id"]).tolist(), table.num_rows]
    chosen = np.random.default_rng(0).permutation(len(starts) - 1)[:MAX_QUESTIONS]
    texts = table["candidate"].to_pylist()
    return [
        (table["question"][starts[i]].as_py(), texts[starts[i] : starts[i + 1]])
        for i in chosen.tolist()
    ]


def _overlap(order: Sequence[int], reference: Sequence[int]) -> float:
    first = set(reference[:TOP])
    return len(first & set(order[:TOP])) / len(first)
