"""The routes that only text-embeddings-inference has: predict, rerank, tokenize and decode.

Its other routes are native ones with the same bodies. All of them ignore unknown fields, and name
these in ``x-warning``.

Source: the routes of text-embeddings-inference 1.9, as it answers.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.heads import sequence_classification
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.service.core import EmptyRequest, InvalidRequest, WrongTask
from cloze.service.http.bodies import receive
from cloze.service.http.errors import STATUS
from cloze.service.http.routes import BytesResponse, Route, RouteDoc
from cloze.service.pipeline import Pipeline, TaskResult
from cloze.service.protocols.error_body import ErrorBody, write_error
from cloze.service.protocols.lenient import LenientModel, ignored_fields
from cloze.service.protocols.protocol import ProtocolContext, WireProtocol
from cloze.service.protocols.task_route import TIMING_HEADERS, Endpoint, TaskRoute
from cloze.service.tasks import TaskCall, embed, embed_inputs, similarity, text_classification
from cloze.service.tasks.long_text import TruncationParameters
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.task import (
    NotEmpty,
    TaskContext,
    Text,
    Texts,
    TokenIds,
    check_text,
    input_name,
    listed,
)
from cloze.service.tasks.text_classification import TextClassificationParameters, TextPair

B = TypeVar("B", bound=LenientModel)

_TAG: Final = "text-embeddings-inference"
_ERRORS: Final = tuple(sorted({status for status, _ in STATUS.values()}))
_MODEL: Final = Field(None, description="a served model, NAME or NAME@VERSION")
_WARNING: Final = {"x-warning": TIMING_HEADERS["x-warning"]}

_OneOrTwo = Annotated[list[Text], Field(min_length=1, max_length=2)]


class PredictBody(TruncationParameters, LenientModel):
    """The body of ``POST /predict``."""

    inputs: Text | _OneOrTwo | Annotated[list[_OneOrTwo], NotEmpty] = Field(
        description="a text; [text] or [text, second text]; or a list of such lists",
        examples=["The room was loud."],
    )
    raw_scores: bool = Field(False, description="whether the scores are the model's logits")
    model: str | None = _MODEL


class RerankBody(TruncationParameters, LenientModel):
    """The body of ``POST /rerank``."""

    query: Text = Field(examples=["What is deep learning?"])
    texts: Texts = Field(examples=[["A ship left the harbour.", "Networks with many layers."]])
    raw_scores: bool = Field(False, description="whether a classifier's scores are its logits")
    return_text: bool = Field(False, description="whether the ranks repeat the texts")
    model: str | None = _MODEL


class TokenizeBody(LenientModel):
    """The body of ``POST /tokenize``."""

    inputs: Text | Texts = Field(description="a text or a list of texts", examples=["A cat sat."])
    add_special_tokens: bool = Field(True, description="whether to add the tokens around a text")
    prompt_name: str | None = Field(None, description="name of a prompt to put before each text")
    model: str | None = _MODEL


class DecodeBody(LenientModel):
    """The body of ``POST /decode``."""

    ids: TokenIds | Annotated[list[TokenIds], NotEmpty] = Field(
        description="the token ids of a text, or a list of such lists", examples=[[101, 102]]
    )
    skip_special_tokens: bool = Field(True, description="whether to omit special tokens")
    model: str | None = _MODEL


@dataclass(frozen=True, slots=True)
class Rank:
    """A text's position in the request, and its score; the text itself if it was asked for."""

    index: int
    score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token; ``start`` and ``stop`` are in bytes of the text, and null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for text-embeddings-inference's clients."""
    bound = [_tokenize_route(context), _decode_route(context)]
    if text_classification.TASK.name in context.tasks:
        bound.append(_PREDICT.bind(context))
    if {task.name for task in (similarity.TASK, text_classification.TASK)} <= context.tasks.keys():
        bound.append(Route("POST", "/rerank", _Rerank(context).answer, _BY_SIMILARITY.doc))
    return bound


def _doc(
    summary: str,
    body: type[LenientModel],
    result: Any,
    headers: Mapping[str, tuple[str, str]],
    **examples: Mapping[str, Any],
) -> RouteDoc:
    titled = {name.replace("_", " ").capitalize(): example for name, example in examples.items()}
    return RouteDoc(summary, _TAG, result, ErrorBody, body, titled, (), headers, _ERRORS)


# ---- predict -------------------------------------------------------------------------------------


def _truncation(body: TruncationParameters) -> dict[str, Any]:
    return body.model_dump(include=set(TruncationParameters.model_fields))


