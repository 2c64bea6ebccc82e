"""The service over HTTP: a path for each dialect, and what surrounds them.

Knows FastAPI and the wire contract. Must not know Ray or rankers.

What the service learns to do next is one more `_add_…` in `app_of`; `Guard` stands before all.
"""

from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from as2ray.retrieval.index import SentenceIndex
from as2ray.serving.asked import Answer, Asked, Refused
from as2ray.serving.guard import Guard, refusal
from as2ray.serving.library import Library
from as2ray.serving.protocol import (
    AskRequest,
    AskResponse,
    CohereRequest,
    CohereResponse,
    Info,
    RankRequest,
    RankResponse,
    TeiRequest,
    TeiScored,
    V1Request,
    V1Response,
)
from as2ray.serving.refusals import ERRORS, Dialect, statuses
from as2ray.serving.service import Service, check, name_of
from as2ray.serving.settings import Settings

PAGE = Path(__file__).parent / "page" / "index.html"

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: it speaks with us alone."""


def app_of(
    service: Service,
    settings: Settings,
    tokens: Sequence[str] = (),
    index: SentenceIndex | None = None,
) -> FastAPI:
    """The application.

    Args:
        service: What ranks.
        settings: The operator's.
        tokens: Bearer tokens, any of which opens; everybody may ask where there is none.
        index: What `/ask` answers from; without it there is no such path.
    """
    # FastAPI's own pages of documentation load scripts from elsewhere.
    app = FastAPI(title="as2ray", version=version("as2ray"), docs_url=None, redoc_url=None)
    answered = _answering(service, settings)
    _add_rankings(app, settings, answered)
    if index is not None:
        _add_ask(app, settings, Library(index, service, settings.limits), answered)
    _add_state(app, service, settings, 0 if index is None else len(index))
    if settings.page:
        _add_page(app)
    _add_errors(app, settings)
    app.add_middleware(Guard, service=service, settings=settings, tokens=tokens)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


Answered = Callable[[Asked, Request], Awaitable[Answer]]


def _answering(service: Service, settings: Settings) -> Answered:
    """The way that every ranking goes, whatever was asked."""

    async def answered(asked: Asked, request: Request) -> Answer:
        request.state.asked = asked
        check(asked, settings.limits)
        answer = await service.rank(asked, name_of(asked.model, service.models))
        request.state.answer = answer
        return answer

    return answered


def _add_ask(app: FastAPI, settings: Settings, library: Library, answered: Answered) -> None:
    @app.post("/ask", responses=_errors("as2ray", settings))
    async def ask(body: AskRequest, request: Request) -> AskResponse:
        """As2ray's own: answers from the documents of the index."""
        return await library.ask(body, lambda asked: answered(asked, request))


def _add_rankings(app: FastAPI, settings: Settings, answered: Answered) -> None:
    @app.post("/v2/rerank", responses=_errors("cohere", settings), response_model_exclude_none=True)
    async def cohere(body: CohereRequest, request: Request) -> CohereResponse:
        """Cohere's v2."""
        return CohereResponse.of(await answered(body.asked(), request), body)

    @app.post("/v1/rerank", responses=_errors("v1", settings), response_model_exclude_none=True)
    async def v1(body: V1Request, request: Request) -> V1Response:
        """Cohere's v1 and Jina's."""
        return V1Response.of(await answered(body.asked(), request), body)

    @app.post("/rerank", responses=_errors("tei", settings, "v1"), response_model_exclude_none=True)
    async def rerank(
        body: TeiRequest | V1Request, request: Request
    ) -> list[TeiScored] | V1Response:
        """Text Embeddings Inference's; with `documents` Infinity's and vLLM's."""
        request.state.dialect = "tei" if isinstance(body, TeiRequest) else "v1"
        answer = await answered(body.asked(), request)
        if isinstance(body, TeiRequest):
            return TeiScored.all_of(answer, body)
        return V1Response.of(answer, body)

    @app.post("/rank", responses=_errors("as2ray", settings))
    async def rank(body: RankRequest, request: Request) -> RankResponse:
        """As2ray's own."""
        return RankResponse.of(await answered(body.asked(), request), body)


def _errors(dialect: Dialect, settings: Settings, *more: Dialect) -> dict[int | str, Any]:
    """What a path may answer in place of 200, for its description."""
    form: Any = ERRORS[dialect]
    for other in more:
        form = form | ERRORS[other]
    return {code: {"model": form} for code in statuses(dialect, settings.refusal)}


def _add_state(app: FastAPI, service: Service, settings: Settings, sentences: int) -> None:
    closed = _errors("as2ray", settings)

    @app.get("/info", responses=closed)
    async def info() -> Info:
        """What answers, and what may be asked of it."""
        name = name_of(None, service.models)
        facts = await service.facts(name)
        return Info(
            model_id=name,
            max_input_length=facts.max_length,
            max_batch_tokens=settings.batches.tokens,
            max_client_batch_size=settings.limits.candidates,
            max_concurrent_requests=settings.batches.requests,
            version=version("as2ray"),
            models=list(service.models),
            exits=list(facts.exits),
            drop=list(facts.drop),
            max_drop=settings.limits.drop,
            sentences=sentences,
        )

    @app.get("/health", responses=closed)
    async def health() -> dict[str, str]:
        """Whether a ranker answers."""
        await service.facts(name_of(None, service.models))
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, responses=closed)
    async def metrics() -> str:
        """In Prometheus's text format."""
        return await service.metrics()


def _add_page(app: FastAPI) -> None:
    page = PAGE.read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def shown() -> HTMLResponse:
        """A page to try the ranker on."""
        headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}
        return HTMLResponse(page, headers={**headers, "x-content-type-options": "nosniff"})


def _add_errors(app: FastAPI, settings: Settings) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return refusal(request.scope, error, settings)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        # Where and what, never a value: it is the user's, and may not even be writable.
        told = error.errors()
        if isinstance(error.body, dict) and "documents" in error.body:
            told = [one for one in told if V1Request.__name__ in one["loc"]] or told
        first = told[0]
        if V1Request.__name__ in first["loc"]:
            request.state.dialect = "v1"
        where = ".".join(str(part) for part in first["loc"])[:200]
        refused = Refused(
            "malformed" if first["type"] == "json_invalid" else "invalid",
            f"{where}: {first['msg']}",
            expected="the request that /openapi.json describes",
            mend="correct it",
        )
        return refusal(request.scope, refused, settings)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        refused = getattr(request.state, "refused", None) or Refused(
            "not_found" if error.status_code in (404, 405) else "malformed",
            f"{request.method} of this path: {error.detail}",
            expected="a path and method of /openapi.json",
            mend="correct them",
        )
        response = refusal(request.scope, refused, settings)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response
