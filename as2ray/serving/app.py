"""The FastAPI application: one route per dialect, status routes and the demo page.

To add an endpoint, write another `_add_…` function and call it in `create_app`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException

from as2ray.retrieval.query_generation import example_questions
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.admission import Admission
from as2ray.serving.api_page import HEADERS as API_PAGE_HEADERS
from as2ray.serving.api_page import render_page
from as2ray.serving.ask_handler import AskHandler
from as2ray.serving.error_responses import (
    ERRORS,
    CohereError,
    Dialect,
    RankError,
    TeiError,
    V1Error,
    error_response,
    status_code,
)
from as2ray.serving.middleware import RequestMiddleware
from as2ray.serving.protocol import (
    BUDGET_HEADER,
    MAX_BUDGET_MS,
    AskRequest,
    AskResponse,
    BudgetMs,
    CohereRequest,
    CohereResponse,
    DocumentParagraph,
    DocumentResponse,
    Info,
    RankRequest,
    RankResponse,
    TeiRequest,
    TeiScoredText,
    V1Request,
    V1Response,
)
from as2ray.serving.request_body import create_body_route
from as2ray.serving.settings import Limits, Settings
from as2ray.serving.types import (
    NO_MODEL,
    ErrorCode,
    RankingService,
    RequestError,
    RerankRequest,
    RerankResult,
    TimeBudget,
    check_request_texts,
    check_size,
)

MAX_PARAGRAPHS, MAX_DOCUMENT_CHARS = 1_000, 1_000_000
"""Maximum number of paragraphs of a document in a response, and of characters of their text."""

DEMO_PAGE = Path(__file__).parent / "static" / "index.html"

DEMO_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of the demo page, which connects to this service alone."""

Rank = Callable[[RerankRequest, Request, float | None], Awaitable[RerankResult]]
"""Ranks a request, within a budget in milliseconds if there is one."""


class _DocumentConvertor(PathConvertor):
    """The rest of a path, which may have slashes and, as names of files, line feeds."""

    regex = "(?s:.*)"


register_url_convertor("document", _DocumentConvertor())


def select_model(model: str | None, models: Mapping[str, str]) -> str:
    """Returns the name of the model that ranks a request.

    Clients of other services name those services' models. If a single model is served, it ranks
    whatever the request names, and the response names the model that did.

    Raises:
        RequestError: Several models are served, and none has this name; or no model is served.
    """
    names = list(models)
    if not names:
        problem = "no ranker is served, only answers from an index"
        raise RequestError("model_not_found", problem, "use `/ask`, or start it with a `--model`")
    if model in models:
        return str(model)
    if model is None or len(names) == 1:
        return names[0]
    problem = f"this model is not served, only {names}"
    raise RequestError("model_not_found", problem, "name one of these, or none")


def select_ask_model(body: AskRequest, models: Mapping[str, str]) -> str:
    """Returns the name of the model that ranks for `/ask`; empty if no model is served.

    Raises:
        RequestError: See `select_model`; or no model is served, and the request sets something of
            one.
    """
    if models:
        return select_model(body.model, models)
    settings = {"model": body.model, "drop_ratios": body.drop_ratios}
    if given := [name for name, value in settings.items() if value is not None]:
        problem = f"the service has no ranker, so it cannot use {' and '.join(given)}"
        raise RequestError("invalid_request", problem, f"leave out {' and '.join(given)}")
    return ""


def get_budget_ms(body: BaseModel, request: Request) -> float | None:
    """Returns the budget in milliseconds that the body of a request sets, or its header.

    Raises:
        RequestError: The header is no number within the bounds of a budget.
    """
    budget_ms: float | None = getattr(body, "budget_ms", None)
    value = request.headers.get(BUDGET_HEADER)
    if budget_ms is not None or value is None:
        return budget_ms
    try:
        return TypeAdapter(BudgetMs).validate_python(value)
    except ValidationError:
        bounds = f"above 0, at most {MAX_BUDGET_MS:,}"
        problem = f"the header `{BUDGET_HEADER}` must be a number of milliseconds {bounds}"
        raise RequestError("invalid_request", problem) from None


def check_limits(request: RerankRequest, limits: Limits) -> None:
    """Checks all limits that need no tokenizer, but for those of the body (`decode_body`).

    Raises:
        RequestError: The request has no candidates, or exceeds a limit.
    """
    if not request.candidates:
        raise RequestError("no_candidates", "the request must have at least one candidate")
    num_chars = max(len(request.question), *map(len, request.candidates))
    check_size(num_chars, limits.max_text_chars, "characters in a text", "split it into sentences")
    limit = limits.max_drop_ratio
    if np.max(request.drop_ratios or 0.0) > limit:
        problem = f"drop_ratios={request.drop_ratios}, the limit of each is {limit:g}"
        raise RequestError("invalid_request", problem)


