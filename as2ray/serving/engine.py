"""Tokenizes rerank requests and ranks several of them in one forward pass."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from time import perf_counter
from typing import Final

import numpy as np

from as2ray.cascade.pruning import Pruning, StagedScores, concatenate_prunings
from as2ray.errors import As2rayError
from as2ray.models.bm25_stage import BM25Selection, enter_all, join_selections
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.ranker import Ranker
from as2ray.models.time_budget import TimedPass
from as2ray.outputs import RankedCandidate
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.serving.settings import Limits
from as2ray.serving.types import (
    CandidateScore,
    ModelInfo,
    RequestError,
    RerankRequest,
    RerankResult,
    check_request_texts,
    check_size,
)
from as2ray.text.packing import TokenSequences, concatenate_sequences

CHARS_PER_TOKEN: Final = 4
"""Assumed characters of a token, where a request with a budget is not tokenized yet."""

RESPONSE_S: Final = 0.002
"""Seconds of a budget that are left for the way of the result to its client."""

MAX_TOKENIZED_CHARS: Final = 1_000_000
"""Characters of candidates that are tokenized at a time, which bounds the memory that it takes."""

LARGE_REQUEST_CHARS: Final = 200_000
"""Characters of candidates from which a request is tokenized in one of `LARGE_REQUEST_THREADS`."""

LARGE_REQUEST_THREADS: Final = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "tokenize")
"""Tokenize large requests, so that small ones find a thread and a core."""


@dataclass(eq=False)
class TokenizedRequest:
    """A request with the tokens of its pairs."""

    engine: "RerankEngine"
    request: RerankRequest
    encoded: TokenSequences | None
    """Tokens of the pairs that enter the first layer; None for a request with a budget, which is
    tokenized as it is ranked."""
    pruning: Pruning
    """What is dropped; its arrays have the shape [1, stages - 1]."""
    received_at: float
    """When the replica received the request, by its monotonic clock."""
    tokenized_at: float
    """When tokenization ended, by the same clock."""
    num_tokens: int
    """Number of tokens of all pairs; an estimate for a request with a budget."""
    ends_at: float = math.inf
    """When it should be ranked, by the same clock."""
    limit_time: Callable[[float], float] = lambda left_s: left_s
    """Returns how many of the seconds until its deadline others with a budget leave it."""
    selection: BM25Selection | None = None
    """What BM25 says of the candidates; None if it has no part."""

    @property
    def has_budget(self) -> bool:
        """Whether it should be ranked at a time."""
        return self.encoded is None


class RerankEngine:
    """Ranks requests with one ranker.

    Args:
        ranker: The ranker.
        limits: Limits of a request; the engine checks `max_request_tokens`.
        answer_scoring: How its scores and those of an index are combined, if that was fitted.
    """

    def __init__(
        self, ranker: Ranker, limits: Limits, answer_scoring: AnswerScoring | None = None
    ) -> None:
        self.ranker, self.limits, self.answer_scoring = ranker, limits, answer_scoring

    @property
    def model_info(self) -> ModelInfo:
        """Description of the ranker for clients."""
        ranker = self.ranker
        network = getattr(ranker, "network", None)
        drop_ratios = ranker.drop_ratios if isinstance(ranker, MultiStageRanker) else ()
        margins = ranker.margins if isinstance(ranker, MultiStageRanker) else None
        return ModelInfo(
            ranker.tokenizer.max_length,
            ranker.exit_layers,
            tuple(drop_ratios),
            margins,
            ranker.bm25_margin if isinstance(ranker, MultiStageRanker) else None,
            ranker.bm25_weights if isinstance(ranker, MultiStageRanker) else (),
            ranker.threshold,
            self.answer_scoring,
            network.config.model_type if network is not None else "",
            type(network).__name__ if network is not None else "",
            "sigmoid" if ranker.calibration else ranker.activation,
            ranker.dtype_name,
        )

    async def tokenize_in_thread(self, request: RerankRequest) -> TokenizedRequest:
        """Tokenizes the pairs of a request in a thread; see `tokenize`."""
        is_large = sum(map(len, request.candidates)) > LARGE_REQUEST_CHARS
        executor = LARGE_REQUEST_THREADS if is_large else None
        return await asyncio.get_running_loop().run_in_executor(executor, self.tokenize, request)

    def tokenize(self, request: RerankRequest) -> TokenizedRequest:
        """Tokenizes the pairs of a request; thread-safe.

        Raises:
            RequestError: A text cannot be tokenized, the drop ratios do not fit the ranker, or the
                pairs have too many tokens.
        """
        received_at = time.monotonic()
        check_request_texts(request)
        pruning, budget = self._resolve_pruning(request), request.budget
        num_candidates, tokenizer = len(request.candidates), self.ranker.tokenizer
        limit, encoded, selection = self.limits.max_request_tokens, None, None
        # With a budget, what there is no time for is not tokenized. Its tokens are only counted
        # where they may be too many.
        if budget is None or num_candidates * tokenizer.max_length > limit:
            if budget is None and request.drop_ratios is None:
                selection = self.ranker.select_by_bm25(request.question, request.candidates)
            encoded = self._encode(request, selection)
            fix = "send fewer candidates at a time"
            check_size(len(encoded.token_ids), limit, "tokens in all pairs", fix)
        num_tokens = _estimate_tokens(request) if encoded is None else len(encoded.token_ids)
        tokenized = TokenizedRequest(
            self, request, encoded, pruning, received_at, time.monotonic(), num_tokens
        )
        tokenized.selection = selection
        if budget is not None:
            tokenized.encoded, tokenized.ends_at = None, budget.ends_at
        return tokenized

    def _encode(self, request: RerankRequest, selection: BM25Selection | None) -> TokenSequences:
        texts: Sequence[str] = request.candidates
        if selection is not None:
            texts = list(compress(texts, selection.enters))
        num_chars = np.cumsum([len(text) for text in texts])
        starts = np.flatnonzero(np.diff(num_chars // MAX_TOKENIZED_CHARS, prepend=-1)).tolist()
        return concatenate_sequences(
            [
                self.ranker.tokenizer.encode([request.question] * (end - start), texts[start:end])
                for start, end in pairwise([*starts, len(texts)])
            ]
        )

    def _resolve_pruning(self, request: RerankRequest) -> Pruning:
        try:
            if request.budget is not None:
                self.ranker.check_keeps_budget()
            pruning = self.ranker.resolve_pruning(request.drop_ratios, 1)
            return Pruning.by_rank(np.empty((1, 0))) if pruning is None else pruning
        except As2rayError as error:
            raise RequestError("invalid_request", error.problem, error.fix) from None

    def rank(
        self, batch: Sequence[TokenizedRequest], shed_drop_ratio: float = 0.0
    ) -> list[RerankResult]:
        """Ranks several requests in one pass, or one with a budget.

        Args:
            batch: Requests that this engine tokenized; one with a budget alone.
            shed_drop_ratio: Drop ratio to which lower ones are raised, except those that a request
                sets.
        """
        if batch[0].has_budget:
            [tokenized] = batch
            return [self._rank_in_time(tokenized)]
        started_at = time.monotonic()
        prunings = [_shed_load(tokenized, shed_drop_ratio) for tokenized in batch]
        staged_scores = self._score_batch(batch, prunings)
        ends = np.cumsum([len(tokenized.request.candidates) for tokenized in batch])
        rankings = self.ranker.build_rankings(
            [tokenized.request.candidates for tokenized in batch], staged_scores
        )
        ended_at = time.monotonic()
        return [
            RerankResult(
                model=tokenized.request.model,
                ranking=_without_texts(ranking),
                num_tokens=tokenized.num_tokens,
                exit_layers=self.ranker.exit_layers,
                num_scored=self._count_scored(staged_scores, slice(end - len(ranking), end)),
                drop_ratios=tuple(pruning.drop_ratios[0].tolist()),
                load_shed=pruning is not tokenized.pruning,
                timings_s={
                    "tokenize": tokenized.tokenized_at - tokenized.received_at,
                    "queue": started_at - tokenized.tokenized_at,
                    "inference": ended_at - started_at,
                },
            )
            for tokenized, pruning, ranking, end in zip(batch, prunings, rankings, ends)
        ]

    def _rank_in_time(self, tokenized: TokenizedRequest) -> RerankResult:
        """Ranks a request with a budget."""
        request, started_at = tokenized.request, time.monotonic()
        timed_pass = TimedPass(
            self.ranker,
            request.question,
            request.candidates,
            tokenized.pruning if self.ranker.exit_layers else None,
            perf_counter() + tokenized.ends_at - RESPONSE_S - started_at,
            tokenized.limit_time,
            request.drop_ratios is None,
        )
        staged_scores = timed_pass.run()
        [ranking] = self.ranker.build_rankings([request.candidates], staged_scores)
        ended_at = time.monotonic()
        return RerankResult(
            model=request.model,
            ranking=_without_texts(ranking),
            num_tokens=timed_pass.num_tokens,
            exit_layers=self.ranker.exit_layers,
            num_scored=self._count_scored(staged_scores, slice(len(ranking))),
            drop_ratios=tuple(tokenized.pruning.drop_ratios[0].tolist()),
            load_shed=timed_pass.ends_at < timed_pass.deadline,
            timings_s={
                "tokenize": tokenized.tokenized_at - tokenized.received_at,
                "queue": started_at - tokenized.tokenized_at,
                "inference": ended_at - started_at,
            },
        )

    def _score_batch(
        self, batch: Sequence[TokenizedRequest], prunings: list[Pruning]
    ) -> StagedScores:
        requests = [tokenized.request for tokenized in batch]
        sizes = [len(request.candidates) for request in requests]
        question_index = np.repeat(np.arange(len(batch)), sizes)
        if isinstance(self.ranker, PackedRanker):
            parts = [tokenized.encoded for tokenized in batch if tokenized.encoded is not None]
            encoded = concatenate_sequences(parts)
            pruning = concatenate_prunings(prunings) if self.ranker.exit_layers else None
            if all(tokenized.selection is None for tokenized in batch):
                return self.ranker.predict_sequences(encoded, question_index, pruning)
            selection = join_selections(
                [tokenized.selection or enter_all(size) for tokenized, size in zip(batch, sizes)]
            )
            entered = question_index[selection.enters]
            gaps = selection.gaps[selection.enters]
            scores = self.ranker.predict_sequences(encoded, entered, pruning, gaps)
            return selection.complete(scores)
        questions = [requests[i].question for i in question_index]
        candidates = [text for request in requests for text in request.candidates]
        return self.ranker.predict_pairs(questions, candidates, question_index)

    def _count_scored(self, staged_scores: StagedScores, rows: slice) -> tuple[int, ...]:
        """Counts the candidates that each exit scored; returns () for a ranker without exits."""
        if staged_scores.stage_index is None:
            return ()
        stage_index = staged_scores.stage_index[rows]
        return tuple(int(np.sum(stage_index >= s)) for s in range(len(self.ranker.exit_layers)))


def _without_texts(ranking: Sequence[RankedCandidate]) -> list[CandidateScore]:
    """Returns a ranking without its texts, which stay here: whoever wants them has the request."""
    return [CandidateScore(c.index, c.score, c.exit_layer, c.is_logit) for c in ranking]


def _shed_load(tokenized: TokenizedRequest, shed_drop_ratio: float) -> Pruning:
    """Raises the drop ratios of a request, unless the request sets them."""
    pruning = tokenized.pruning
    raised = np.maximum(pruning.drop_ratios, shed_drop_ratio)
    if tokenized.request.drop_ratios is not None or np.array_equal(raised, pruning.drop_ratios):
        return pruning
    return replace(pruning, drop_ratios=raised)


def _estimate_tokens(request: RerankRequest) -> int:
    num_chars = sum(map(len, request.candidates)) + len(request.candidates) * len(request.question)
    return num_chars // CHARS_PER_TOKEN + 3 * len(request.candidates)


def rank_batch(
    batch: Sequence[TokenizedRequest], shed_drop_ratio: float = 0.0
) -> list[RerankResult]:
    """Ranks requests of several engines; each engine ranks its own in one pass.

    Returns:
        The results in the order of `batch`.
    """
    results: dict[int, RerankResult] = {}
    # A request with a budget comes alone: see `BatchQueue`.
    for engine in dict.fromkeys(tokenized.engine for tokenized in batch):
        positions = [i for i, tokenized in enumerate(batch) if tokenized.engine is engine]
        engine_results = engine.rank([batch[i] for i in positions], shed_drop_ratio)
        results |= dict(zip(positions, engine_results))
    return [results[i] for i in range(len(batch))]
