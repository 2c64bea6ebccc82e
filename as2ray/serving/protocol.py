"""The wire contract: requests and responses of four dialects; `error_responses` has the errors.

`to_request()` converts every request to a `RerankRequest`, `from_result()` converts a
`RerankResult` to every response. Unknown fields of the foreign dialects are ignored, as their own
servers do; unknown fields of as2ray's dialect are rejected.

- Cohere's `/v2/rerank`.
- `/v1/rerank` serves both Cohere's v1 and Jina's clients, whose requests cannot be told apart. The
  request is therefore the union of both (documents are strings or objects; `rank_fields` says which
  fields of an object are ranked, by default `text`), and so is the response: `id` and `meta` for
  Cohere, `model` and `usage` for Jina. Only the default of `return_documents` differs: Cohere's
  (no) is used, as clients of either find documents by `index`.
- Text Embeddings Inference's `/rerank`. The same path with `documents` instead of `texts` is
  Infinity's and vLLM's, and is answered as `/v1/rerank`.
- as2ray's `/rank` and `/ask`: with exit layers, drop ratios, numbers of scored candidates, timings.

A request of any dialect can have a budget, in the header `x-budget-ms`; the response's header
`x-budget-exceeded-ms` says by how much it was exceeded. as2ray's own have a field for it, too.

A candidate that was dropped early can have a higher score than a survivor. Foreign clients sort by
score (LlamaIndex's starting from the order of its request), so in their dialects each score is
lowered below the one before it. `/rank` returns scores unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from scipy.special import logit

from as2ray.outputs import strictly_decreasing
from as2ray.retrieval.question_answering import Answer
from as2ray.serving.settings import DropRatio
from as2ray.serving.types import CandidateScore, RequestError, RerankRequest, RerankResult

PositiveInt = Annotated[int, Field(ge=1)]
"""In OpenAPI `minimum: 1`, which is easier to read than the `exclusiveMinimum: 0` of pydantic's."""
Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "pattern": r"\S"})]


MAX_BUDGET_MS = 3_600_000
BudgetMs = Annotated[float, Field(gt=0, le=MAX_BUDGET_MS, allow_inf_nan=False)]
"""Milliseconds from a request's arrival in which it should be ranked; at most an hour."""
BUDGET_HEADER = "x-budget-ms"
"""Header with the budget of a request, in all dialects."""


def _check_document(document: object) -> str | dict[str, str]:
    if isinstance(document, str):
        return document
    # One error for a document, however many of its fields are wrong.
    if isinstance(document, dict) and all(isinstance(field, str) for field in document.values()):
        return document
    raise PydanticCustomError("document_type", "A document must be a string or fields of strings")


DocumentFields = dict[str, str]
"""A document with named fields."""
Document = Annotated[
    str | DocumentFields,
    PlainValidator(_check_document, json_schema_input_type=Text | DocumentFields),
]
"""A text, or named fields with texts."""
Texts = Annotated[list[Text], Field(fail_fast=True)]
MAX_RANK_FIELDS = 64


class StrictModel(BaseModel):
    """A message; values are not converted to other types."""

    model_config = ConfigDict(strict=True)


class CohereRequest(StrictModel):
    """`POST /v2/rerank`."""

    model: str
    query: Text
    documents: Texts
    top_n: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None
    """Accepted and ignored: pairs are truncated to the ranker's length, which `/info` returns."""

    def to_request(self, model: str) -> RerankRequest:
        """Converts to the service's request, to a model that is served."""
        return RerankRequest(self.query, self.documents, model)


