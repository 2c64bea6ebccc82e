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

from as2ray.records import Ranked, falling
from as2ray.serving.asked import Answer, Asked

Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "pattern": r"\S"})]


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character") from None
    return text


Fields = Annotated[
    dict[str, Annotated[str, AfterValidator(_whole)]],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]
"""Goes back as it came, so all of it must be whole; what is ranked is looked at elsewhere."""
Ratio = Annotated[float, Field(ge=0.0, lt=1.0)]
TopN = Annotated[int, Field(ge=1)]


class Wire(BaseModel):
    """A message; types are not guessed at."""

    model_config = ConfigDict(strict=True)


class CohereRequest(Wire):
    """`POST /v2/rerank`."""

    model: str
    query: Text
    documents: list[Text]
    top_n: TopN | None = None
    max_tokens_per_doc: TopN | None = None
    """Read, not followed: pairs are cut to the ranker's own length, which `/info` tells."""

    def asked(self) -> Asked:
        """As the service asks."""
        return Asked(self.query, self.documents, self.model)


class V1Request(Wire):
    """`POST /v1/rerank`: Cohere's v1 and Jina's."""

    query: Text
    documents: list[Text | Fields]
    model: str | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None
    """0 is all, as vLLM's clients say it."""
    return_documents: bool = False
    rank_fields: list[str] | None = None
    max_chunks_per_doc: TopN | None = None
    """Read, not followed: a candidate is one sentence."""

    def asked(self) -> Asked:
        """As the service asks."""
        fields = self.rank_fields or ["text"]
        texts = [
            one if isinstance(one, str) else "\n".join(one[key] for key in fields if key in one)
            for one in self.documents
        ]
        return Asked(self.query, texts, self.model)


class TeiRequest(Wire):
    """`POST /rerank` of Text Embeddings Inference."""

    query: Text
    texts: list[Text]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    """Long pairs are cut either way: the ranker was trained so."""
    truncation_direction: Literal["right", "Right"] = "right"

    def asked(self) -> Asked:
        """As the service asks."""
        return Asked(self.query, self.texts)


class RankRequest(Wire):
    """`POST /rank`, as2ray's own."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: Text
    candidates: list[Text]
    model: str | None = None
    top_k: TopN | None = None
    drop: Ratio | list[Ratio] | None = None
    """Part of the candidates that goes after each exit: one for all, or one for each but the last.
    What is asked is kept to, also where too many wait."""
    return_text: bool = True

    def asked(self) -> Asked:
        """As the service asks."""
        return Asked(self.question, self.candidates, self.model, self.drop)


class Scored(Wire):
    """A document of Cohere's or Jina's results."""

    index: int
    relevance_score: float
    document: Fields | None = None


class CohereResponse(Wire):
    """Of `/v2/rerank`."""

    id: str
    results: list[Scored]
    meta: dict[str, Any]

    @classmethod
    def of(cls, answer: Answer, request: CohereRequest) -> "CohereResponse":
        """In this dialect."""
        results = [Scored(index=i, relevance_score=s) for i, s in _falling(answer.ranking)]
        return cls(id=_id(), results=results[: request.top_n], meta=_meta(answer, "2"))


class V1Response(Wire):
    """Of `/v1/rerank`."""

    id: str
    model: str
    results: list[Scored]
    usage: dict[str, int]
    meta: dict[str, Any]

    @classmethod
    def of(cls, answer: Answer, request: V1Request) -> "V1Response":
        """In this dialect."""
        results = [
            Scored(
                index=i,
                relevance_score=s,
                document=_object(request.documents[i]) if request.return_documents else None,
            )
            for i, s in _falling(answer.ranking[: request.top_n or None])
        ]
        usage = {"total_tokens": answer.tokens, "prompt_tokens": answer.tokens}
        return cls(
            id=_id(), model=answer.model, results=results, usage=usage, meta=_meta(answer, "1")
        )


class TeiScored(Wire):
    """A text of Text Embeddings Inference's response, which is a bare list of them."""

    index: int
    score: float
    text: str | None = None

    @classmethod
    def all_of(cls, answer: Answer, request: TeiRequest) -> "list[TeiScored]":
        """The response."""
        edge, scores = np.finfo(np.float32).eps, [one.score for one in answer.ranking]
        if request.raw_scores:
            scores = logit(np.clip(scores, edge, 1 - edge)).tolist()
        return [
            cls(
                index=one.index,
                score=score,
                text=request.texts[one.index] if request.return_text else None,
            )
            for one, score in zip(answer.ranking, falling(scores))
        ]


