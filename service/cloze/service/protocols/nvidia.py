"""NVIDIA's ranking: ``/v1/ranking`` and ``/v1/retrieval/NAME/reranking``, with OpenAI's errors.

Source: the released clients, langchain-nvidia-ai-endpoints, llama-index-postprocessor-nvidia
and LiteLLM, which names the model in the path too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.protocols import openai
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_task,
)
from cloze.service.protocols.rank_routes import RANKED_BY, RankRoute, can_rank
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.tasks import rerank
from cloze.service.tasks.texts import TRUNCATIONS
from cloze.service.tasks.wire import Count, NotEmpty, Text, WireModel

_PATH: Final = "/v1/ranking"
_MODEL_PATHS: Final = (
    "/v1/retrieval/{model}/reranking",
    "/v1/retrieval/{organization}/{model}/reranking",  # NVIDIA's names have a slash
)


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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the route of NVIDIA's clients."""
    if not can_rank(context):
        return []
    route = _Ranking(context)

    async def rank(request: Request) -> Response:
        model = unquote("/".join(request.path_params.values()))
        return await answer_task(context, partial(route.parse, model=model), request)

    bound = route.bind(_PATH)
    return [bound, *(Route("POST", p, rank, bound.doc, bound.models) for p in _MODEL_PATHS)]


PROTOCOL: Final = WireProtocol(routes)
