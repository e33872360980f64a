"""One function per task: what to send, and how the responses become a result.

Every function takes one input or a list of inputs, and its result has one element per input. The
server's routes return other shapes for one input than for many; here the shape is always the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from cloze.client.results import (
    Answer,
    Entity,
    Filling,
    Label,
    Prediction,
    Rank,
    Score,
    ScoredToken,
    Word,
    WordPrediction,
)

T = TypeVar("T")
R = TypeVar("R")

Float32 = NDArray[np.float32]
Pair = tuple[str, str]
Direction = Literal["left", "right"]

_VECTORS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A task call, which the client divides into requests.

    Attributes:
        route: path of the route.
        inputs: all inputs.
        body: some inputs -> the body of a request.
        read: (response, number of the request's first input) -> the results of one request.
        join: the results of all requests -> the result.
        accept: media type of the responses.
    """

    route: str
    inputs: Sequence[Any]
    body: Callable[[Sequence[Any]], Mapping[str, Any]]
    read: Callable[[httpx.Response, int], Any]
    join: Callable[[list[Any]], T]
    accept: str = "application/json"


def fill_mask(
    texts: str | Sequence[str],
    *,
    top_k: int | None = None,
    targets: Sequence[str] | None = None,
    model: str | None = None,
) -> Call[list[list[list[Prediction]]]]:
    """Return the likeliest tokens: for each text, for each of its masks, best first.

    Args:
        texts: a text or many, each with at least one mask token.
        top_k: number of predictions per mask; None selects the server's default, 5.
        targets: tokens to choose among; None selects the whole vocabulary.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[list[list[Prediction]]]:
        return [
            [[_result(Prediction, p) for p in predictions] for predictions in _masks(item)]
            for item in response.json()
        ]

    parameters = _given(top_k=top_k, targets=None if targets is None else list(targets))
    return Call("/fill-mask", _many(texts), partial(_body, parameters, model), read, _chain)


def fill_mask_words(
    texts: str | Sequence[str],
    targets: Sequence[str],
    *,
    top_k: int | None = None,
    model: str | None = None,
) -> Call[list[list[list[WordPrediction]]]]:
    """Return the likeliest words among targets: for each text, for each of its masks, best first.

    Args:
        texts: a text or many, each with at least one mask token.
        targets: the words, of one or more sub-tokens.
        top_k: number of words per mask; None selects the server's default, 5.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[list[list[WordPrediction]]]:
        return [
            [[_result(WordPrediction, word) for word in words] for words in _masks(item)]
            for item in response.json()
        ]

    parameters = _given(top_k=top_k, targets=list(targets), targets_as="words")
    return Call("/fill-mask", _many(texts), partial(_body, parameters, model), read, _chain)


def fill_mask_jointly(
    texts: str | Sequence[str],
    *,
    decode: Literal["independent", "left-to-right", "beam"] = "beam",
    top_k: int | None = None,
    model: str | None = None,
) -> Call[list[list[Filling]]]:
    """Return whole fillings of each text, with their joint probability, best first.

    Args:
        texts: a text or many, each with at least one mask token.
        decode: how the masks are filled together.
        top_k: number of fillings per text; None selects the server's default, 5.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[list[Filling]]:
        return [[_result(Filling, one) for one in fillings] for fillings in response.json()]

    parameters = _given(top_k=top_k, decode=decode)
    return Call("/fill-mask", _many(texts), partial(_body, parameters, model), read, _chain)


def score(texts: str | Sequence[str], *, model: str | None = None) -> Call[list[Score]]:
    """Return the pseudo-log-likelihood of each text, with that of each token.

    Args:
        texts: a text or many.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[Score]:
        return [
            Score(item["score"], [_result(ScoredToken, token) for token in item["tokens"]])
            for item in response.json()
        ]

    return Call("/score", _many(texts), partial(_body, {}, model), read, _chain)


