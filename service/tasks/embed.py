"""Embedding: one vector per text."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import HeadRequest, Pooling, embedding, token_embedding
from cloze.service.core import EmptyRequest, Float32, InvalidRequest, WrongTask
from cloze.service.tasks.task import (
    Count,
    CountOrZero,
    Example,
    FirstError,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    TruncationParameters,
    check_range,
    check_text,
    input_name,
    listed,
)

TextOrIds = str | list[int]
"""A text, or the token ids of a text in the model's vocabulary."""

TokenIds = Annotated[list[CountOrZero], FirstError(), NotEmpty]
EmbedInputs = Text | TokenIds | Annotated[list[Text | TokenIds], FirstError(), NotEmpty]


Offsets = list[tuple[int, int] | None]
"""(start, end) of each token in characters of its text; None for special tokens and a prompt's."""


class TextParameters(TruncationParameters):
    """How a text becomes a sequence: the fields of text-embeddings-inference."""

    prompt_name: str | None = Field(
        None, description="name of a prompt of the model, which is put before each text"
    )


class EmbedParameters(TextParameters):
    """The fields of text-embeddings-inference and of huggingface_hub's ``feature_extraction``."""

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
    spans: Annotated[list[tuple[CountOrZero, Count]], FirstError(), NotEmpty] | None = Field(
        None,
        description="parts (start, end) of one text, in characters; each has a vector, pooled from "
        "one pass over the whole text (late chunking, Guenther et al. 2024)",
    )


_REQUEST: Final = {embedding.HEAD.name: embedding.EmbeddingRequest()}