def create_app(
    service: RankingService,
    settings: Settings,
    auth_tokens: Sequence[str] = (),
    index: SentenceIndex | None = None,
    admission: Admission | None = None,
) -> FastAPI:
    """Creates the application.

    Args:
        service: Service that ranks.
        settings: Settings of the service.
        auth_tokens: Accepted bearer tokens; if empty, requests need none.
        index: Index that `/ask` answers from; without it the path does not exist.
        admission: Bounds the requests at the same time; by default a new one.
    """
    # FastAPI's own documentation pages load scripts from other hosts; `/docs` is ours.
    app = FastAPI(title="as2ray", version=version("as2ray"), docs_url=None, redoc_url=None)
    app.router.route_class = create_body_route(settings.limits)

    async def rank(
        rerank_request: RerankRequest, request: Request, budget_ms: float | None
    ) -> RerankResult:
        if len(auth_tokens) > 1:
            rerank_request = replace(rerank_request, client=request.state.client)
        if budget_ms is not None:
            budget = TimeBudget(budget_ms, request.state.arrived_at)
            rerank_request = replace(rerank_request, budget=budget)
        request.state.rerank_request = rerank_request
        check_limits(rerank_request, settings.limits)
        result = await service.rank(rerank_request)
        if rerank_request.budget is not None:
            exceeded_ms = rerank_request.budget.exceeded_ms
            result = replace(result, budget_ms=budget_ms, budget_exceeded_ms=exceeded_ms)
        request.state.rerank_result = result
        return result

    _add_rank_routes(app, service, settings, rank)
    if index is not None:
        _add_ask_route(app, service, settings, AskHandler(index, service, settings.limits), rank)
        _add_document_route(app, settings, index)
    admission = admission or Admission(settings)
    _add_status_routes(app, service, settings, admission, index)
    if settings.enable_demo_page:
        _add_demo_page(app)
    _add_api_page(app)
    _add_error_handlers(app)
    app.add_middleware(
        RequestMiddleware,
        service=service,
        settings=settings,
        auth_tokens=auth_tokens,
        admission=admission,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", BUDGET_HEADER],
            expose_headers=["*"],  # such as `retry-after` and how far a budget was exceeded
        )
    return app


def _add_rank_routes(app: FastAPI, service: RankingService, settings: Settings, rank: Rank) -> None:
    async def rank_body(
        body: CohereRequest | V1Request | TeiRequest | RankRequest, request: Request
    ) -> RerankResult:
        rerank_request = body.to_request(select_model(body.model, service.models))
        return await rank(rerank_request, request, get_budget_ms(body, request))

    foreign_route = partial(app.post, response_model_exclude_none=True)

    @foreign_route("/v2/rerank", responses=_error_responses(settings, "cohere", CohereError))
    async def cohere(body: CohereRequest, request: Request) -> CohereResponse:
        """Cohere's v2. The header `x-budget-ms` sets a time budget."""
        return CohereResponse.from_result(await rank_body(body, request), body)

    @foreign_route("/v1/rerank", responses=_error_responses(settings, "v1", V1Error))
    async def v1(body: V1Request, request: Request) -> V1Response:
        """Cohere's v1 and Jina's. The header `x-budget-ms` sets a time budget."""
        return V1Response.from_result(await rank_body(body, request), body)

    @foreign_route("/rerank", responses=_error_responses(settings, "tei", TeiError | V1Error))
    async def rerank(
        body: TeiRequest | V1Request, request: Request
    ) -> list[TeiScoredText] | V1Response:
        """Text Embeddings Inference's; with `documents` Infinity's and vLLM's.

        The header `x-budget-ms` sets a time budget.
        """
        if isinstance(body, TeiRequest):
            return TeiScoredText.all_from_result(await rank_body(body, request), body)
        return V1Response.from_result(await rank_body(body, request), body)

    @app.post("/rank", name="rank", responses=_error_responses(settings, "as2ray", RankError))
    async def rank_route(body: RankRequest, request: Request) -> RankResponse:
        """Ranks candidates by how well they answer the question."""
        return RankResponse.from_result(await rank_body(body, request), body)


