"""Questions to documents: sentences of an index, ranked by the service, told with their place.

Knows an index and the service. Must not know HTTP, Ray or rankers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from as2ray.retrieval.question_answering import build_answer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.protocol import AnswerText, AskRequest, AskResponse
from as2ray.serving.service import RankingService, check_limits, select_model
from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError, RerankRequest, RerankResult


class AskHandler:
    """Answers from an index.

    Args:
        index: Of sentences.
        service: What ranks them.
        limits: What a request may ask.
    """

    def __init__(self, index: SentenceIndex, service: RankingService, limits: Limits) -> None:
        self.index, self.service, self.limits = index, service, limits

    async def ask(
        self, body: AskRequest, rank: Callable[[RerankRequest], Awaitable[RerankResult]]
    ) -> AskResponse:
        """The answers to a question; none below the threshold.

        Args:
            body: What was asked.
            rank: The way that every ranking of the service goes.
        """
        if not body.question.strip():
            raise RequestError(
                "invalid",
                "an empty question; expected a question",
            )
        check_limits(RerankRequest(body.question, [""]), self.limits)
        began, model = time.monotonic(), select_model(body.model, self.service.models)
        most = min(body.num_candidates, self.limits.max_candidates)
        numbers = await asyncio.to_thread(
            self.index.search_candidates, body.question, most, body.num_neighbors
        )
        # A sentence of the index is nobody's request: a long one is cut, not refused.
        texts = [text[: self.limits.max_text_chars] for text in self.index.texts(numbers)]
        found = time.monotonic() - began
        facts = await self.service.get_model_info(model)
        threshold = (facts.threshold if body.threshold is None else body.threshold) or 0.0
        answer = RerankResult(model, [], 0, facts.exit_layers)
        if numbers:
            answer = await rank(RerankRequest(body.question, texts, body.model, body.drop_ratios))
        answer = replace(answer, seconds={"retrieve": found, **answer.timings_s})
        good = [one for one in answer.ranking[: body.top_k] if one.score >= threshold]
        told = [build_answer(self.index, numbers[one.index], one) for one in good]
        return AskResponse(
            answers=[AnswerText(**asdict(one)) for one in told],
            num_candidates=len(numbers),
            best_score=answer.ranking[0].score if answer.ranking else None,
            threshold=threshold,
            **AskResponse.timing_fields(answer),
        )
