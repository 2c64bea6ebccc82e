"""The desk: one ranker that answers several users' questions in one pass.

Knows rankers and the service's questions. Must not know HTTP, Ray or who waits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.cascade.pruning import StagedScores, expand_drop_ratios, num_kept
from as2ray.errors import As2rayError, EvaluationError
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.ranker import Ranker, check_text
from as2ray.serving.service import ModelInfo
from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError, RerankRequest, RerankResult
from as2ray.text.packing import TokenSequences, concatenate_sequences


@dataclass(eq=False)
class TokenizedRequest:
    """A question that was read: its pairs as tokens."""

    engine: "RerankEngine"
    request: RerankRequest
    encoded: TokenSequences
    drop_ratios: np.ndarray | None
    """Drop ratio after each stage but the last, shape [stages - 1]; None of one stage."""
    received_at: float
    """By the monotonic clock of the machine that read it."""
    tokenized_at: float
    """When it was read."""

    @property
    def num_tokens(self) -> int:
        """Of all pairs."""
        return len(self.encoded.token_ids)


class RerankEngine:
    """A ranker, and what may be asked of it.

    Args:
        ranker: Any.
        limits: What a request may ask.
    """

    def __init__(self, ranker: Ranker, limits: Limits) -> None:
        self.ranker, self.limits = ranker, limits

    @property
    def model_info(self) -> ModelInfo:
        """What a client may want to know."""
        drop = self.ranker.drop_ratios if isinstance(self.ranker, MultiStageRanker) else ()
        ranker = self.ranker
        return ModelInfo(
            ranker.tokenizer.max_length, ranker.exit_layers, tuple(drop), ranker.threshold
        )

    def tokenize(self, request: RerankRequest) -> TokenizedRequest:
        """Tokenises a question's pairs; safe in any thread.

        Raises:
            Refused: A text that no tokenizer reads, drop ratios that this ranker cannot follow, or
                more tokens than a request may have.
        """
        arrived = time.monotonic()
        texts = {"the question": request.question}
        texts |= {f"candidate {i}": text for i, text in enumerate(request.candidates)}
        for name, text in texts.items():
            _check_text(name, text)
        drop = self._resolve_drop_ratios(request)
        questions = [request.question] * len(request.candidates)
        encoded = self.ranker.tokenizer.encode(questions, request.candidates)
        if len(encoded.token_ids) > self.limits.max_request_tokens:
            raise RequestError(
                "too_large",
                f"{len(encoded.token_ids):,} tokens"
                f"; expected at most {self.limits.max_request_tokens:,} over all pairs",
                fix="send fewer candidates at a time",
            )
        return TokenizedRequest(self, request, encoded, drop, arrived, time.monotonic())

    def _resolve_drop_ratios(self, request: RerankRequest) -> np.ndarray | None:
        if not isinstance(self.ranker, MultiStageRanker):
            if request.drop_ratios is None:
                return None
            raise RequestError(
                "invalid",
                "drop ratios for a ranker of one stage; expected no drop ratios",
                fix="leave them out, or name a cascade",
            )
        stages = len(self.ranker.exit_layers)
        if request.drop_ratios is None:
            return expand_drop_ratios(self.ranker.drop_ratios, stages)
        try:
            ratios = expand_drop_ratios(request.drop_ratios, stages)
        except As2rayError as error:
            raise RequestError(
                "invalid",
                f"{error.problem}; expected {error.expected}",
                fix=error.fix,
            ) from None
        if np.max(ratios, initial=0.0) > self.limits.max_drop_ratio:
            raise RequestError(
                "invalid",
                f"drop ratios {ratios.tolist()}"
                f"; expected at most {self.limits.max_drop_ratio:g} each",
            )
        return ratios

    def rank(
        self, batch: Sequence[TokenizedRequest], shed_drop_ratio: float = 0.0
    ) -> list[RerankResult]:
        """Ranks questions together.

        Args:
            batch: Questions that this desk read.
            relief: Drop ratio that those are raised to which did not ask for their own.
        """
        began = time.monotonic()
        drops = [self._shed_load(read, shed_drop_ratio) for read in batch]
        scored = self._score_batch(batch, drops)
        rankings = self.ranker.build_rankings([read.request.candidates for read in batch], scored)
        ended = time.monotonic()
        answers = []
        for read, drop, ranking in zip(batch, drops, rankings):
            answers.append(
                RerankResult(
                    model=read.request.model or "",
                    ranking=ranking,
                    num_tokens=read.num_tokens,
                    exit_layers=self.ranker.exit_layers,
                    num_scored=self._count_scored(len(ranking), drop),
                    drop_ratios=() if drop is None else tuple(drop.tolist()),
                    load_shed=drop is not None and bool(np.any(drop != read.drop_ratios)),
                    timings_s={
                        "read": read.tokenized_at - read.received_at,
                        "queue": began - read.tokenized_at,
                        "rank": ended - began,
                    },
                )
            )
        return answers

    def _shed_load(self, request: TokenizedRequest, shed_drop_ratio: float) -> np.ndarray | None:
        if request.drop_ratios is None or request.request.drop_ratios is not None:
            return request.drop_ratios
        raised: np.ndarray = np.maximum(request.drop_ratios, shed_drop_ratio)
        return raised

    def _score_batch(
        self, batch: Sequence[TokenizedRequest], request_ratios: list[np.ndarray | None]
    ) -> StagedScores:
        sizes = [len(read.request.candidates) for read in batch]
        question = np.repeat(np.arange(len(batch)), sizes)
        ratios = [drop for drop in request_ratios if drop is not None]
        drop = np.stack(ratios) if ratios else None
        if not self.ranker.text_only:
            encoded = concatenate_sequences([read.encoded for read in batch])
            return self.ranker.predict_sequences(encoded, question, drop)
        questions = [read.request.question for read in batch for _ in read.request.candidates]
        candidates = [text for read in batch for text in read.request.candidates]
        return self.ranker.predict_pairs(questions, candidates, question)

    def _count_scored(
        self, num_candidates: int, request_ratios: np.ndarray | None
    ) -> tuple[int, ...]:
        if request_ratios is None:
            return ()
        left = [num_candidates]
        for ratio in request_ratios:
            left.append(int(num_kept(left[-1], ratio)))
        return tuple(left)


def _check_text(name: str, text: str) -> None:
    try:
        check_text(text)
    except EvaluationError as error:
        raise RequestError(
            "invalid",
            f"{name} is empty or holds half a character; expected {error.expected}",
            fix=error.fix,
        ) from None


def rank_batch(
    batch: Sequence[TokenizedRequest], shed_drop_ratio: float = 0.0
) -> list[RerankResult]:
    """Answers to questions of several desks, in order; each desk ranks its own in one pass."""
    answers: dict[int, RerankResult] = {}
    for desk in dict.fromkeys(read.engine for read in batch):
        numbers = [number for number, read in enumerate(batch) if read.engine is desk]
        own = desk.rank([batch[number] for number in numbers], shed_drop_ratio)
        answers |= dict(zip(numbers, own))
    return [answers[number] for number in range(len(batch))]
