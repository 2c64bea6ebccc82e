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

from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.ask_handler import AskHandler
from as2ray.serving.error_responses import ERROR_MODELS, Dialect, error_status_codes
from as2ray.serving.middleware import RequestMiddleware, error_response
from as2ray.serving.protocol import (
    AskRequest,
    AskResponse,
    CohereRequest,
    CohereResponse,
    Info,
    RankRequest,
    RankResponse,
    TeiRequest,
    TeiScoredText,
    V1Request,
    V1Response,
)
from as2ray.serving.service import RankingService, check_limits, select_model
from as2ray.serving.settings import Settings
from as2ray.serving.types import RequestError, RerankRequest, RerankResult

DEMO_PAGE = Path(__file__).parent / "page" / "index.html"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: it speaks with us alone."""


def create_app(
    service: RankingService,
    settings: Settings,
    auth_tokens: Sequence[str] = (),
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
    answered = _create_rank_function(service, settings)
    _add_rank_routes(app, settings, answered)
    if index is not None:
        _add_ask_route(app, settings, AskHandler(index, service, settings.limits), answered)
    _add_status_routes(app, service, settings, 0 if index is None else len(index))
    if settings.enable_demo_page:
        _add_demo_page(app)
    _add_error_handlers(app, settings)
    app.add_middleware(RequestMiddleware, service=service, settings=settings, tokens=auth_tokens)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


RankFunction = Callable[[RerankRequest, Request], Awaitable[RerankResult]]


def _create_rank_function(service: RankingService, settings: Settings) -> RankFunction:
    """The way that every ranking goes, whatever was asked."""

    async def answered(asked: RerankRequest, request: Request) -> RerankResult:
        request.state.asked = asked
        check_limits(asked, settings.limits)
        answer = await service.rank(asked, select_model(asked.model, service.models))
        request.state.answer = answer
        return answer

    return answered


def _add_ask_route(
    app: FastAPI, settings: Settings, ask_handler: AskHandler, rank_request: RankFunction
) -> None:
    @app.post("/ask", responses=_error_responses("as2ray", settings))
    async def ask(body: AskRequest, request: Request) -> AskResponse:
        """As2ray's own: answers from the documents of the index."""
        return await ask_handler.ask(body, lambda asked: rank_request(asked, request))


def _add_rank_routes(app: FastAPI, settings: Settings, rank_request: RankFunction) -> None:
    @app.post(
        "/v2/rerank",
        responses=_error_responses("cohere", settings),
        response_model_exclude_none=True,
    )
    async def cohere(body: CohereRequest, request: Request) -> CohereResponse:
        """Cohere's v2."""
        return CohereResponse.from_result(await rank_request(body.to_request(), request), body)

    @app.post(
        "/v1/rerank", responses=_error_responses("v1", settings), response_model_exclude_none=True
    )
    async def v1(body: V1Request, request: Request) -> V1Response:
        """Cohere's v1 and Jina's."""
        return V1Response.from_result(await rank_request(body.to_request(), request), body)

    @app.post(
        "/rerank",
        responses=_error_responses("tei", settings, "v1"),
        response_model_exclude_none=True,
    )
    async def rerank(
        body: TeiRequest | V1Request, request: Request
    ) -> list[TeiScoredText] | V1Response:
        """Text Embeddings Inference's; with `documents` Infinity's and vLLM's."""
        request.state.dialect = "tei" if isinstance(body, TeiRequest) else "v1"
        answer = await rank_request(body.to_request(), request)
        if isinstance(body, TeiRequest):
            return TeiScoredText.all_from_result(answer, body)
        return V1Response.from_result(answer, body)

    @app.post("/rank", responses=_error_responses("as2ray", settings))
    async def rank(body: RankRequest, request: Request) -> RankResponse:
        """As2ray's own."""
        return RankResponse.from_result(await rank_request(body.to_request(), request), body)


def _error_responses(
    dialect: Dialect, settings: Settings, *other_dialects: Dialect
) -> dict[int | str, Any]:
    """What a path may answer in place of 200, for its description."""
    form: Any = ERROR_MODELS[dialect]
    for other in other_dialects:
        form = form | ERROR_MODELS[other]
    return {
        code: {"model": form} for code in error_status_codes(dialect, settings.overload_status_code)
    }


def _add_status_routes(
    app: FastAPI, service: RankingService, settings: Settings, num_indexed_sentences: int
) -> None:
    closed = _error_responses("as2ray", settings)

    @app.get("/info", responses=closed)
    async def info() -> Info:
        """What answers, and what may be asked of it."""
        name = select_model(None, service.models)
        facts = await service.get_model_info(name)
        return Info(
            model_id=name,
            max_input_length=facts.max_length,
            max_batch_tokens=settings.batching.max_batch_tokens,
            max_client_batch_size=settings.limits.max_candidates,
            max_concurrent_requests=settings.batching.max_ongoing_requests,
            version=version("as2ray"),
            models=list(service.models),
            exit_layers=list(facts.exit_layers),
            drop_ratios=list(facts.drop_ratios),
            max_drop_ratio=settings.limits.max_drop_ratio,
            num_indexed_sentences=num_indexed_sentences,
        )

    @app.get("/health", responses=closed)
    async def health() -> dict[str, str]:
        """Whether a ranker answers."""
        await service.get_model_info(select_model(None, service.models))
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, responses=closed)
    async def metrics() -> str:
        """In Prometheus's text format."""
        return await service.export_metrics()


def _add_demo_page(app: FastAPI) -> None:
    page = DEMO_PAGE.read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def shown() -> HTMLResponse:
        """A page to try the ranker on."""
        headers = {
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "referrer-policy": "no-referrer",
        }
        return HTMLResponse(page, headers={**headers, "x-content-type-options": "nosniff"})


def _add_error_handlers(app: FastAPI, settings: Settings) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        return error_response(request.scope, error, settings)

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
        refused = RequestError(
            "malformed" if first["type"] == "json_invalid" else "invalid",
            f"{where}: {first['msg']}; expected the request that /openapi.json describes",
        )
        return error_response(request.scope, refused, settings)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        refused = getattr(request.state, "refused", None) or RequestError(
            "not_found" if error.status_code in (404, 405) else "malformed",
            f"{request.method} of this path: {error.detail}"
            "; expected a path and method of /openapi.json",
        )
        response = error_response(request.scope, refused, settings)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response