def embed(
    texts: str | Sequence[str],
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    model: str | None = None,
) -> Call[Float32]:
    """Return one vector per text, [n, D] float32.

    Args:
        texts: a text or many.
        normalize: whether to scale vectors to length 1; None selects the model's default.
        dimensions: number of leading dimensions to keep.
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        model: a served model; None selects the task's default.
    """
    options = _given(
        normalize=normalize,
        dimensions=dimensions,
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        model=model,
    )

    def read(response: httpx.Response, _: int) -> Float32:
        return _vectors(response)

    return Call("/embed", _many(texts), partial(_body_at_root, options), read, _stack, _VECTORS)


def embed_all(
    texts: str | Sequence[str],
    *,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    model: str | None = None,
) -> Call[list[Float32]]:
    """Return one vector per token of each text, [S, H] float32, special tokens included.

    Args:
        texts: a text or many.
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        model: a served model; None selects the task's default.
    """
    options = _given(
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        model=model,
    )

    def read(response: httpx.Response, _: int) -> list[Float32]:
        lengths = list(map(int, response.headers["x-lengths"].split(",")))
        parts = np.split(_vectors(response), np.cumsum(lengths)[:-1])
        return [part.copy() for part in parts]

    body = partial(_body_at_root, options)
    return Call("/embed_all", _many(texts), body, read, _chain, _VECTORS)


def embed_sparse(
    texts: str | Sequence[str],
    *,
    top_k: int | None = None,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    model: str | None = None,
) -> Call[list[list[Word]]]:
    """Return the words of the vocabulary that each text is about, the heaviest first.

    Args:
        texts: a text or many.
        top_k: most words per text; None selects the server's limit.
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        model: a served model; None selects the task's default.
    """
    options = _given(
        top_k=top_k,
        return_tokens=True,
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        model=model,
    )

    def read(response: httpx.Response, _: int) -> list[list[Word]]:
        return [[_result(Word, word) for word in words] for words in response.json()]

    return Call("/embed_sparse", _many(texts), partial(_body_at_root, options), read, _chain)


def similarity(
    source: str, texts: str | Sequence[str], *, model: str | None = None
) -> Call[Float32]:
    """Return the cosine between a text and each of other texts, [n] float32.

    Args:
        source: the text to compare with.
        texts: a text or many.
        model: a served model; None selects the task's default.
    """

    def body(part: Sequence[str]) -> Mapping[str, Any]:
        return {"inputs": {"source_sentence": source, "sentences": part}, **_given(model=model)}

    def read(response: httpx.Response, _: int) -> Float32:
        return np.array(response.json(), np.float32)

    return Call("/similarity", _many(texts), body, read, _stack)


def nsp(pairs: Pair | Sequence[Pair], *, model: str | None = None) -> Call[Float32]:
    """Return the probability that the second text of a pair follows the first, [n] float32.

    Args:
        pairs: a pair of texts or many.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> Float32:
        return np.array([labels[0]["score"] for labels in response.json()], np.float32)

    inputs = [{"text": first, "next": second} for first, second in _pairs(pairs)]
    return Call("/nsp", inputs, partial(_body, {}, model), read, _stack)


def qa(
    pairs: Pair | Sequence[Pair],
    *,
    top_k: int | None = None,
    doc_stride: int | None = None,
    max_answer_len: int | None = None,
    handle_impossible_answer: bool | None = None,
    model: str | None = None,
) -> Call[list[list[Answer]]]:
    """Return the answers to each question, best first.

    Args:
        pairs: a (question, context) or many.
        top_k: number of answers per question; None selects the server's default, 1.
        doc_stride: number of tokens that neighbouring windows of a long context share.
        max_answer_len: most tokens per answer.
        handle_impossible_answer: whether the empty text, "no answer", is a candidate.
        model: a served model; None selects the task's default.
    """
    parameters = _given(
        top_k=top_k,
        doc_stride=doc_stride,
        max_answer_len=max_answer_len,
        handle_impossible_answer=handle_impossible_answer,
    )

    def read(response: httpx.Response, _: int) -> list[list[Answer]]:
        return [
            [_result(Answer, answer) for answer in (item if isinstance(item, list) else [item])]
            for item in response.json()
        ]

    inputs = [{"question": question, "context": context} for question, context in _pairs(pairs)]
    return Call("/qa", inputs, partial(_body, parameters, model), read, _chain)


def classify(
    texts: str | Pair | Sequence[str | Pair],
    *,
    top_k: int | None = None,
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None,
    model: str | None = None,
) -> Call[list[list[Label]]]:
    """Return the labels of each text, best first.

    Args:
        texts: a text, a pair of texts, or a list of either.
        top_k: number of labels per text; None selects all.
        function_to_apply: function from logits to scores; None selects the model's.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[list[Label]]:
        return [[_result(Label, label) for label in labels] for labels in response.json()]

    many = [texts] if isinstance(texts, str | tuple) else texts
    inputs = [t if isinstance(t, str) else {"text": t[0], "text_pair": t[1]} for t in many]
    parameters = _given(top_k=top_k, function_to_apply=function_to_apply)
    return Call("/classify", inputs, partial(_body, parameters, model), read, _chain)