def _add_ask_route(
    app: FastAPI, service: RankingService, settings: Settings, ask_handler: AskHandler, rank: Rank
) -> None:
    @app.post("/ask", responses=_error_responses(settings, "as2ray", RankError))
    async def ask(body: AskRequest, request: Request, response: Response) -> AskResponse:
        """Answers a question from the documents of the index."""
        model = select_ask_model(body, service.models)
        # The question stands in for the candidates, which have not been retrieved yet.
        rerank_request = body.to_request(model, [body.question])
        check_limits(rerank_request, settings.limits)
        check_request_texts(rerank_request)
        budget_ms = get_budget_ms(body, request)
        answer = await ask_handler.ask(body, model, lambda ranked: rank(ranked, request, budget_ms))
        if budget_ms is None or answer.budget_ms is not None:
            return answer
        # Nothing was ranked.
        exceeded_ms = TimeBudget(budget_ms, request.state.arrived_at).exceeded_ms
        response.headers["x-budget-exceeded-ms"] = f"{exceeded_ms:g}"
        budget = {"budget_ms": budget_ms, "budget_exceeded_ms": exceeded_ms}
        return answer.model_copy(update=budget)


def _add_document_route(app: FastAPI, settings: Settings, index: SentenceIndex) -> None:
    responses = _error_responses(settings, "as2ray", RankError)

    @app.get("/documents/{document_id:document}", responses=responses)
    async def document(document_id: str) -> DocumentResponse:
        """Returns the text of a document of the index.

        At most its first 1,000 paragraphs, and 1,000,000 characters.
        """
        bounds = MAX_PARAGRAPHS, MAX_DOCUMENT_CHARS
        indexed = await asyncio.to_thread(index.document, document_id, *bounds)
        if indexed is None:
            problem = "no document of the index has this id"
            raise RequestError("not_found", problem, "use a `document_id` of `/ask`")
        return DocumentResponse(
            document_id=document_id,
            title=indexed.title,
            paragraphs=[DocumentParagraph(heading=h, text=t) for h, t in indexed.paragraphs],
            is_complete=indexed.is_complete,
        )


def _error_responses(settings: Settings, dialect: Dialect, model: Any) -> dict[int | str, Any]:
    """Returns the error responses of a path for the OpenAPI document; `model` is their body."""
    codes = {status_code(code, dialect, settings.overload_status_code) for code in ERRORS}
    return {code: {"model": model} for code in sorted(codes)}


def _add_status_routes(
    app: FastAPI,
    service: RankingService,
    settings: Settings,
    admission: Admission,
    index: SentenceIndex | None,
) -> None:
    responses = _error_responses(settings, "as2ray", RankError)
    examples = [] if index is None else example_questions(index)

    @app.get("/info", responses=responses)
    async def info() -> Info:
        """Describes the default model and the limits of requests."""
        model = next(iter(service.models), "")
        model_info = await service.get_model_info(model) if model else NO_MODEL
        return Info(
            model_id=model,
            model_dtype=model_info.dtype,
            max_input_length=model_info.max_length,
            max_batch_tokens=settings.batching.max_batch_tokens,
            max_client_batch_size=settings.limits.max_candidates,
            max_concurrent_requests=settings.batching.max_ongoing_requests,
            version=version("as2ray"),
            models=list(service.models),
            exit_layers=model_info.exit_layers,
            drop_ratios=model_info.drop_ratios,
            family=model_info.family,
            head=model_info.head,
            activation=model_info.activation,
            margins=asdict(model_info.margins) if model_info.margins else None,
            bm25_margin=model_info.bm25_margin,
            bm25_weights=model_info.bm25_weights,
            threshold=model_info.threshold,
            max_drop_ratio=settings.limits.max_drop_ratio,
            num_indexed_sentences=0 if index is None else len(index),
            example_questions=examples,
            model_problem=service.model_problem,
        )

    @app.get("/health", responses=responses)
    async def health() -> dict[str, str]:
        """Tells whether a ranker responds."""
        service.check_rankers()
        return {"status": "ok"}

    @app.get("/ready", responses=responses)
    async def ready() -> dict[str, str]:
        """Tells whether requests are accepted."""
        service.check_rankers()
        admission.check_ready()
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse, responses=responses)
    async def metrics() -> str:
        """Returns the metrics in Prometheus's text format."""
        return await service.export_metrics()


def _add_demo_page(app: FastAPI) -> None:
    page = DEMO_PAGE.read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def demo_page() -> HTMLResponse:
        """A page to try the ranker on."""
        return HTMLResponse(page, headers=DEMO_PAGE_HEADERS)


def _add_api_page(app: FastAPI) -> None:
    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def api_page() -> HTMLResponse:
        """What can be sent to which path."""
        return HTMLResponse(render_page(app.openapi()), headers=API_PAGE_HEADERS)


def _add_error_handlers(app: FastAPI) -> None:
    """Turns FastAPI's errors into those of the service, to which `RequestMiddleware` responds."""

    @app.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        code: ErrorCode = "not_found" if error.status_code in (404, 405) else "invalid_json"
        problem = f"{request.method} of this path: {error.detail}"
        request_error = RequestError(code, problem, "use a path and method of /openapi.json")
        response = error_response(request.scope, request_error)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response
