"""Embedding: one vector per text, or per span of a text."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.embedding_space import VectorRecipe
from cloze.model_store.heads import (
    HeadRequest,
    Pooling,
    embedding,
    layer_embedding,
    token_embedding,
)
from cloze.service.core import Float32
from cloze.service.errors import InvalidRequest, Location, WrongTask
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import Bounds, EmbedInputs, TextEncoder, TextParameters, encode_texts
from cloze.service.tasks.wire import Count, CountOrZero, NotEmpty, check_range

Layers = Literal["first", "second-to-last", "last", "sum-last-four", "concat-last-four", "sum-all"]


class EmbedParameters(TextParameters):
    """The fields of text-embeddings-inference and huggingface_hub's ``feature_extraction``.

    `pooling`, `layers`, `spans`, and the windows of long texts are our own.
    """

    normalize: bool | None = None
    """whether to scale vectors to length 1; the default depends on the model"""
    dimensions: Count | None = Field(None, description="number of leading dimensions to keep")
    encoding_format: Literal["float", "base64"] | None = None
    """accepted for huggingface_hub and ignored"""
    pooling: Literal["cls", "mean", "max"] | None = None
    """how tokens become one vector; the default is the model's own"""
    layers: Layers | None = None
    """the layers that are pooled (first: the embeddings); the default is last"""
    spans: Annotated[list[tuple[CountOrZero, Count]], NotEmpty] | None = None
    """parts (start, end) of one text, in characters; each has a vector"""


class _State(NamedTuple):
    """How the outputs of one request become its vectors."""

    head: str  # name of the head that gives the vectors
    recipe: VectorRecipe  # the length and the number of dimensions of the vectors
    # The tokens of each window of each text; None: a text has one encoding.
    windows: list[list[int]] | None = None
    # The (first, end) tokens of each vector of the only text; None: a vector per text.
    spans: list[Bounds] | None = None


_SPANS: Final = "spans, and Jina's late_chunking,"
_LEAST_NORM: Final = np.float32(1e-12)
_REQUEST: Final[Mapping[str, HeadRequest]] = {embedding.HEAD.name: HeadRequest()}
_TOKENS_REQUEST: Final = {token_embedding.HEAD.name: HeadRequest()}


