"""The routes that only text-embeddings-inference has: predict, rerank, tokenize and decode.

Its other routes are native ones with the same bodies. All of them ignore unknown fields, and name
these in ``x-warning``.

Source: the routes of text-embeddings-inference 1.9, as it answers.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Annotated, Any, Final

import orjson
from pydantic import Field
from starlette.requests import Request

from cloze.service.http.errors import ERROR_STATUSES
from cloze.service.http.routes import BytesResponse, Route, RouteDoc
from cloze.service.pipeline import Models, Pipeline, TaskResult
from cloze.service.protocols.protocol import (
    ErrorBody,
    LenientModel,
    ProtocolContext,
    WireProtocol,
    ignored_fields,
    json_response,
    write_error,
)
from cloze.service.protocols.task_route import TIMING_HEADERS, TaskRoute
from cloze.service.tasks import (
    TaskCall,
    embed,
    rerank,
    similarity,
    text_classification,
    token_ids,
)
from cloze.service.tasks.task import NotEmpty, Text, Texts, TokenIds
from cloze.service.tasks.text_classification import TextClassificationParameters, TextPair
from cloze.service.tasks.texts import TruncationParameters

_TAG: Final = "text-embeddings-inference"
_MODEL: Final = Field(None, description="a served model, NAME or NAME@VERSION")

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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for text-embeddings-inference's clients."""
    bound = [_TOKENIZE.bind(context), _DECODE.bind(context)]
    if text_classification.TASK.name in context.tasks:
        bound.append(_PREDICT.bind(context))
    if {task.name for task in (similarity.TASK, text_classification.TASK)} <= context.tasks.keys():
        bound.append(_RERANK.bind(context))
    return bound


def _doc(
    summary: str,
    body: type[LenientModel],
    result: Any,
    headers: Mapping[str, tuple[str, str]],
    **examples: Mapping[str, Any],
) -> RouteDoc:
    titled = {name.replace("_", " ").capitalize(): example for name, example in examples.items()}
    return RouteDoc(summary, _TAG, result, ErrorBody, body, titled, (), headers, ERROR_STATUSES)


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


def _respond_labels(_: Request, body: PredictBody, result: TaskResult) -> BytesResponse:
    is_batch = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
    return json_response(result.value if is_batch else result.value[0])


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


def _to_ranking(body: RerankBody) -> TaskCall:
    inputs = rerank.RerankInputs.model_construct(query=body.query, texts=body.texts)
    parameters = rerank.RerankParameters(
        raw_scores=body.raw_scores, return_text=body.return_text, **_truncation(body)
    )
    return TaskCall(inputs, parameters)


def _ranking(models: Models) -> Sequence[Pipeline]:
    """Return the models that rank: classifiers with one label, then those that embed."""
    classifying = models.serving(text_classification.TASK)
    ranking = [p for p in classifying if rerank.classifies(p.manifest)]
    return [*ranking, *(p for p in models.serving(similarity.TASK) if p not in ranking)]


def _respond_ranks(_: Request, body: RerankBody, result: TaskResult) -> BytesResponse:
    ranking: rerank.Ranking = result.value
    ranks: list[dict[str, Any]] = [
        {"index": rank.index, "score": rank.score} for rank in ranking.ranks
    ]
    if body.return_text:
        for row, rank in zip(ranks, ranking.ranks, strict=True):
            row["text"] = rank.text
    by = ranking.by.encode()
    return BytesResponse(orjson.dumps(ranks), b"application/json", (b"x-ranked-by", by))


_RERANK: Final = TaskRoute(
    path="/rerank",
    task=rerank.TASK,
    body=RerankBody,
    to_call=_to_ranking,
    respond=_respond_ranks,
    doc=_doc(
        "Texts in the order of their relevance to a query",
        RerankBody,
        list[rerank.Rank],
        {
            **TIMING_HEADERS,
            "x-ranked-by": (
                "string",
                "classifier, or similarity (of embeddings) where none is served",
            ),
        },
        two_texts={"query": "Who died?", "texts": ["A ship left.", "The king was dead."]},
    ),
    warnings=ignored_fields,
    names={
        ("inputs", "source_sentence"): "query",
        ("inputs", "sentences"): "texts",
        ("inputs",): "texts",
    },
    serving=_ranking,
)


# ---- tokenize and decode -------------------------------------------------------------------------


def _all_models(models: Models) -> Sequence[Pipeline]:
    """Return all models, since each has a tokenizer; those that embed are first."""
    embedding = models.serving(embed.TASK)
    return [*embedding, *(p for p in models.pipelines if p not in embedding)]


def _to_tokenize(body: TokenizeBody) -> TaskCall:
    parameters = token_ids.TokenizeParameters(
        add_special_tokens=body.add_special_tokens, prompt_name=body.prompt_name
    )
    return TaskCall(body.inputs, parameters)


def _respond_tokens(_: Request, __: TokenizeBody, result: TaskResult) -> BytesResponse:
    """Write the tokens part by part: as one value, they would need ten times the memory."""
    written = BytesIO()
    texts: list[token_ids.TokenizedText] = result.value
    for number, text in enumerate(texts):
        written.write(b",[" if number else b"[[")
        for index, part in enumerate(text.parts()):
            written.write(b"," if index else b"")
            written.write(memoryview(orjson.dumps(part))[1:-1])
        written.write(b"]")
    written.write(b"]")
    return BytesResponse(written.getvalue())


_TOKENIZE: Final = TaskRoute(
    path="/tokenize",
    task=token_ids.TOKENIZE,
    body=TokenizeBody,
    to_call=_to_tokenize,
    respond=_respond_tokens,
    doc=_doc(
        "The tokens of texts",
        TokenizeBody,
        list[list[token_ids.Token]],
        TIMING_HEADERS,
        one_text={"inputs": "A house."},
    ),
    warnings=ignored_fields,
    serving=_all_models,
)


def _to_decode(body: DecodeBody) -> TaskCall:
    parameters = token_ids.DecodeParameters(skip_special_tokens=body.skip_special_tokens)
    return TaskCall(body.ids, parameters)


def _respond_texts(_: Request, __: DecodeBody, result: TaskResult) -> BytesResponse:
    return json_response(result.value)


_DECODE: Final = TaskRoute(
    path="/decode",
    task=token_ids.DECODE,
    body=DecodeBody,
    to_call=_to_decode,
    respond=_respond_texts,
    doc=_doc(
        "The texts of token ids",
        DecodeBody,
        list[str],
        TIMING_HEADERS,
        one_text={"ids": [2, 43, 1596, 18, 3]},
    ),
    warnings=ignored_fields,
    names={("inputs",): "ids"},
    serving=_all_models,
)

PROTOCOL: Final = WireProtocol(
    "tei", ("/predict", "/rerank", "/tokenize", "/decode"), routes, write_error
)
