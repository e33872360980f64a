"""Embedding: one vector per text, or per span of a text."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import (
    HeadRequest,
    Pooling,
    embedding,
    layer_embedding,
    token_embedding,
)
from cloze.model_store.heads.layer_embedding import LayerEmbeddingRequest
from cloze.service.core import Float32, InvalidRequest, Location, WrongTask
from cloze.service.tasks import embed_inputs
from cloze.service.tasks.embed_inputs import TextParameters
from cloze.service.tasks.task import (
    INPUTS,
    Count,
    CountOrZero,
    Example,
    Input,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    check_count,
    check_head,
    check_range,
    listed,
)

PoolingChoice = Literal["cls", "mean", "max"]
Layers = Literal["first", "second-to-last", "last", "sum-last-four", "concat-last-four", "sum-all"]

_LAST_FOUR: Final = 4


class EmbedParameters(TextParameters):
    """The fields of text-embeddings-inference and huggingface_hub's ``feature_extraction``.

    `pooling`, `layers`, `spans`, and the windows of long texts are our own.
    """

    long_text: Literal["error", "truncate", "window"] | None = Field(  # type: ignore[assignment]  # one more choice
        None,
        description="error refuses a long text, truncate cuts it, window divides it and returns "
        "the mean of its windows' vectors; the default is truncate",
    )
    normalize: bool | None = Field(
        None, description="whether to scale vectors to length 1; the default depends on the model"
    )
    dimensions: Count | None = Field(
        None,
        description="number of leading dimensions to keep, for models with Matryoshka "
        "representations (Kusupati et al. 2022)",
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="accepted for huggingface_hub and ignored"
    )
    pooling: PoolingChoice | None = Field(
        None, description="how tokens become one vector; the default is the model's own"
    )
    layers: Layers | None = Field(
        None,
        description="the layers whose hidden states are pooled, as in table 7 of the BERT paper "
        "(first: the embeddings); the default is last",
    )
    spans: Annotated[list[tuple[CountOrZero, Count]], NotEmpty] | None = Field(
        None,
        description="parts (start, end) of one text, in characters; each has a vector, pooled from "
        "one pass over the whole text (late chunking, Guenther et al. 2024)",
    )


_REQUEST: Final[Mapping[str, HeadRequest]] = {embedding.HEAD.name: HeadRequest()}


class _State(NamedTuple):
    """How the outputs of one request become its vectors.

    Attributes:
        rows: outputs of the encodings -> their vectors [n, D].
        dimensions: number of leading dimensions to keep.
        normalize: whether to scale vectors to length 1.
        windows: number of encodings of each text; None: one each.
    """

    rows: Callable[[Sequence[HeadOutputs]], Float32]
    dimensions: int
    normalize: bool
    windows: list[int] | None = None


_SPANS: Final = Location(("spans",))


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts to embed.

    Raises:
        EmptyRequest: there is no text, or no span, or a text is empty.
        InvalidRequest: see `embed_inputs.encode`; or a span is not one of the text, or parameters
            contradict each other.
        WrongTask: spans, layers or a pooling are asked for that the model cannot compute.
    """
    parameters: EmbedParameters = call.parameters
    recipe = context.manifest.embedding
    assert recipe is not None  # a model with the head has a recipe
    size, request, rows = recipe.dimensions, _REQUEST, _own_vectors
    if parameters.pooling is not None or parameters.layers is not None:
        if parameters.spans is not None:
            raise InvalidRequest("spans have the mean of the last layer; leave out pooling, layers")
        layers = _layer_request(parameters.pooling, parameters.layers, context)
        if layers is not None:
            size = context.manifest.architecture.hidden_size * len(layers.vectors)
            request, rows = {layer_embedding.HEAD.name: layers}, _layer_vectors
    dimensions = size if parameters.dimensions is None else parameters.dimensions
    check_range(dimensions, 1, size, "dimensions")
    normalize = recipe.normalize if parameters.normalize is None else parameters.normalize
    if parameters.spans is not None:
        return _prepare_spans(call, parameters.spans, dimensions, normalize, context)
    texts = listed(call.inputs, context.limits)
    encoded = embed_inputs.encode(texts, parameters, context, request)
    windows = encoded.windows if encoded.rule.choice == "window" else None
    state = _State(rows, dimensions, normalize, windows)
    return encoded.prepared(state, len(encoded.encodings))


def _own_vectors(outputs: Sequence[HeadOutputs]) -> Float32:
    return np.array([output[embedding.HEAD.name].array for output in outputs], np.float32)


def _layer_vectors(outputs: Sequence[HeadOutputs]) -> Float32:
    name = layer_embedding.HEAD.name
    return np.array([output[name].array.ravel() for output in outputs], np.float32)


def _layer_request(
    pooling: PoolingChoice | None, layers: Layers | None, context: TaskContext
) -> LayerEmbeddingRequest | None:
    """Return the request for other vectors than the model's own; None if its own are asked for.

    Source: Devlin et al. 2019, table 7, which compares layers.

    Args:
        pooling: how tokens become one vector; None: as the model's own.
        layers: the layers; None: the last.
        context: the model.

    Raises:
        InvalidRequest: the model has too few layers.
        WrongTask: the model's graphs have no vectors of layers, or layers follow its pooling.
    """
    manifest = context.manifest
    recipe = manifest.embedding
    assert recipe is not None  # a model with the head has a recipe
    chosen = recipe.pooling if pooling is None else Pooling(pooling)
    if chosen is recipe.pooling and layers in (None, "last"):
        return None
    check_head(context, layer_embedding.HEAD, "pooling and layers need vectors of layers")
    _check_no_projection(manifest, "pooling and layers")
    return LayerEmbeddingRequest(
        _layer_weights(layers or "last", manifest.architecture.layers), chosen
    )


