"""The routes that only text-embeddings-inference has: predict, rerank, tokenize and decode.

Its other routes are native ones with the same bodies. All of them ignore unknown fields, and name
these in ``x-warning``. A body of `/rerank` with ``documents`` is for `reranking`.

Source: the routes of text-embeddings-inference 1.9, as it answers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from cloze.service.core import ServedRequest
from cloze.service.errors import Location
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import reranking
from cloze.service.protocols.protocol import LenientModel, ProtocolContext, TaskRoute, WireProtocol
from cloze.service.protocols.reranking import RANKED_BY, RankRoute, can_rank
from cloze.service.protocols.shared_paths import SharedRoute
from cloze.service.tasks import embed, rerank, text_classification, token_ids
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.text_classification import TextClassificationParameters, TextPair
from cloze.service.tasks.texts import TruncationParameters
from cloze.service.tasks.wire import NotEmpty, Text, Texts, TokenIds

_MODEL: Final = Field(None, description="a served model, NAME or NAME@VERSION")

_OneOrTwo = Annotated[list[Text], Field(min_length=1, max_length=2)]


class PredictBody(TruncationParameters, LenientModel):
    """The body of ``POST /predict``."""

    inputs: Text | _OneOrTwo | Annotated[list[_OneOrTwo], NotEmpty] = Field(
        examples=["The room was loud."]
    )
    """a text; [text] or [text, second text]; or a list of such lists"""
    raw_scores: bool = Field(False, description="whether the scores are the model's logits")
    model: str | None = _MODEL


class RerankBody(rerank.RerankParameters, rerank.RerankInputs, LenientModel):
    """The body of ``POST /rerank``."""

    model: str | None = _MODEL


class TokenizeBody(token_ids.TokenizeParameters, LenientModel):
    """The body of ``POST /tokenize``."""

    inputs: Text | Texts = Field(description="a text or a list of texts", examples=["A cat sat."])
    model: str | None = _MODEL


class DecodeBody(token_ids.DecodeParameters, LenientModel):
    """The body of ``POST /decode``."""

    ids: TokenIds | Annotated[list[TokenIds], NotEmpty] = Field(examples=[[101, 102]])
    """the token ids of a text, or a list of such lists"""
    model: str | None = _MODEL


_doc = partial(RouteDoc, tag="text-embeddings-inference")


def _routes(context: ProtocolContext) -> Sequence[Route]:
    bound = [_Tokenize(context).bind("/tokenize"), _Decode(context).bind("/decode")]
    if text_classification.TASK.name in context.tasks:
        bound.append(_Predict(context).bind("/predict"))
    if can_rank(context):
        bound.append(rerank_route(context).bind(reranking.PATH))
    return bound


def rerank_route(context: ProtocolContext) -> TaskRoute:
    """Return the route of ranks, of texts or of documents."""
    return SharedRoute(context, Rerank(context), "texts", reranking.other_routes(context))


_Labels = list[text_classification.LabelScore]


class _Predict(TaskRoute):
    task = text_classification.TASK
    body = PredictBody
    doc = _doc(
        "The labels of texts",
        result=_Labels | list[_Labels],
        examples={
            "One text": {"inputs": "The room was loud and the staff unfriendly."},
            "A text and a pair": {
                "inputs": [["The room was loud."], ["A dog sleeps.", "It rests."]]
            },
        },
    )

    def to_call(self, _: ServedRequest, body: PredictBody) -> tuple[Any, Any]:
        function: text_classification.Function | None = "none" if body.raw_scores else None
        truncation = body.model_dump(include=set(TruncationParameters.model_fields))
        parameters = TextClassificationParameters(function_to_apply=function, **truncation)
        if isinstance(body.inputs, str):
            return body.inputs, parameters
        if body.inputs and isinstance(body.inputs[0], str):
            return _text_pair(body.inputs), parameters
        return [_text_pair(texts) for texts in body.inputs], parameters

    def respond(self, _: ServedRequest, body: PredictBody, value: Any) -> Any:
        is_batch = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
        return value if is_batch else value[0]


def _text_pair(texts: Any) -> TextPair:
    return TextPair(text=texts[0], text_pair=texts[1] if len(texts) == 2 else None)


class Rerank(RankRoute):
    """The route of texts in the order of their relevance, in the shape of this protocol."""

    body = RerankBody
    doc = _doc(
        "Texts in the order of their relevance to a query",
        result=list[rerank.Rank] | rerank.RankReport,
        examples={
            "Two texts": {"query": "Who died?", "texts": ["A ship left.", "The king was dead."]}
        },
        headers=RANKED_BY,
    )

    def to_call(self, _: ServedRequest, body: RerankBody) -> tuple[Any, Any]:
        """Return the body twice: it has the inputs and the parameters."""
        return body, body

    def respond(self, request: ServedRequest, body: RerankBody, value: rerank.Ranking) -> Any:
        """Return the ranks, best first."""
        return self.answer(request, self.rows(request, body, value), value.by)

    @staticmethod
    def rows(request: ServedRequest, body: RerankBody, value: rerank.Ranking) -> Any:
        """Return what the answer has: the ranks, with the report if the body asks for it."""
        ranks = []
        for rank in value.ranks:
            row: dict[str, Any] = {"index": rank.index, "score": rank.score}
            if body.return_text:
                row["text"] = rank.text
            if request.usage is not None:
                row["window"] = rank.window
            ranks.append(row)
        return ranks if request.usage is None else {"result": ranks, "usage": request.usage}


class TokenizerRoute(TaskRoute):
    """A route that needs a tokenizer only, which every model has."""

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        """Return all models; those that embed are first."""
        embedding = models.serving(embed.TASK)
        return [*embedding, *(p for p in models.pipelines if p not in embedding)]


class _Tokenize(TokenizerRoute):
    task = token_ids.TOKENIZE
    body = TokenizeBody
    doc = _doc(
        "The tokens of texts",
        result=list[list[token_ids.Token]],
        examples={"One text": {"inputs": "A house."}},
    )


class _Decode(TokenizerRoute):
    task = token_ids.DECODE
    body = DecodeBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "ids"}
    doc = _doc(
        "The texts of token ids",
        result=list[str],
        examples={"One text": {"ids": [2, 43, 1596, 18, 3]}},
    )

    def to_call(self, _: ServedRequest, body: DecodeBody) -> tuple[Any, Any]:
        return body.ids, body


PROTOCOL: Final = WireProtocol(_routes)
