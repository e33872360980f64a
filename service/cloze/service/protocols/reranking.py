"""Reranking in the shapes of Cohere and Jina, and of NVIDIA, and what all of reranking shares.

Infinity, vLLM, Voyage, Xinference and Weaviate have Cohere's body, and answers that differ. The
answer of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank`` has the fields of all of them:

- ``results`` and ``meta`` are Cohere's and Jina's, ``usage`` is Jina's, Infinity's and vLLM's, and
  ``tokens`` is Xinference's. Voyage reads ``data`` instead of ``results``; it stands in answers of
  ``/v1/rerank``, the only path of Voyage.
- A result's ``document`` is ``{"text"}``, as Cohere, Jina and vLLM read it. In an answer of
  ``/rerank`` with ``return_documents: true`` it is a string, as Infinity and its client in LiteLLM
  read it, and so it is with Voyage's field ``top_k``. Without ``return_documents``, which vLLM does
  not have, an answer of ``/v2/rerank`` has no documents, as Cohere's version 2; the others have.
- Weaviate's module sends no ``model`` to ``/rerank``, and reads ``query`` and ``scores``, which are
  in the order of the request.

Sources: the released clients, cohere 5.21, litellm 1.83, voyageai 0.5 and infinity-client 0.0.78,
and Weaviate's module reranker-transformers. NVIDIA's are langchain-nvidia-ai-endpoints,
llama-index-postprocessor-nvidia and LiteLLM, which names the model in the path too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import unquote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.body import BytesResponse
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import openai
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_task,
    json_response,
)
from cloze.service.protocols.shared_paths import Flag, ServedName
from cloze.service.tasks import embed_all, late_interaction, rerank, similarity, text_classification
from cloze.service.tasks.texts import TRUNCATIONS, PromptTokens, TokenLimit
from cloze.service.tasks.wire import Count, CountOrZero, NotEmpty, Text, WireModel

_V1: Final = "/v1/rerank"
_V2: Final = "/v2/rerank"
PATH: Final = "/rerank"
_MODEL_PATHS: Final = (
    "/v1/retrieval/{model}/reranking",
    "/v1/retrieval/{organization}/{model}/reranking",  # NVIDIA's names have a slash
)


RANKED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "x-ranked-by": (
        "string",
        "classifier; late-interaction where no reranker is served, else similarity (of embeddings)",
    )
}


class ScoredBody(LenientModel):
    """What bodies with texts to score have in common, in vLLM's and Infinity's protocols."""

    model: ServedName = None
    raw_scores: bool | None = None
    """Infinity's field: whether the scores are the model's logits"""
    use_activation: bool | None = None
    """vLLM's field: false is the same as raw_scores true"""
    truncate_prompt_tokens: TokenLimit = None


class RankParameters(PromptTokens, rerank.RerankParameters):
    """The parameters of the task, and vLLM's limit."""


class RankRoute(TaskRoute):
    """A route that scores texts by their relevance to a query."""

    task = rerank.TASK

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        """Return rerankers, models of late interaction, and those that embed."""
        classifying = models.serving(text_classification.TASK)
        ranking = [p for p in classifying if rerank.scorer_of(p.manifest) == "classifier"]
        interacting = models.serving(embed_all.TASK)
        ranking += [p for p in interacting if late_interaction.interaction(p.manifest) is not None]
        ranking += models.serving(similarity.TASK)
        return list(dict.fromkeys(ranking))

    @staticmethod
    def answer(request: ServedRequest, value: Any, scorer: rerank.Scorer) -> BytesResponse:
        """Return the response with a value, and what gave the scores."""
        response = json_response(value, in_parts=request.is_large)
        response.raw_headers.append((b"x-ranked-by", scorer.encode()))
        return response


def can_rank(context: ProtocolContext) -> bool:
    """Return whether the server offers the tasks that ranking needs."""
    return {similarity.TASK.name, text_classification.TASK.name} <= context.tasks.keys()


def raw_scores(body: ScoredBody) -> bool | None:
    """Return what Infinity's ``raw_scores`` or vLLM's ``use_activation`` says; None: neither."""
    if body.raw_scores is None and body.use_activation is not None:
        return not body.use_activation
    return body.raw_scores