def prepare(
    inputs: Any, parameters: EmbedParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the texts to embed."""
    recipe, requests = context.own_vectors, _REQUEST
    assert recipe is not None  # a model with the head has a recipe
    if parameters.pooling is not None or parameters.layers is not None:
        if parameters.spans is not None:
            raise InvalidRequest("spans have the mean of the last layer; leave out pooling, layers")
        if (request := _of_layers(parameters, context)) is not None:
            requests = {layer_embedding.HEAD.name: request}
            recipe = replace(
                recipe,
                pooling=request.pooling,
                layers=parameters.layers or "last",
                dimensions=context.manifest.architecture.hidden_size * len(request.vectors),
            )
    if parameters.dimensions is not None:
        check_range(parameters.dimensions, 1, recipe.dimensions, "dimensions")
        recipe = replace(recipe, dimensions=parameters.dimensions)
    if parameters.normalize is not None:
        recipe = replace(recipe, normalize=parameters.normalize)
    windows = spans = None
    if parameters.spans is None:
        texts, prompt = context.limits.checked(inputs), parameters.prompt(context)
        rule = parameters.rule(report=parameters.return_usage)
        encoder = encode_texts(texts, rule, context, requests, prompt)
        if encoder.rule.choice == "window":
            windows = [list(map(len, text.encodings)) for text in encoder.texts]
    else:
        if isinstance(inputs, list) and len(inputs) == 1:
            [inputs] = inputs  # some protocols have lists only
        requests = _TOKENS_REQUEST
        encoder, spans = _encode_spans(inputs, parameters, parameters.spans, context)
    if encoder.prompt != recipe.prompt:
        recipe = replace(recipe, prompt=encoder.prompt)
    prepared = encoder.prepared(_State(next(iter(requests)), recipe, windows, spans), recipe)
    return prepared if spans is None else prepared._replace(others=len(spans))


def _of_layers(
    parameters: EmbedParameters, context: TaskContext
) -> layer_embedding.LayerEmbeddingRequest | None:
    """Return how to make other vectors than the model's own; None if its own are asked for.

    Source: Devlin et al. 2019, table 7, which compares layers.
    """
    manifest, pooling, layers = context.manifest, parameters.pooling, parameters.layers
    options = manifest.embedding
    assert options is not None  # a model with the head has them
    chosen = options.pooling if pooling is None else Pooling(pooling)
    is_own = pooling is None or (chosen is options.pooling and not options.further_poolings)
    if is_own and layers in (None, "last"):
        return None
    context.check_head(layer_embedding.HEAD, "pooling and layers need vectors of layers")
    if not options.include_prompt and parameters.prompt(context):
        raise WrongTask(
            "pooling and layers pool a prompt too, which the pooling of "
            f"{manifest.reference} leaves out; leave out the prompt, or pooling and layers"
        )
    _check_no_projection(manifest, "pooling and layers")
    layers, count = layers or "last", manifest.architecture.layers
    last_four = range(count - 3, count + 1)
    if layers.endswith("last-four") and last_four.start < 1:
        problem = f"{layers} needs 4 layers; the model has {count}"
        raise InvalidRequest(problem, Location(("layers",)))
    weights: dict[Layers, list[dict[int, float]]] = {  # of each layer, for each vector
        "first": [{0: 1.0}],  # the embeddings
        "second-to-last": [{count - 1: 1.0}],
        "last": [{count: 1.0}],
        "sum-last-four": [dict.fromkeys(last_four, 1.0)],
        "concat-last-four": [{layer: 1.0} for layer in last_four],
        "sum-all": [dict.fromkeys(range(1, count + 1), 1.0)],
    }
    return layer_embedding.LayerEmbeddingRequest(weights[layers], chosen)


def _encode_spans(
    text: Any, parameters: EmbedParameters, spans: Sequence[tuple[int, int]], context: TaskContext
) -> tuple[TextEncoder, list[Bounds]]:
    """Return the encoding of one text, and the (first, end) tokens of each of its spans."""
    manifest, limits = context.manifest, context.limits
    options, reference = manifest.embedding, manifest.reference
    assert options is not None  # a model with the head has them
    rule = parameters.rule(report=parameters.return_usage)
    if rule.choice == "window":
        raise InvalidRequest("spans are pooled from one pass; long_text window takes several")
    context.check_head(token_embedding.HEAD, f"{_SPANS} need vectors of tokens")
    if options.poolings != (Pooling.MEAN,):
        shown = " + ".join(options.poolings)
        raise WrongTask(f"{_SPANS} need mean pooling; the pooling of {reference} is {shown}")
    _check_no_projection(manifest, _SPANS)
    if not isinstance(text, str):
        raise InvalidRequest("spans are parts of one text; inputs has token ids, or several texts")
    located = limits.checked(spans, Location(("spans",)), "span")
    for at, (start, end) in located:
        if not 0 <= start < end <= len(text):
            raise InvalidRequest(f"is ({start}, {end}); the text has {len(text)} characters", at)
    texts = limits.checked(text)
    encoder = encode_texts(texts, rule, context, _TOKENS_REQUEST, parameters.prompt(context))
    [places] = encoder.offsets(texts)
    own = [(token, place) for token, place in enumerate(places) if place is not None]
    starts, ends = [place[0] for _, place in own], [place[1] for _, place in own]
    rows = []
    for at, (start, end) in located:
        first, last = bisect_right(ends, start), bisect_left(starts, end)  # tokens never overlap
        if first >= last:
            raise InvalidRequest(f"has no token among the {len(places)} that the model reads", at)
        rows.append((own[first][0], own[last - 1][0] + 1))
    return encoder, rows


def _check_no_projection(manifest: Manifest, asked: str) -> None:
    """Raise WrongTask if a model has layers after its pooling."""
    if manifest.embedding is None or manifest.embedding.projected is not False:
        raise WrongTask(
            f"{asked} need a model without layers after its pooling; {manifest.reference} has "
            "some, or was exported before bundles said so"
        )


def decode(state: _State, outputs: Outputs, _: TaskContext) -> Float32:
    """Return the vectors [n, D] float32."""
    results = [output[state.head] for output in outputs]
    if state.spans is not None:
        vectors_of_tokens = results[0].array  # [S, H]
        rows = [vectors_of_tokens[first:end].mean(0) for first, end in state.spans]
    else:
        rows = [result.array.ravel() for result in results]  # of layers: their vectors, joined
    if state.windows is not None:
        rest = iter(rows)
        parts = [[next(rest) for _ in sizes] for sizes in state.windows]
        rows = [  # the mean of each text's windows, weighted by their tokens
            part[0] if len(part) == 1 else np.average(part, 0, sizes).astype(np.float32)
            for part, sizes in zip(parts, state.windows, strict=True)
        ]
    # The array of a single vector is that of the engine; `np.array` would take 2 us.
    vectors = rows[0][None] if len(rows) == 1 else np.array(rows, np.float32)
    if state.recipe.dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, : state.recipe.dimensions])
    if not state.recipe.normalize:
        return vectors
    norms = np.sqrt(np.vecdot(vectors, vectors))
    scaled: Float32 = vectors / np.maximum(norms, _LEAST_NORM)[:, None]
    return scaled


TASK: Final = Task(
    name="embed",
    route="/embed",
    summary="One vector per text",
    heads=(embedding.HEAD.name,),
    inputs=EmbedInputs,
    parameters=EmbedParameters,
    result=list[list[float]],
    needs_thread=lambda parameters: parameters.spans is not None,  # one text has many vectors
    prepare=prepare,
    decode=decode,
    examples={
        "One text": {"inputs": "What is deep learning?"},
        "Vectors as the model computes them": {"inputs": ["A cat.", "A dog."], "normalize": False},
    },
    vectors=True,
)
