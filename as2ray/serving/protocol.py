"""The wire contract: what clients send, and what they get; `refusals` has how each is told no.

Knows pydantic and the service's own question and answer. Must not know HTTP servers or rankers.

Four dialects, one core. Every request becomes an `Asked` by `asked()`, every `Answer` goes back by
`of()`; unknown fields of the foreign dialects are ignored, as their own servers do, and ours are
refused.

- Cohere's `/v2/rerank`.
- `/v1/rerank` is two at once, Cohere's v1 and Jina's, which cannot be told apart by their requests.
  So its request is the union of the two (documents are strings or objects; `rank_fields` says which
  fields of an object are read, by default `text`), and its response too: `id` and `meta` for one,
  `model` and `usage` for the other. Only `return_documents` has two defaults. Cohere's (no) holds:
  clients of either find documents by `index`.
- Text Embeddings Inference's `/rerank`. The same path with `documents` in place of `texts` is
  Infinity's and vLLM's, and answered as `/v1/rerank`.
- Ours, `/rank`: with exit layers, drop ratios, survivors, times.

A candidate that fell early can have a higher score than a survivor. Foreign clients sort by score,
LlamaIndex's even from the order in which it asked, so there each score stands below the one before
it; `/rank` tells scores as they are.
"""

from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from scipy.special import logit

from as2ray.outputs import RankedCandidate, strictly_decreasing
from as2ray.serving.types import RerankRequest, RerankResult

Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "pattern": r"\S"})]


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character") from None
    return text


DocumentFields = Annotated[
    dict[str, Annotated[str, AfterValidator(_check_unicode)]],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]
"""Goes back as it came, so all of it must be whole; what is ranked is looked at elsewhere."""
DropRatio = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


class StrictModel(BaseModel):
    """A message; types are not guessed at."""

    model_config = ConfigDict(strict=True)


class CohereRequest(StrictModel):
    """`POST /v2/rerank`."""

    model: str
    query: Text
    documents: list[Text]
    top_n: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None
    """Read, not followed: pairs are cut to the ranker's own length, which `/info` tells."""

    def to_request(self) -> RerankRequest:
        """As the service asks."""
        return RerankRequest(self.query, self.documents, self.model)


class V1Request(StrictModel):
    """`POST /v1/rerank`: Cohere's v1 and Jina's."""

    query: Text
    documents: list[Text | DocumentFields]
    model: str | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None
    """0 is all, as vLLM's clients say it."""
    return_documents: bool = False
    rank_fields: list[str] | None = None
    max_chunks_per_doc: PositiveInt | None = None
    """Read, not followed: a candidate is one sentence."""

    def to_request(self) -> RerankRequest:
        """As the service asks."""
        fields = self.rank_fields or ["text"]
        texts = [
            one if isinstance(one, str) else "\n".join(one[key] for key in fields if key in one)
            for one in self.documents
        ]
        return RerankRequest(self.query, texts, self.model)


class TeiRequest(StrictModel):
    """`POST /rerank` of Text Embeddings Inference."""

    query: Text
    texts: list[Text]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    """Long pairs are cut either way: the ranker was trained so."""
    truncation_direction: Literal["right", "Right"] = "right"

    def to_request(self) -> RerankRequest:
        """As the service asks."""
        return RerankRequest(self.query, self.texts)


class RankRequest(StrictModel):
    """`POST /rank`, as2ray's own."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: Text
    candidates: list[Text]
    model: str | None = None
    top_k: PositiveInt | None = None
    drop_ratios: DropRatio | list[DropRatio] | None = None
    """Part of the candidates that goes after each exit: one for all, or one for each but the last.
    What is asked is kept to, also where too many wait."""
    return_text: bool = True

    def to_request(self) -> RerankRequest:
        """As the service asks."""
        return RerankRequest(self.question, self.candidates, self.model, self.drop_ratios)


class ScoredDocument(StrictModel):
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
        """In this dialect."""
        results = [
            ScoredDocument(index=i, relevance_score=s)
            for i, s in _strictly_decreasing_scores(result.ranking)
        ]
        return cls(
            id=_create_response_id(),
            results=results[: request.top_n],
            meta=_build_meta(result, "2"),
        )


class V1Response(StrictModel):
    """Of `/v1/rerank`."""

    id: str
    model: str
    results: list[ScoredDocument]
    usage: dict[str, int]
    meta: dict[str, Any]

    @classmethod
    def from_result(cls, result: RerankResult, request: V1Request) -> "V1Response":
        """In this dialect."""
        results = [
            ScoredDocument(
                index=i,
                relevance_score=s,
                document=_to_document_fields(request.documents[i])
                if request.return_documents
                else None,
            )
            for i, s in _strictly_decreasing_scores(result.ranking[: request.top_n or None])
        ]
        usage = {"total_tokens": result.num_tokens, "prompt_tokens": result.num_tokens}
        return cls(
            id=_create_response_id(),
            model=result.model,
            results=results,
            usage=usage,
            meta=_build_meta(result, "1"),
        )


class TeiScoredText(StrictModel):
    """A text of Text Embeddings Inference's response, which is a bare list of them."""

    index: int
    score: float
    text: str | None = None

    @classmethod
    def all_from_result(cls, result: RerankResult, request: TeiRequest) -> "list[TeiScoredText]":
        """The response."""
        edge, scores = np.finfo(np.float32).eps, [one.score for one in result.ranking]
        if request.raw_scores:
            scores = logit(np.clip(scores, edge, 1 - edge)).tolist()
        return [
            cls(
                index=one.index,
                score=score,
                text=request.texts[one.index] if request.return_text else None,
            )
            for one, score in zip(result.ranking, strictly_decreasing(scores))
        ]


