"""Questions to documents: sentences of an index, ranked by the service, told with their place.

Knows an index and the service. Must not know HTTP, Ray or rankers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from as2ray.retrieval.answers import answer_of
from as2ray.retrieval.index import SentenceIndex
from as2ray.serving.asked import Answer, Asked, Refused
from as2ray.serving.protocol import AnswerText, AskRequest, AskResponse
from as2ray.serving.service import Service, check, name_of
from as2ray.serving.settings import Limits


class Library:
    """Answers from an index.

    Args:
        index: Of sentences.
        service: What ranks them.
        limits: What a request may ask.
    """

    def __init__(self, index: SentenceIndex, service: Service, limits: Limits) -> None:
        self.index, self.service, self.limits = index, service, limits

    async def ask(
        self, body: AskRequest, rank: Callable[[Asked], Awaitable[Answer]]
    ) -> AskResponse:
        """The answers to a question; none below the threshold.

        Args:
            body: What was asked.
            rank: The way that every ranking of the service goes.
        """
        if not body.question.strip():
            raise Refused("invalid", "an empty question", expected="a question", mend="write one")
        check(Asked(body.question, [""]), self.limits)
        began, model = time.monotonic(), name_of(body.model, self.service.models)
        most = min(body.candidates, self.limits.candidates)
        numbers = await asyncio.to_thread(self.index.candidates, body.question, most, body.around)
        # A sentence of the index is nobody's request: a long one is cut, not refused.
        texts = [text[: self.limits.characters] for text in self.index.texts(numbers)]
        found = time.monotonic() - began
        facts = await self.service.facts(model)
        threshold = (facts.threshold if body.threshold is None else body.threshold) or 0.0
        answer = Answer(model, [], 0, facts.exits)
        if numbers:
            answer = await rank(Asked(body.question, texts, body.model, body.drop))
        answer = replace(answer, seconds={"retrieve": found, **answer.seconds})
        good = [one for one in answer.ranking[: body.top_k] if one.score >= threshold]
        told = [answer_of(self.index, numbers[one.index], one) for one in good]
        return AskResponse(
            answers=[AnswerText(**asdict(one)) for one in told],
            candidates=len(numbers),
            best=answer.ranking[0].score if answer.ranking else None,
            threshold=threshold,
            **AskResponse.took(answer),
        )