class _State:
    """The options of one request that apply to its vectors."""

    __slots__ = ("dimensions", "normalize", "rows")

    def __init__(
        self, dimensions: int, normalize: bool, rows: list[tuple[int, int]] | None = None
    ) -> None:
        self.dimensions, self.normalize = dimensions, normalize
        self.rows = rows
        """The (first, end) tokens of each span; None: a vector per text."""


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts to embed.

    Raises:
        EmptyRequest: there is no text, or no span, or a text is empty.
        InvalidRequest: an id is outside the vocabulary, the prompt is unknown, or a text is too
            long and ``truncate`` is false; or a span is not one of the text.
        WrongTask: spans are asked for of a model that cannot pool them.
    """
    parameters: EmbedParameters = call.parameters
    texts, names = texts_and_names(call.inputs, context)
    recipe = context.manifest.embedding
    assert recipe is not None  # a model with the head has a recipe
    dimensions = recipe.dimensions if parameters.dimensions is None else parameters.dimensions
    check_range(dimensions, 1, recipe.dimensions, "dimensions")
    normalize = recipe.normalize if parameters.normalize is None else parameters.normalize
    if parameters.spans is not None:
        return _prepare_spans(call, parameters.spans, dimensions, normalize, context)
    encodings, truncated = encode(texts, names, parameters, context)
    return PreparedRequest(encodings, _State(dimensions, normalize), truncated=truncated)


def _prepare_spans(
    call: TaskCall,
    spans: Sequence[tuple[int, int]],
    dimensions: int,
    normalize: bool,
    context: TaskContext,
) -> PreparedRequest[_State]:
    """Tokenize one text whose spans are embedded."""
    text, parameters = call.inputs, call.parameters
    _check_spans(text, spans, context)
    encodings, truncated = encode([text], ["inputs"], parameters, context, _TOKENS_REQUEST)
    places = offsets(text, len(encodings[0]), parameters, context)
    own = [(token, place) for token, place in enumerate(places) if place is not None]
    starts, ends = [place[0] for _, place in own], [place[1] for _, place in own]
    rows = []
    for index, (start, end) in enumerate(spans):
        first, last = bisect_right(ends, start), bisect_left(starts, end)  # tokens never overlap
        if first >= last:
            raise InvalidRequest(
                f"spans[{index}] has no token among the {len(places)} that the model reads"
            )
        rows.append((own[first][0], own[last - 1][0] + 1))
    state = _State(dimensions, normalize, rows)
    return PreparedRequest(encodings, state, results=len(places), truncated=truncated)


_TOKENS_REQUEST: Final = {token_embedding.HEAD.name: token_embedding.TokenEmbeddingRequest()}


def _check_spans(text: Any, spans: Sequence[tuple[int, int]], context: TaskContext) -> None:
    """Check the spans of one text, before it is tokenized; see `prepare`."""
    recipe, reference = context.manifest.embedding, context.manifest.reference
    assert recipe is not None
    heads = {head.name for head in context.manifest.graph_heads}
    if token_embedding.HEAD.name not in heads:
        task = token_embedding.HEAD.task
        raise WrongTask(f"spans need vectors of tokens; export {reference} with --task {task} too")
    if recipe.pooling is not Pooling.MEAN:
        raise WrongTask(f"spans need mean pooling; the pooling of {reference} is {recipe.pooling}")
    if recipe.projected is not False:
        raise WrongTask(
            f"spans need a model without layers after its pooling; {reference} has some, or was "
            "exported before bundles said so"
        )
    if not isinstance(text, str):
        raise InvalidRequest("spans are parts of one text; inputs is a list")
    if not spans:
        raise EmptyRequest("spans is an empty list; it needs at least 1 span")
    if len(spans) > (most := context.limits.max_request_texts):
        raise InvalidRequest(f"spans has {len(spans)} spans; the limit is {most}")
    for index, (start, end) in enumerate(spans):
        if not 0 <= start < end <= len(text):
            raise InvalidRequest(
                f"spans[{index}] is ({start}, {end}); the text has {len(text)} characters"
            )


def texts_and_names(inputs: Any, context: TaskContext) -> tuple[list[TextOrIds], list[str]]:
    """Return the texts of `EmbedInputs`, and the name of each text in errors.

    Raises:
        InvalidRequest: there are no texts, or too many.
    """
    is_one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    texts: list[TextOrIds] = listed([inputs] if is_one else inputs, context.limits)
    return texts, [input_name(index, many=not is_one) for index in range(len(texts))]


def encode(
    texts: Sequence[TextOrIds],
    names: Sequence[str],
    parameters: TextParameters,
    context: TaskContext,
    request: Mapping[str, HeadRequest] = _REQUEST,
) -> tuple[list[Encoding], int]:
    """Return the encodings of texts to embed, and how many texts were cut.

    Args:
        texts: at least one text, or its token ids.
        names: name of each text in errors.
        parameters: prompt and truncation.
        context: the model. Without a recipe for embeddings, it has no prompts.
        request: what each encoding asks of the heads.

    Raises:
        InvalidRequest: see `prepare`.
    """
    recipe = context.manifest.embedding
    max_tokens = recipe.max_tokens if recipe else context.limits.max_tokens
    prompt = prompt_of(context, parameters.prompt_name)
    encodings, truncated = [], 0
    for name, ids in zip(names, _ids(texts, names, prompt, context), strict=True):
        encoding, cut = context.tokenizer.encode(ids, max_tokens, keep_end=parameters.keep_end)
        if cut:
            parameters.check_cut(name, len(ids) + 2, max_tokens)
        encoding.requests = request
        encodings.append(encoding)
        truncated += cut
    return encodings, truncated


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], _: TaskContext
) -> Float32:
    """Return the vectors [n, D] float32."""
    state = prepared.state
    if state.rows is None:
        rows = [output[embedding.HEAD.name].embedding for output in outputs]
    else:
        tokens = outputs[0][token_embedding.HEAD.name].embeddings  # [S, H]
        rows = [tokens[first:end].mean(0) for first, end in state.rows]
    vectors = np.array(rows, np.float32)
    if state.dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, : state.dimensions])
    return normalized(vectors) if state.normalize else vectors


def offsets(text: str, tokens: int, parameters: TextParameters, context: TaskContext) -> Offsets:
    """Return the place of each token of a text's encoding.

    Args:
        text: the text.
        tokens: length of the encoding, special tokens included.
        parameters: the prompt and the truncation of the encoding.
        context: the model.
    """
    prompt = prompt_of(context, parameters.prompt_name)
    found = context.tokenizer.spans(prompt + text).offsets
    kept = found[len(found) - (tokens - 2) :] if parameters.keep_end else found[: tokens - 2]
    skipped = len(prompt)
    places = [(start - skipped, end - skipped) if start >= skipped else None for start, end in kept]
    return [None, *places, None]


def normalized(vectors: Float32) -> Float32:
    """Return vectors [n, D] scaled to length 1."""
    norms = np.sqrt(np.vecdot(vectors, vectors))
    scaled: Float32 = vectors / np.maximum(norms, 1e-12)[:, None]
    return scaled


def prompt_of(context: TaskContext, name: str | None) -> str:
    """Return the prompt to put before each text: the named one, or the model's default.

    Raises:
        InvalidRequest: the model has no prompt of that name.
    """
    recipe = context.manifest.embedding
    prompts = recipe.prompts if recipe else {}
    name = name or (recipe.default_prompt if recipe else None)
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(map(ascii, prompts)) or "none"
        raise InvalidRequest(f"prompt_name {name!a} is not one of the model's prompts ({known})")
    return prompts[name]


def _ids(
    texts: Sequence[TextOrIds], names: Sequence[str], prompt: str, context: TaskContext
) -> list[list[int]]:
    """Return the ids of each text without ``[CLS]`` and ``[SEP]``."""
    tokenizer = context.tokenizer
    for name, text in zip(names, texts, strict=True):
        if isinstance(text, str):
            check_text(text, name, context.limits)
        elif not text:
            raise EmptyRequest(f"{name} is empty; it needs at least 1 token id")
        elif not (min(text) >= 0 and max(text) < tokenizer.vocab_size):
            known = f"this model's are 0 to {tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"{name} has token ids from {min(text)} to {max(text)}; {known}")
    strings = [prompt + text for text in texts if isinstance(text, str)]
    encoded = iter(tokenizer.ids(strings or [""]))
    ids = []
    for text in texts:
        if isinstance(text, str):
            ids.append(next(encoded))
        else:
            ids.append(text[1:-1] if tokenizer.is_wrapped(text) else text)
    return ids


TASK: Final = Task(
    name="embed",
    route="/embed",
    summary="One vector per text",
    heads=(embedding.HEAD.name,),
    inputs=Annotated[
        EmbedInputs,
        Field(
            description="a text, its token ids, or a list of either",
            examples=["What is deep learning?"],
        ),
    ],
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