class V1Request(StrictModel):
    """`POST /v1/rerank`: Cohere's v1 and Jina's."""

    query: Text
    documents: Annotated[list[Document], Field(fail_fast=True)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None
    """0 stands for all, as in vLLM's clients."""
    return_documents: bool | None = False
    rank_fields: Annotated[list[str], Field(max_length=MAX_RANK_FIELDS)] | None = None
    max_chunks_per_doc: PositiveInt | None = None
    """Accepted and ignored: a candidate is one sentence."""

    def to_request(self, model: str) -> RerankRequest:
        """Converts to the service's request, to a model that is served.

        Raises:
            RequestError: A document has none of the fields that are ranked.
        """
        fields = list(dict.fromkeys(self.rank_fields or ["text"]))
        texts = [_join_fields(i, document, fields) for i, document in enumerate(self.documents)]
        return RerankRequest(self.query, texts, model)


class TeiRequest(StrictModel):
    """`POST /rerank` of Text Embeddings Inference."""

    model: str | None = None
    """Not in Text Embeddings Inference, which serves one; names one of several here."""
    query: Text
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    """Accepted and ignored: long pairs are always truncated, as in training."""
    truncation_direction: Literal["right", "Right"] = "right"

    def to_request(self, model: str) -> RerankRequest:
        """Converts to the service's request, to a model that is served."""
        return RerankRequest(self.query, self.texts, model)


class QuestionRequest(StrictModel):
    """What as2ray's own requests have in common."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: Text
    model: str | None = None
    drop_ratios: DropRatio | Annotated[list[DropRatio], Field(fail_fast=True)] | None = None
    """Share of the candidates that is dropped after each exit: one number for all exits, or one for
    each exit but the last. Load shedding does not change drop ratios that a request sets."""
    budget_ms: BudgetMs | None = None
    """Milliseconds from the request's arrival in which it should be ranked, waiting included. As
    many candidates pass each exit as there is time for; those for which there was none keep their
    order below the others, with `exit_layer` 0. The header `x-budget-ms` says the same."""


class RankRequest(QuestionRequest):
    """`POST /rank`, as2ray's own."""

    candidates: Texts
    top_k: PositiveInt | None = None
    return_text: bool = True

    def to_request(self, model: str) -> RerankRequest:
        """Converts to the service's request, to a model that is served."""
        return RerankRequest(self.question, self.candidates, model, self.drop_ratios)


class AskRequest(QuestionRequest):
    """`POST /ask`, as2ray's own: a question to the documents of the service's index."""

    top_k: PositiveInt = 3
    """Maximum number of answers."""
    num_candidates: PositiveInt = 100
    """Maximum number of sentences that are ranked."""
    num_neighbors: Annotated[int, Field(ge=0, le=10)] = 1
    """Neighbors on either side of a retrieved sentence that are ranked too."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Minimum of `best_score`; by default what was fitted decides, and 0 always answers."""

    def to_request(self, model: str, candidates: list[str]) -> RerankRequest:
        """Converts to the service's request, with the candidates that were retrieved."""
        return RerankRequest(self.question, candidates, model, self.drop_ratios)


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document of Cohere's or Jina's results."""

    index: int
    relevance_score: float
    document: DocumentFields | None = None


class CohereResponse(StrictModel):
    """Of `/v2/rerank`."""

    id: str
    results: list[ScoredDocument]
    meta: dict[str, Any]

    @classmethod
    def from_result(cls, result: RerankResult, request: CohereRequest) -> "CohereResponse":
        """Converts a result to this dialect."""
        results = _score_documents(result.ranking[: request.top_n])
        return cls(id=str(uuid4()), results=results, meta=_build_meta(result, "2"))


class V1Response(StrictModel):
    """Of `/v1/rerank`."""

    id: str
    model: str
    results: list[ScoredDocument]
    usage: dict[str, int]
    meta: dict[str, Any]

    @classmethod
    def from_result(cls, result: RerankResult, request: V1Request) -> "V1Response":
        """Converts a result to this dialect."""
        documents = request.documents if request.return_documents else None
        results = _score_documents(result.ranking[: request.top_n or None], documents)
        usage = {"total_tokens": result.num_tokens, "prompt_tokens": result.num_tokens}
        meta = _build_meta(result, "1")
        return cls(id=str(uuid4()), model=result.model, results=results, usage=usage, meta=meta)


class TeiScoredText(StrictModel):
    """A text of Text Embeddings Inference's response, which is a bare list of them."""

    index: int
    score: float
    text: str | None = None

    @classmethod
    def all_from_result(cls, result: RerankResult, request: TeiRequest) -> "list[TeiScoredText]":
        """Converts a result to this dialect."""
        scores = [candidate.score for candidate in result.ranking]
        if request.raw_scores and not any(candidate.is_logit for candidate in result.ranking):
            epsilon = np.finfo(np.float32).eps
            scores = logit(np.clip(scores, epsilon, 1 - epsilon)).tolist()
        texts = request.texts if request.return_text else [None] * len(request.texts)
        return [
            cls(index=candidate.index, score=score, text=texts[candidate.index])
            for candidate, score in zip(result.ranking, strictly_decreasing(scores))
        ]


@dataclass(frozen=True, slots=True)
class RankedText(CandidateScore):
    """A candidate of `/rank`'s response."""

    text: str | None = None
    """None if the request does not want texts back."""


class RankingDetails(StrictModel):
    """How a ranking was computed; part of the responses of `/rank` and `/ask`."""

    model: str
    exit_layers: tuple[int, ...]
    num_ranked: int
    """Number of candidates that the ranker was given."""
    num_scored: tuple[int, ...]
    """Number of candidates that each exit scored."""
    drop_ratios: tuple[float, ...]
    """Drop ratio that was used after each exit but the last."""
    load_shed: bool
    """Whether drop ratios were raised because the queue was too full, or time was left to other
    requests with a budget."""
    budget_ms: float | None
    """The budget of the request; null if it had none."""
    budget_exceeded_ms: float | None
    """By how many milliseconds the ranking was late; null without a budget."""
    num_tokens: int
    timings_ms: dict[str, float]

    @staticmethod
    def details_of(result: RerankResult) -> dict[str, Any]:
        """Returns the values of these fields."""
        return {name: getattr(result, name) for name in RankingDetails.model_fields}


class RankResponse(RankingDetails):
    """Response of `/rank`."""

    ranking: list[RankedText]

    @classmethod
    def from_result(cls, result: RerankResult, request: RankRequest) -> "RankResponse":
        """Converts a result to this dialect."""
        texts = request.candidates if request.return_text else [None] * len(request.candidates)
        ranking = [
            RankedText(
                ranked.index, ranked.score, ranked.exit_layer, ranked.is_logit, texts[ranked.index]
            )
            for ranked in result.ranking[: request.top_k]
        ]
        return cls(ranking=ranking, **cls.details_of(result))


class AskResponse(RankingDetails):
    """Response of `/ask`."""

    answers: list[Answer]
    """Best first; empty if nothing was retrieved or the question should get no answer."""
    num_candidates: int
    """Number of sentences that were found."""
    best_score: float | None
    """Probability that the first answer is right, or the ranker's score of it, even if it is too
    low for an answer; null without either, also where the budget left no time for it."""
    reason: str | None
    """Why there is no answer; null if there is one."""
    nearest: list[Answer]
    """The best sentences where there is no answer, one where the documents are on other subjects;
    empty if there is an answer."""


class DocumentParagraph(StrictModel):
    """A paragraph of a document."""

    heading: str
    """Heading above it."""
    text: str


class DocumentResponse(StrictModel):
    """Response of `/documents/ID`."""

    document_id: str
    title: str
    paragraphs: list[DocumentParagraph]
    """In order."""
    is_complete: bool
    """Whether this is all of its text."""


class Info(StrictModel):
    """`GET /info`: Text Embeddings Inference's fields, and as2ray's own."""

    model_id: str
    model_dtype: str
    """Number format of matrix products: what `dtype: auto` has picked, or what was set."""
    model_type: dict[str, Any] = {"reranker": {"id2label": {"0": "LABEL_0"}}}
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    max_concurrent_requests: int
    version: str
    models: list[str]
    exit_layers: tuple[int, ...]
    drop_ratios: tuple[float, ...]
    family: str
    """`model_type` of the encoder; empty for an ensemble."""
    head: str
    """Class of the network with its head."""
    activation: str
    """What a score is: a probability (`sigmoid`), or its logit (`identity`)."""
    margins: dict[str, Any] | None
    """Margins that drop candidates instead of the ratios, with the bound on what they lose."""
    bm25_margin: float | None
    """Margin of BM25 below which candidates leave before the first layer, in log-odds."""
    bm25_weights: tuple[float, ...]
    """Weight of BM25 in the log-odds of each exit; 0 without it."""
    threshold: float | None
    """Score below which the best candidate should not be given as an answer, if that was fitted."""
    max_drop_ratio: float
    num_indexed_sentences: int
    """Number of sentences in the index of `/ask`; 0 without an index."""
    example_questions: list[str]
    """Subjects of the index: some of its headings, or of its short paragraphs."""
    model_problem: str | None
    """Why the last change of models was rejected and the models before it rank; null if it was
    not."""


def _join_fields(index: int, document: str | DocumentFields, fields: list[str]) -> str:
    """Returns the text of a document that is ranked.

    Raises:
        RequestError: The document has none of the fields.
    """
    if isinstance(document, str):
        return document
    texts = [document[field] for field in fields if field in document]
    if not texts:
        fix = "name its fields in `rank_fields`; by default `text` is ranked"
        raise RequestError("invalid_request", f"document {index} has no field to rank", fix)
    return "\n".join(texts)


def _score_documents(
    ranking: list[CandidateScore], documents: Sequence[str | dict[str, str]] | None = None
) -> list[ScoredDocument]:
    """Returns Cohere's and Jina's results; without `documents` they contain indices alone."""
    results = []
    for candidate, score in zip(ranking, strictly_decreasing(c.score for c in ranking)):
        document = documents[candidate.index] if documents else None
        document = {"text": document} if isinstance(document, str) else document
        results.append(ScoredDocument(candidate.index, score, document))
    return results


def _build_meta(result: RerankResult, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": result.num_tokens},
    }
    if result.load_shed and result.budget_ms is None:
        meta["warnings"] = [f"under load: drop ratios raised to {list(result.drop_ratios)}"]
    return meta
