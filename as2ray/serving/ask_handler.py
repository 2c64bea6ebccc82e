"""Answers questions from an index: retrieves sentences and lets the service rank them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from as2ray.errors import ConfigError, SentenceIndexError
from as2ray.retrieval.question_answering import (
    check_threshold,
    find_candidates,
    resolve_scoring,
    select_answers,
)
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.protocol import AskRequest, AskResponse
from as2ray.serving.settings import Limits
from as2ray.serving.types import (
    NO_MODEL,
    RankingService,
    RequestError,
    RerankRequest,
    RerankResult,
)


class AskHandler:
    """Answers questions from an index.

    Args:
        index: Index of sentences.
        service: Service that describes the model.
        limits: Limits of a request, to which retrieved sentences are cut.

    Raises:
        SentenceIndexError: The encoder of the index cannot be used.
    """

    def __init__(self, index: SentenceIndex, service: RankingService, limits: Limits) -> None:
        self.index, self.service, self.limits = index, service, limits
        index.search_candidates("the first question")  # Loads the encoder before anyone waits.

    async def ask(
        self,
        body: AskRequest,
        model: str,
        rank: Callable[[RerankRequest], Awaitable[RerankResult]],
    ) -> AskResponse:
        """Answers a question, or says why there is no answer.

        Args:
            body: The request, within the limits.
            model: Name of the model that ranks; empty if none is served, and the similarity and
                BM25 order the answers.
            rank: Ranks the retrieved sentences.

        Raises:
            RequestError: `check_threshold` refuses the threshold, or the index is not the one that
                the model was adapted to.
        """
        started_at = time.monotonic()
        # The name may get another checkpoint meanwhile, whose scores would be combined otherwise.
        checkpoint = self.service.models[model] if model else None
        model_info = await self.service.get_model_info(model) if model else NO_MODEL
        try:
            scoring = resolve_scoring(self.index, model_info.answer_scoring, has_ranker=bool(model))
            check_threshold(scoring, body.threshold)
        except SentenceIndexError:  # the index was replaced before this gateway opened it
            problem = "the index has embeddings of another encoder than the model was adapted to"
            fix = "serve the index that the model was adapted to"
            raise RequestError("unavailable", problem, fix) from None
        except ConfigError as error:
            raise RequestError("invalid_request", error.problem, error.fix) from None
        max_candidates = min(body.num_candidates, self.limits.max_candidates)
        sizes = (max_candidates, body.num_neighbors)
        found = await asyncio.to_thread(find_candidates, self.index, scoring, body.question, *sizes)
        # The client did not choose these sentences: long ones are cut instead of rejected.
        texts = [t[: self.limits.max_text_chars] for t in self.index.texts(found.sentences)]
        retrieval_time_s = time.monotonic() - started_at
        result = RerankResult(model, [], 0, model_info.exit_layers)
        if texts and scoring.uses_ranker:
            result = await rank(replace(body.to_request(model, texts), checkpoint=checkpoint))
        result = replace(result, timings_s={"retrieval": retrieval_time_s, **result.timings_s})
        thresholds = body.threshold, model_info.threshold
        answer = select_answers(self.index, scoring, found, result.ranking, body.top_k, *thresholds)
        return AskResponse(
            answers=list(answer.answers),
            num_candidates=answer.num_candidates,
            best_score=answer.best_score,
            reason=answer.reason,
            nearest=list(answer.nearest),
            **AskResponse.details_of(result),
        )
