"""vLLM's scores and labels: ``/v1/score`` and ``/v1/classify``, and the same on native paths.

`/score` and `/classify` are native routes too; see `shared_paths`. Infinity's `/classify` has other
rows for the same body. Its client always sends ``raw_scores``, which vLLM does not have.

Sources: vLLM's OpenAPI document, and the released client infinity-client 0.0.78.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from cloze.service.core import ServedRequest
from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.protocols import openai
from cloze.service.protocols.protocol import ProtocolContext, TaskRoute, WireProtocol
from cloze.service.protocols.reranking import (
    RANKED_BY,
    RankParameters,
    RankRoute,
    ScoredBody,
    can_rank,
    raw_scores,
)
from cloze.service.tasks import rerank, text_classification
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import PromptTokens
from cloze.service.tasks.wire import Text, Texts

_PAIRS: Final = (
    ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"),
)  # fmt: skip
PAIR_FIELDS: Final = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))

_TextOrTexts = Text | Texts | None


def _only(pair: tuple[str, str]) -> JsonDict:
    """Return the schema of a body that has one of the pairs of fields."""
    types: Mapping[bool, JsonDict] = {True: {"type": ["string", "array"]}, False: {"type": "null"}}
    properties: JsonDict = {name: types[name in pair] for name in PAIR_FIELDS}
    return {"required": [*pair], "properties": properties}


class PairsBody(ScoredBody):
    """The body of ``POST /v1/score``: two fields with one text and some, or with equally many."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_only(pair) for pair in _PAIRS]})

    queries: _TextOrTexts = Field(None, description="queries, with documents or items")
    documents: _TextOrTexts = None
    items: _TextOrTexts = None
    text_1: _TextOrTexts = Field(None, description="queries, with text_2")
    text_2: _TextOrTexts = None
    data_1: _TextOrTexts = Field(None, description="queries, with data_2")
    data_2: _TextOrTexts = None


class ClassifyBody(ScoredBody):
    """The body of ``POST /v1/classify``."""

    input: Text | Texts = Field(description="a text, or a list of texts")


class LabelParameters(PromptTokens, text_classification.TextClassificationParameters):
    """The parameters of the task, and vLLM's limit."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """The score of a pair; its number is that of its second text."""

    index: int
    object: Literal["score"]
    score: float


@dataclass(frozen=True, slots=True)
class TextLabel:
    """The best label of a text, and the scores of all labels in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """A response; ``created`` is in seconds since 1970.

    A row has the score of a pair, or the label of a text; Infinity's rows are lists of labels.
    """

    id: str
    object: Literal["list", "classify"]
    created: int
    model: str
    data: list[PairScore] | list[TextLabel] | list[list[text_classification.LabelScore]]
    usage: openai.Usage


def _answer(
    route: TaskRoute,
    request: ServedRequest,
    body: ScoredBody,
    data: Any,
    kind: Literal["list", "classify"] = "list",
) -> ScoredTexts:
    created = int(route.context.limits.clock.wall())
    model, usage = body.model or request.model, openai.Usage(request.tokens, request.tokens)
    return ScoredTexts(request.identity.decode("ascii"), kind, created, model, data, usage)


class _Score(RankRoute):
    body = PairsBody
    doc = RouteDoc(
        "The relevance of texts to queries, in vLLM's shape",
        "vLLM",
        ScoredTexts,
        examples={
            "One query": {"queries": "Who died?", "documents": ["A ship left.", "The king died."]}
        },
        headers=RANKED_BY,
    )

    def to_call(self, _: ServedRequest, body: PairsBody) -> tuple[Any, Any]:
        first, second = _names(body)
        queries, texts = _list(getattr(body, first)), _list(getattr(body, second))
        most = body.truncate_prompt_tokens
        parameters = RankParameters(raw_scores=raw_scores(body), truncate_prompt_tokens=most)
        if len(queries) == 1:
            inputs = rerank.RerankInputs.model_construct(query=queries[0], texts=texts)
            return inputs, parameters
        if queries and len(queries) != len(texts):
            raise InvalidRequest(
                f"has {len(queries)} texts and {second} has {len(texts)}; {first} needs 1 or "
                "equally many",
                Location((first,)),
            )
        return rerank.TextPairs(queries, texts), parameters

    def in_body(self, at: Location, body: PairsBody) -> Location:
        """Return the location in the body, which has one of several pairs of fields."""
        name = _names(body)[at[:1] == rerank.TEXTS]
        if at[:1] not in (rerank.QUERY, rerank.QUERIES, rerank.TEXTS):
            return at
        is_list = isinstance(getattr(body, name), list)
        index = (0,) if at[:1] == rerank.QUERY else at[1:]
        return Location((name, *index) if is_list else (name,))

    def respond(self, request: ServedRequest, body: PairsBody, value: rerank.Ranking) -> Any:
        ranks = sorted(value.ranks, key=lambda rank: rank.index)
        rows = [PairScore(rank.index, "score", rank.score) for rank in ranks]
        return self.answer(request, _answer(self, request, body, rows), value.by)


def _names(body: PairsBody) -> tuple[str, str]:
    """Return the names of the two fields of a body that are given."""
    given = [name for name in PAIR_FIELDS if getattr(body, name) is not None]
    for pair in _PAIRS:
        if given == [*pair]:
            return pair
    known = ", ".join(" with ".join(pair) for pair in _PAIRS)
    raise InvalidRequest(
        f"the request has {' and '.join(given) or 'no texts'}; it needs one of {known}"
    )


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class _Classify(TaskRoute):
    task = text_classification.IN_ORDER
    body = ClassifyBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "input"}
    doc = RouteDoc(
        "The labels of texts, in vLLM's and Infinity's shapes",
        "vLLM",
        ScoredTexts,
        examples={"Two texts": {"input": ["The room was loud.", "The staff was friendly."]}},
    )

    def to_call(self, _: ServedRequest, body: ClassifyBody) -> tuple[Any, Any]:
        function: text_classification.Function | None = "none" if raw_scores(body) else None
        most = body.truncate_prompt_tokens
        parameters = LabelParameters(function_to_apply=function, truncate_prompt_tokens=most)
        return body.input, parameters

    def respond(self, request: ServedRequest, body: ClassifyBody, value: Any) -> Any:
        best = [sorted(row, key=lambda label: label.score, reverse=True) for row in value]
        if "raw_scores" in body.model_fields_set:
            return _answer(self, request, body, best, "classify")
        rows = [
            TextLabel(index, first.label, [label.score for label in row], len(row))
            for index, ([first, *_], row) in enumerate(zip(best, value, strict=True))
        ]
        return _answer(self, request, body, rows)


def _routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes below ``/v1``; `native` has the others."""
    bound = [_Score(context).bind("/v1/score")] if can_rank(context) else []
    if text_classification.TASK.name in context.tasks:
        bound.append(_Classify(context).bind("/v1/classify"))
    return bound


def other_routes(context: ProtocolContext) -> Mapping[str, Mapping[str, TaskRoute]]:
    """Return the routes at native paths: path -> field of a body -> the route."""
    scoring = _Score(context)
    return {
        "/score": dict.fromkeys(PAIR_FIELDS, scoring) if can_rank(context) else {},
        "/classify": {"input": _Classify(context)},
    }


PROTOCOL: Final = WireProtocol(_routes)