def _layer_weights(layers: Layers, count: int) -> list[dict[int, float]]:
    """Return the weights of each layer, for each vector; 0 is the embeddings."""
    if layers.endswith("last-four") and count < _LAST_FOUR:
        problem = f"{layers} needs {_LAST_FOUR} layers; the model has {count}"
        raise InvalidRequest(problem, Location(("layers",)))
    last_four = range(count - _LAST_FOUR + 1, count + 1)
    match layers:
        case "first":
            return [{0: 1.0}]
        case "second-to-last":
            return [{count - 1: 1.0}]
        case "last":
            return [{count: 1.0}]
        case "sum-last-four":
            return [dict.fromkeys(last_four, 1.0)]
        case "concat-last-four":
            return [{layer: 1.0} for layer in last_four]
        case "sum-all":
            return [dict.fromkeys(range(1, count + 1), 1.0)]


def _prepare_spans(
    call: TaskCall,
    spans: Sequence[tuple[int, int]],
    dimensions: int,
    normalize: bool,
    context: TaskContext,
) -> PreparedRequest[_State]:
    """Tokenize one text whose spans are embedded."""
    text, parameters = call.inputs, call.parameters
    if isinstance(text, list) and len(text) == 1:
        text = text[0]  # some protocols have lists only
    if parameters.rule().choice == "window":
        raise InvalidRequest("spans are pooled from one pass; long_text window takes several")
    _check_spans(text, spans, context)
    encoded = embed_inputs.encode([Input(INPUTS, text)], parameters, context, _TOKENS_REQUEST)
    places = embed_inputs.offsets(text, len(encoded.encodings[0]), parameters, context)
    own = [(token, place) for token, place in enumerate(places) if place is not None]
    starts, ends = [place[0] for _, place in own], [place[1] for _, place in own]
    rows = []
    for index, (start, end) in enumerate(spans):
        first, last = bisect_right(ends, start), bisect_left(starts, end)  # tokens never overlap
        if first >= last:
            raise InvalidRequest(
                f"has no token among the {len(places)} that the model reads", _SPANS.below(index)
            )
        rows.append((own[first][0], own[last - 1][0] + 1))

    def span_vectors(outputs: Sequence[HeadOutputs]) -> Float32:
        tokens = outputs[0][token_embedding.HEAD.name].array  # [S, H]
        return np.array([tokens[first:end].mean(0) for first, end in rows], np.float32)

    return encoded.prepared(_State(span_vectors, dimensions, normalize), len(places))


_TOKENS_REQUEST: Final = {token_embedding.HEAD.name: HeadRequest()}


def _check_no_projection(manifest: Manifest, asked: str) -> None:
    """Raise WrongTask if a model has layers after its pooling."""
    if manifest.embedding is None or manifest.embedding.projected is not False:
        raise WrongTask(
            f"{asked} need a model without layers after its pooling; {manifest.reference} has "
            "some, or was exported before bundles said so"
        )


def _check_spans(text: Any, spans: Sequence[tuple[int, int]], context: TaskContext) -> None:
    """Check the spans of one text, before it is tokenized; see `prepare`."""
    recipe, reference = context.manifest.embedding, context.manifest.reference
    assert recipe is not None
    check_head(context, token_embedding.HEAD, "spans need vectors of tokens")
    if recipe.pooling is not Pooling.MEAN:
        raise WrongTask(f"spans need mean pooling; the pooling of {reference} is {recipe.pooling}")
    _check_no_projection(context.manifest, "spans")
    if not isinstance(text, str):
        raise InvalidRequest("spans are parts of one text; inputs has token ids, or several texts")
    check_count(len(spans), context.limits.max_request_texts, _SPANS, "span")
    for index, (start, end) in enumerate(spans):
        if not 0 <= start < end <= len(text):
            raise InvalidRequest(
                f"is ({start}, {end}); the text has {len(text)} characters", _SPANS.below(index)
            )


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], _: TaskContext
) -> Float32:
    """Return the vectors [n, D] float32."""
    state = prepared.state
    vectors = state.rows(outputs)
    if state.windows is not None:
        vectors = _means(vectors, list(map(len, prepared.encodings)), state.windows)
    if state.dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, : state.dimensions])
    return normalized(vectors) if state.normalize else vectors


def _means(vectors: Float32, lengths: Sequence[int], windows: Sequence[int]) -> Float32:
    """Return the mean of each text's windows [n, D], weighted by their encodings' tokens."""
    weights = np.array(lengths, np.float32)[:, None]
    firsts = np.cumsum([0, *windows[:-1]])
    means = np.add.reduceat(vectors * weights, firsts) / np.add.reduceat(weights, firsts)
    return means.astype(np.float32, copy=False)


def normalized(vectors: Float32) -> Float32:
    """Return vectors [n, D] scaled to length 1."""
    norms = np.sqrt(np.vecdot(vectors, vectors))
    scaled: Float32 = vectors / np.maximum(norms, 1e-12)[:, None]
    return scaled


TASK: Final = Task(
    name="embed",
    route="/embed",
    summary="One vector per text",
    heads=(embedding.HEAD.name,),
    inputs=embed_inputs.Inputs,
    parameters=EmbedParameters,
    result=list[list[float]],
    prepare=prepare,
    decode=decode,
    examples=(
        Example("One text", {"inputs": "What is deep learning?"}),
        Example(
            "Many texts, vectors as the model computes them",
            {"inputs": ["What is deep learning?", "A cat sat."], "normalize": False},
        ),
    ),
    vectors=True,
)