class AskRequest(StrictModel):
    """`POST /ask`, as2ray's own: a question to the documents of the service's index."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: Text
    model: str | None = None
    top_k: PositiveInt = 3
    """Most answers."""
    num_candidates: PositiveInt = 100
    """Most sentences that are ranked."""
    num_neighbors: Annotated[int, Field(ge=0, le=10)] = 1
    """Neighbours on either side that come with a sentence as candidates."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Score that an answer must have; by default the ranker's own, if it was calibrated."""
    drop_ratios: DropRatio | list[DropRatio] | None = None
    """As in `/rank`."""


class RankedText(StrictModel):
    """A candidate of `/rank`'s response: `as2ray.tables.schema.Ranked`."""

    index: int
    score: float
    text: str | None = None
    exit_layer: int | None = None


class RankingDetails(StrictModel):
    """What an answer took: of `/rank` and of `/ask`."""

    model: str
    exit_layers: list[int]
    num_scored: list[int]
    """Candidates that each exit scored."""
    drop_ratios: list[float]
    """As used."""
    load_shed: bool
    """Whether the ratios were raised because too many waited."""
    num_tokens: int
    timings_ms: dict[str, float]

    @staticmethod
    def timing_fields(result: RerankResult) -> dict[str, Any]:
        """These fields."""
        return {
            "model": result.model,
            "exits": list(result.exit_layers),
            "survivors": list(result.num_scored),
            "drop": list(result.drop_ratios),
            "relieved": result.load_shed,
            "tokens": result.num_tokens,
            "milliseconds": {name: round(1e3 * s, 3) for name, s in result.timings_s.items()},
        }


class RankResponse(RankingDetails):
    """Of `/rank`."""

    ranking: list[RankedText]

    @classmethod
    def from_result(cls, result: RerankResult, request: RankRequest) -> "RankResponse":
        """In this dialect."""
        ranking = [
            RankedText(
                index=one.index,
                score=one.score,
                text=one.text if request.return_text else None,
                exit_layer=one.exit_layer,
            )
            for one in result.ranking[: request.top_k]
        ]
        return cls(ranking=ranking, **cls.timing_fields(result))


class AnswerText(StrictModel):
    """An answer of `/ask`'s response: `as2ray.retrieval.question_answering.Answer`."""

    text: str
    score: float
    document_id: str
    title: str
    heading: str
    context: str
    exit_layer: int | None = None


class AskResponse(RankingDetails):
    """Of `/ask`."""

    answers: list[AnswerText]
    """Best first; none where nothing was found, or nothing good enough."""
    num_candidates: int
    """Sentences that were ranked."""
    best_score: float | None
    """Score of the best candidate, also of one too low to be an answer."""
    threshold: float
    """Score that an answer had to have."""


class Info(StrictModel):
    """`GET /info`: Text Embeddings Inference's words, and ours."""

    model_id: str
    model_type: dict[str, Any] = {"reranker": {"id2label": {"0": "LABEL_0"}}}
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    max_concurrent_requests: int
    version: str
    models: list[str]
    exit_layers: list[int]
    drop_ratios: list[float]
    max_drop_ratio: float
    num_indexed_sentences: int
    """Of the index that `/ask` answers from; 0 without one."""


def _strictly_decreasing_scores(ranking: list[RankedCandidate]) -> list[tuple[int, float]]:
    """Index and score, best first, each score below the one before it."""
    scores = strictly_decreasing(one.score for one in ranking)
    return [(one.index, score) for one, score in zip(ranking, scores)]


def _to_document_fields(document: str | dict[str, str]) -> dict[str, str]:
    return {"text": document} if isinstance(document, str) else document


def _build_meta(result: RerankResult, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": result.num_tokens},
    }
    if result.load_shed:
        meta["warnings"] = [f"under load: drop ratios raised to {list(result.drop_ratios)}"]
    return meta


def _create_response_id() -> str:
    return str(uuid4())