class Document(LenientModel):
    """A document with further fields, which are ignored."""

    text: Text


class DocumentsBody(ScoredBody):
    """The body of ``POST /v1/rerank``, ``/v2/rerank`` and ``/rerank``."""

    query: Text = Field(description="what the documents are compared with")
    documents: Annotated[list[Text | Document], NotEmpty]
    """the documents, as texts or as objects with a text"""
    top_n: CountOrZero | None = None
    """number of results to return; 0 or null returns all"""
    top_k: CountOrZero | None = Field(None, description="Voyage's name of top_n")
    return_documents: Flag = None
    """whether the results repeat the documents; the default is that of a path"""
    max_tokens_per_doc: CountOrZero | None = None
    """tokens to keep of each document; 0 or null keeps all"""
    truncation: bool | None = None
    """Voyage's field: false refuses a long document; the default is true"""


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A document of a result."""

    text: str


@dataclass(frozen=True, slots=True)
class RankResult:
    """The number of a document in the request, its score, and the document if it is repeated."""

    index: int
    relevance_score: float
    document: DocumentText | str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The number of tokens that the engine ran."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RankedDocuments:
    """The results, best first, and the fields that one of the protocols has."""

    id: str
    object: Literal["list", "rerank"]
    model: str
    results: list[RankResult]
    usage: openai.Usage
    meta: dict[str, Any]
    tokens: Tokens
    data: list[RankResult] | None = None
    query: str | None = None
    scores: list[dict[Literal["document", "score"], str | float]] | None = None


class _Documents(RankRoute):
    body = DocumentsBody
    names: ClassVar[Mapping[Location, str]] = {rerank.TEXTS: "documents"}
    doc = RouteDoc(
        "Documents in the order of their relevance to a query, in Cohere's and Jina's shape",
        "Reranking",
        RankedDocuments,
        examples={
            "Two documents": {
                "query": "Who died?",
                "documents": ["A ship left.", "The king was dead."],
                "top_n": 1,
            }
        },
        headers=RANKED_BY,
    )

    def __init__(self, context: ProtocolContext, path: str) -> None:
        self._path = path
        super().__init__(context)

    def to_call(self, _: ServedRequest, body: DocumentsBody) -> tuple[Any, Any]:
        for name, most in (("top_n", body.top_n), ("top_k", body.top_k)):
            if (most or 0) < 0:
                raise InvalidRequest(f"must be at least 0, got {most}", Location((name,)))
        parameters = RankParameters(
            truncate=body.truncation,
            raw_scores=raw_scores(body),
            max_tokens_per_doc=body.max_tokens_per_doc,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        return rerank.RerankInputs.model_construct(query=body.query, texts=_texts(body)), parameters

    def respond(self, request: ServedRequest, body: DocumentsBody, value: rerank.Ranking) -> Any:
        repeats = body.return_documents
        if repeats is None:
            repeats = self._path != _V2
        of_string = self._path == PATH or "top_k" in body.model_fields_set
        as_string = of_string and body.return_documents is True
        texts = _texts(body)
        rows = []
        for rank in value.ranks[: body.top_n or body.top_k or None]:
            row: dict[str, Any] = {"index": rank.index, "relevance_score": rank.score}
            if repeats:
                text = texts[rank.index]
                row["document"] = text if as_string else {"text": text}
            rows.append(row)
        tokens = Tokens(request.tokens, 0)
        units = {"input_tokens": request.tokens, "search_units": 1}
        answer: dict[str, Any] = {
            "id": request.identity.decode("ascii"),
            "object": "rerank" if self._path == PATH else "list",
            "model": body.model or request.model,
            "results": rows,
            "usage": openai.Usage(request.tokens, request.tokens),
            "meta": {"api_version": {"version": "2"}, "billed_units": units, "tokens": tokens},
            "tokens": tokens,
        }
        if self._path == _V1:
            answer["data"] = rows
        if self._path == PATH and "model" not in body.model_fields_set:
            ordered = sorted(value.ranks, key=lambda rank: rank.index)
            answer["query"] = body.query
            answer["scores"] = [{"document": texts[r.index], "score": r.score} for r in ordered]
        return self.answer(request, answer, value.by)


def _texts(body: DocumentsBody) -> list[str]:
    return [one if isinstance(one, str) else one.text for one in body.documents]


@dataclass(frozen=True, slots=True)
class RerankErrorBody(openai.OpenAiErrorBody):
    """An error in OpenAI's shape, with Jina's and Voyage's ``detail`` and Cohere's ``message``."""

    message: str


def _error_body(error: ErrorInfo) -> RerankErrorBody:
    described = openai.error_body(error)
    return RerankErrorBody(described.error, described.detail, error.message)


class Passage(WireModel):
    """A text. NVIDIA's passages may have an image too, which no model here reads."""

    text: Text