def _to_classification(body: PredictBody) -> TaskCall:
    function: text_classification.Function | None = "none" if body.raw_scores else None
    parameters = TextClassificationParameters(function_to_apply=function, **_truncation(body))
    if isinstance(body.inputs, str):
        return TaskCall(body.inputs, parameters)
    if body.inputs and isinstance(body.inputs[0], str):
        return TaskCall(_text_pair(body.inputs), parameters)
    return TaskCall([_text_pair(texts) for texts in body.inputs], parameters)


def _text_pair(texts: Any) -> TextPair:
    return TextPair(text=texts[0], text_pair=texts[1] if len(texts) == 2 else None)


def _respond_labels(_: Request, body: PredictBody, result: TaskResult) -> Response:
    is_batch = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
    return BytesResponse(orjson.dumps(result.value if is_batch else result.value[0]))


_Labels = list[text_classification.LabelScore]

_PREDICT: Final = TaskRoute(
    path="/predict",
    task=text_classification.TASK,
    body=PredictBody,
    to_call=_to_classification,
    respond=_respond_labels,
    doc=_doc(
        "The labels of texts",
        PredictBody,
        _Labels | list[_Labels],
        TIMING_HEADERS,
        one_text={"inputs": "The room was loud and the staff unfriendly."},
        a_text_and_a_pair={"inputs": [["The room was loud."], ["A dog sleeps.", "It rests."]]},
    ),
    warnings=ignored_fields,
)


# ---- rerank --------------------------------------------------------------------------------------


def _to_relevance(body: RerankBody) -> TaskCall:
    function: text_classification.Function = "none" if body.raw_scores else "sigmoid"
    parameters = TextClassificationParameters(function_to_apply=function, **_truncation(body))
    pairs = [TextPair(text=body.query, text_pair=text) for text in body.texts]
    return TaskCall(pairs, parameters)


def _to_similarity(body: RerankBody) -> TaskCall:
    inputs = SimilarityInputs(source_sentence=body.query, sentences=body.texts)
    return TaskCall(inputs, similarity.SimilarityParameters(**_truncation(body)))


def _respond_relevance(_: Request, body: RerankBody, result: TaskResult) -> Response:
    return _ranks(body, [labels[0].score for labels in result.value], b"classifier")


def _respond_similarity(_: Request, body: RerankBody, result: TaskResult) -> Response:
    return _ranks(body, result.value, b"similarity")


def _ranks(body: RerankBody, scores: Sequence[float], by: bytes) -> Response:
    ranks: list[dict[str, Any]] = [
        {"index": index, "score": scores[index]}
        for index in sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    ]
    if body.return_text:
        for rank in ranks:
            rank["text"] = body.texts[rank["index"]]
    return BytesResponse(orjson.dumps(ranks), b"application/json", (b"x-ranked-by", by))


_RERANK_DOC: Final = _doc(
    "Texts in the order of their relevance to a query",
    RerankBody,
    list[Rank],
    {
        **TIMING_HEADERS,
        "x-ranked-by": ("string", "classifier, or similarity (of embeddings) where none is served"),
    },
    two_texts={"query": "Who died?", "texts": ["A ship left.", "The king was dead."]},
)
_BY_CLASSIFIER, _BY_SIMILARITY = (
    TaskRoute(
        "/rerank", task, RerankBody, to_call, respond, _RERANK_DOC, ignored_fields, names=names
    )
    for task, to_call, respond, names in (
        (text_classification.TASK, _to_relevance, _respond_relevance, {"inputs": "texts"}),
        (
            similarity.TASK,
            _to_similarity,
            _respond_similarity,
            {"inputs.source_sentence": "query", "inputs.sentences": "texts"},
        ),
    )
)


def _check_texts(body: RerankBody, context: TaskContext) -> None:
    limits = context.limits
    check_text(body.query, "query", limits)
    for index, text in enumerate(body.texts):
        check_text(text, f"texts[{index}]", limits)


