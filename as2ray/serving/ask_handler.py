"""Answers questions from an index: retrieves sentences and lets the service rank them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from as2ray.outputs import RankedCandidate
from as2ray.retrieval.question_answering import build_answer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.protocol import AskRequest, AskResponse
from as2ray.serving.settings import Limits
from as2ray.serving.types import RankingService, RerankRequest, RerankResult


class AskHandler:
    """Answers questions from an index.

    Args:
        index: Index of sentences.
        service: Service that describes the model.
        limits: Limits of a request, to which retrieved sentences are cut.
    """

    def __init__(self, index: SentenceIndex, service: RankingService, limits: Limits) -> None:
        self.index, self.service, self.limits = index, service, limits

    async def ask(
        self,
        body: AskRequest,
        model: str,
        rank: Callable[[RerankRequest], Awaitable[RerankResult]],
    ) -> AskResponse:
        """Answers a question; returns no answer with a score below the threshold.

        Args:
            body: The request, within the limits.
            model: Name of the model that ranks.
            rank: Ranks the retrieved sentences.
        """
        started_at = time.monotonic()
        max_candidates = min(body.num_candidates, self.limits.max_candidates)
        candidates = await asyncio.to_thread(
            self.index.search_candidates, body.question, max_candidates, body.num_neighbors
        )
        sentences = [candidate.index for candidate in candidates]
        # The client did not choose these sentences: long ones are cut instead of rejected.
        texts = [text[: self.limits.max_text_chars] for text in self.index.texts(sentences)]
        retrieval_time_s = time.monotonic() - started_at
        model_info = await self.service.get_model_info(model)
        threshold = (model_info.threshold if body.threshold is None else body.threshold) or 0.0
        result = RerankResult(model, [], 0, model_info.exit_layers)
        if texts:
            result = await rank(body.to_request(model, texts))
        result = replace(result, timings_s={"retrieval": retrieval_time_s, **result.timings_s})
        answers = [
            build_answer(
                self.index,
                sentences[candidate.index],
                RankedCandidate(text=texts[candidate.index], **asdict(candidate)),
            )
            for candidate in result.ranking[: body.top_k]
            if candidate.score >= threshold
        ]
        return AskResponse(
            answers=answers,
            num_candidates=len(texts),
            best_score=result.ranking[0].score if result.ranking else None,
            threshold=threshold,
            **AskResponse.details_of(result),
        )