class RankingBody(LenientModel):
    """The body of ``POST /v1/ranking``."""

    query: Passage
    passages: Annotated[list[Passage], NotEmpty]
    model: ServedName = None
    top_k: Count | None = None
    truncate: Literal["NONE", "END"] | None = None
    """NONE refuses a long passage, END cuts its end; the default is the model's, usually END"""


@dataclass(frozen=True, slots=True)
class PassageRank:
    """The number of a passage in the request, and its score before any function."""

    index: int
    logit: float


@dataclass(frozen=True, slots=True)
class Rankings:
    """The response to ``POST /v1/ranking``, best first."""

    rankings: list[PassageRank]
    usage: openai.Usage


class _Ranking(RankRoute):
    body = RankingBody
    doc = RouteDoc(
        "Passages in the order of their relevance to a query, in NVIDIA's shape",
        "Reranking",
        Rankings,
        examples={
            "Two passages": {
                "query": {"text": "Who died?"},
                "passages": [{"text": "A ship left."}, {"text": "The king was dead."}],
            }
        },
        headers=RANKED_BY,
    )

    def to_call(self, _: ServedRequest, body: RankingBody) -> tuple[Any, Any]:
        if body.top_k is not None and body.top_k < 1:
            raise InvalidRequest(f"must be at least 1, got {body.top_k}", Location(("top_k",)))
        texts = [passage.text for passage in body.passages]
        inputs = rerank.RerankInputs.model_construct(query=body.query.text, texts=texts)
        return inputs, rerank.RerankParameters(raw_scores=True, **TRUNCATIONS[body.truncate])

    def parse(
        self, request: ServedRequest, data: bytes, model: str | None = None
    ) -> tuple[TaskRoute, Any]:
        """Return this route, and the body with the model that a path names."""
        route, body = super().parse(request, data)
        return route, body if model is None else body.model_copy(update={"model": model})

    def in_body(self, at: Location, body: RankingBody) -> Location:
        """Return the location in the body, whose texts are objects."""
        if at == rerank.QUERY:
            return at.below("text")
        if at[:1] == rerank.TEXTS:
            return Location(("passages", *at[1:], *(("text",) if at[1:] else ())))
        return super().in_body(at, body)

    def respond(self, request: ServedRequest, body: RankingBody, value: rerank.Ranking) -> Any:
        ranks = [PassageRank(rank.index, rank.score) for rank in value.ranks[: body.top_k]]
        usage = openai.Usage(request.tokens, request.tokens)
        return self.answer(request, Rankings(ranks, usage), value.by)


def _routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes of the clients of Cohere, Jina and NVIDIA; `tei` has the other path."""
    if not can_rank(context):
        return []
    ranking = _Ranking(context)

    async def rank(request: Request) -> Response:
        model = unquote("/".join(request.path_params.values()))
        return await answer_task(context, partial(ranking.parse, model=model), request)

    bound = ranking.bind("/v1/ranking")
    return [
        *(_Documents(context, path).bind(path) for path in (_V1, _V2)),
        bound,
        *(Route("POST", path, rank, bound.doc, bound.models) for path in _MODEL_PATHS),
    ]


def other_routes(context: ProtocolContext) -> Mapping[str, TaskRoute]:
    """Return the route for a body of `PATH`, by a field of the body."""
    return {"documents": _Documents(context, PATH)}


PROTOCOL: Final = WireProtocol(_routes, (_V1, _V2), RerankErrorBody, _error_body)