class _Rerank:
    """The handler of ``/rerank``: a classifier with one label ranks, else similarity does."""

    def __init__(self, context: ProtocolContext) -> None:
        self._context = context
        self._by_classifier = Endpoint(_BY_CLASSIFIER, context)
        self._by_similarity = Endpoint(_BY_SIMILARITY, context)

    async def answer(self, request: Request) -> Response:
        """Return the response to one request.

        Raises:
            ServiceError: the request gets no result.
        """
        context = self._context
        with context.watch.request(request) as watched:
            body, size = await receive(request, RerankBody, context.limits.body, watched)
            endpoint, pipeline = self._choose(body.model)
            _check_texts(body, pipeline.context)
            return await endpoint.answer_body(request, body, size, watched, pipeline)

    def _choose(self, name: str | None) -> tuple[Endpoint, Pipeline]:
        """Return how to rank, and the model that ranks.

        Raises:
            UnknownModel: no model of that name is served.
            WrongTask: the model, or every model, lacks what ranking needs.
        """
        models = self._context.models
        pipelines = models.pipelines if name is None else [models.named(name)]
        for pipeline in pipelines:
            options = pipeline.manifest.heads.get(sequence_classification.HEAD.name)
            if isinstance(options, SequenceLabels) and len(options.labels) == 1:
                return self._by_classifier, pipeline
        for pipeline in models.serving(similarity.TASK):
            if pipeline in pipelines:
                return self._by_similarity, pipeline
        if name is None:
            raise WrongTask("no served model classifies texts with one label, or embeds texts")
        raise WrongTask(f"model {name} neither classifies texts with one label, nor embeds texts")


# ---- tokenize and decode -------------------------------------------------------------------------


def _tokenize_route(context: ProtocolContext) -> Route:
    example = {"inputs": "A house."}
    doc = _doc("The tokens of texts", TokenizeBody, list[list[Token]], _WARNING, one_text=example)
    return _tokenizer_route("/tokenize", TokenizeBody, _tokenize, doc, context)


def _decode_route(context: ProtocolContext) -> Route:
    example = {"ids": [2, 43, 1596, 18, 3]}
    doc = _doc("The texts of token ids", DecodeBody, list[str], _WARNING, one_text=example)
    return _tokenizer_route("/decode", DecodeBody, _decode, doc, context)


def _tokenizer_route(
    path: str,
    body_type: type[B],
    answer: Callable[[B, TaskContext], Any],
    doc: RouteDoc,
    context: ProtocolContext,
) -> Route:
    """Return a route that needs a model's tokenizer, but no engine."""

    async def handle(request: Request) -> Response:
        with context.watch.request(request) as watched:
            body, _ = await receive(request, body_type, context.limits.body, watched)
            pipeline = _tokenizing(context, getattr(body, "model", None))
            request.scope["cloze.model"] = pipeline.manifest.reference
            content = await asyncio.to_thread(lambda: orjson.dumps(answer(body, pipeline.context)))
        headers = [(b"x-warning", warning.encode()) for warning in ignored_fields(body)]
        return BytesResponse(content, b"application/json", *headers)

    return Route("POST", path, handle, doc)


def _tokenizing(context: ProtocolContext, name: str | None) -> Pipeline:
    """Return the named model; without a name, the one that embeds, or else the first."""
    models = context.models
    if name is not None:
        return models.named(name)
    embeds = models.default(embed.TASK) if embed.TASK.name in context.tasks else None
    return embeds or models.pipelines[0]


def _tokenize(body: TokenizeBody, context: TaskContext) -> list[list[dict[str, Any]]]:
    texts = listed(body.inputs, context.limits)
    for index, text in enumerate(texts):
        name = input_name(index, many=isinstance(body.inputs, list))
        check_text(text, name, context.limits)
    prompt = embed_inputs.prompt_of(context, body.prompt_name)
    special = body.add_special_tokens
    return [_tokens(prompt + text, context, special=special) for text in texts]


def _tokens(text: str, context: TaskContext, *, special: bool) -> list[dict[str, Any]]:
    tokenizer = context.tokenizer
    spans = tokenizer.spans(text)
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    tokens: list[dict[str, Any]] = [
        {
            "id": token_id,
            "text": text[start:end],
            "special": False,
            "start": ends[start],
            "stop": ends[end],
        }
        for token_id, (start, end) in zip(spans.ids, spans.offsets, strict=True)
    ]
    if special:
        first, last = (
            {"id": i, "text": tokenizer.token_of(i), "special": True, "start": None, "stop": None}
            for i in (tokenizer.cls_id, tokenizer.sep_id)
        )
        tokens = [first, *tokens, last]
    return tokens


def _decode(body: DecodeBody, context: TaskContext) -> list[str]:
    sequences: Any = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    if not all(sequences):
        raise EmptyRequest("ids has an empty list; it needs at least 1 token id")
    low, high = min(map(min, sequences)), max(map(max, sequences))
    if low < 0 or high >= 2**32:
        raise InvalidRequest(f"ids has token ids from {low} to {high}; they are 0 to {2**32 - 1}")
    texts = listed(sequences, context.limits)
    return context.tokenizer.decode(texts, skip_special_tokens=body.skip_special_tokens)


PROTOCOL: Final = WireProtocol(
    "tei", ("/predict", "/rerank", "/tokenize", "/decode"), routes, write_error
)