def token_classification(
    texts: str | Sequence[str],
    *,
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None,
    stride: int | None = None,
    model: str | None = None,
) -> Call[list[list[Entity]]]:
    """Return the entities of each text, in their order.

    Args:
        texts: a text or many.
        aggregation_strategy: how tokens form entities; None selects "simple".
        stride: number of tokens that neighbouring windows of a long text share; None cuts it.
        model: a served model; None selects the task's default.
    """

    def read(response: httpx.Response, _: int) -> list[list[Entity]]:
        return [[_entity(item) for item in entities] for entities in response.json()]

    parameters = _given(aggregation_strategy=aggregation_strategy, stride=stride)
    body = partial(_body, parameters, model)
    return Call("/token-classification", _many(texts), body, read, _chain)


def rerank(
    query: str,
    texts: str | Sequence[str],
    *,
    raw_scores: bool | None = None,
    model: str | None = None,
) -> Call[list[Rank]]:
    """Return the texts' ranks by relevance to a query, best first.

    Args:
        query: the query.
        texts: a text or many.
        raw_scores: whether the scores of a classifier are its logits.
        model: a served model; None selects a classifier with one label, or similarity.
    """
    options = _given(raw_scores=raw_scores, model=model)

    def body(part: Sequence[str]) -> Mapping[str, Any]:
        return {"query": query, "texts": part, **options}

    def read(response: httpx.Response, first: int) -> list[Rank]:
        return [Rank(first + rank["index"], rank["score"]) for rank in response.json()]

    def join(parts: list[list[Rank]]) -> list[Rank]:
        return sorted(_chain(parts), key=lambda rank: -rank.score)

    return Call("/rerank", _many(texts), body, read, join)


def _vectors(response: httpx.Response) -> Float32:
    """Return the rows of float32 of a response."""
    rows, columns = map(int, response.headers["x-shape"].split(","))
    return np.frombuffer(response.content, "<f4").reshape(rows, columns)


def _many(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _pairs(pairs: Pair | Sequence[Pair]) -> list[Any]:
    is_one = isinstance(pairs, tuple) and len(pairs) == 2 and isinstance(pairs[0], str)
    return [pairs] if is_one else list(pairs)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def _body(
    parameters: Mapping[str, Any], model: str | None, inputs: Sequence[Any]
) -> Mapping[str, Any]:
    return {
        "inputs": inputs,
        **({"parameters": parameters} if parameters else {}),
        **_given(model=model),
    }


def _body_at_root(options: Mapping[str, Any], inputs: Sequence[Any]) -> Mapping[str, Any]:
    return {"inputs": inputs, **options}


def _masks(item: list[Any]) -> list[list[dict[str, Any]]]:
    """Return the predictions per mask; the server omits the outer list for one mask."""
    return item if item and isinstance(item[0], list) else [item]


def _result(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return a result from a JSON object, without fields that later servers may add."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def _entity(values: Mapping[str, Any]) -> Entity:
    label = values["entity_group"] if "entity_group" in values else values["entity"]
    return _result(Entity, {**values, "entity": label})


def _chain(parts: list[list[R]]) -> list[R]:
    return [item for part in parts for item in part]


def _stack(parts: list[Float32]) -> Float32:
    return np.concatenate(parts)