class AskRequest(Wire):
    """`POST /ask`, as2ray's own: a question to the documents of the service's index."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: Text
    model: str | None = None
    top_k: TopN = 3
    """Most answers."""
    candidates: TopN = 100
    """Most sentences that are ranked."""
    around: Annotated[int, Field(ge=0, le=10)] = 1
    """Neighbours on either side that come with a sentence as candidates."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Score that an answer must have; by default the ranker's own, if it was calibrated."""
    drop: Ratio | list[Ratio] | None = None
    """As in `/rank`."""


class RankedText(Wire):
    """A candidate of `/rank`'s response: `as2ray.records.Ranked`."""

    index: int
    score: float
    text: str | None = None
    exit_layer: int | None = None


class Took(Wire):
    """What an answer took: of `/rank` and of `/ask`."""

    model: str
    exits: list[int]
    survivors: list[int]
    """Candidates that each exit scored."""
    drop: list[float]
    """As used."""
    relieved: bool
    """Whether the ratios were raised because too many waited."""
    tokens: int
    milliseconds: dict[str, float]

    @staticmethod
    def took(answer: Answer) -> dict[str, Any]:
        """These fields."""
        return {
            "model": answer.model,
            "exits": list(answer.exits),
            "survivors": list(answer.survivors),
            "drop": list(answer.drop),
            "relieved": answer.relieved,
            "tokens": answer.tokens,
            "milliseconds": {name: round(1e3 * s, 3) for name, s in answer.seconds.items()},
        }


class RankResponse(Took):
    """Of `/rank`."""

    ranking: list[RankedText]

    @classmethod
    def of(cls, answer: Answer, request: RankRequest) -> "RankResponse":
        """In this dialect."""
        ranking = [
            RankedText(
                index=one.index,
                score=one.score,
                text=one.text if request.return_text else None,
                exit_layer=one.exit_layer,
            )
            for one in answer.ranking[: request.top_k]
        ]
        return cls(ranking=ranking, **cls.took(answer))


class AnswerText(Wire):
    """An answer of `/ask`'s response: `as2ray.retrieval.answers.Answer`."""

    text: str
    score: float
    document: str
    title: str
    heading: str
    context: str
    exit_layer: int | None = None


class AskResponse(Took):
    """Of `/ask`."""

    answers: list[AnswerText]
    """Best first; none where nothing was found, or nothing good enough."""
    candidates: int
    """Sentences that were ranked."""
    best: float | None
    """Score of the best candidate, also of one too low to be an answer."""
    threshold: float
    """Score that an answer had to have."""


class Info(Wire):
    """`GET /info`: Text Embeddings Inference's words, and ours."""

    model_id: str
    model_type: dict[str, Any] = {"reranker": {"id2label": {"0": "LABEL_0"}}}
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    max_concurrent_requests: int
    version: str
    models: list[str]
    exits: list[int]
    drop: list[float]
    max_drop: float
    sentences: int
    """Of the index that `/ask` answers from; 0 without one."""


def _falling(ranking: list[Ranked]) -> list[tuple[int, float]]:
    """Index and score, best first, each score below the one before it."""
    scores = falling(one.score for one in ranking)
    return [(one.index, score) for one, score in zip(ranking, scores)]


def _object(document: str | dict[str, str]) -> dict[str, str]:
    return {"text": document} if isinstance(document, str) else document


def _meta(answer: Answer, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": answer.tokens},
    }
    if answer.relieved:
        meta["warnings"] = [f"under load: drop ratios raised to {list(answer.drop)}"]
    return meta


def _id() -> str:
    return str(uuid4())
