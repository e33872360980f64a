"""Embedding: one vector per text."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import HeadRequest, embedding
from cloze.service.core import EmptyRequest, Float32, InvalidRequest
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


_REQUEST: Final = {embedding.HEAD.name: embedding.EmbeddingRequest()}


class _State:
    """The options of one request that apply to its vectors."""

    __slots__ = ("dimensions", "normalize")

    def __init__(self, dimensions: int, normalize: bool) -> None:
        self.dimensions, self.normalize = dimensions, normalize


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts to embed.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: an id is outside the vocabulary, the prompt is unknown, or a text is too
            long and ``truncate`` is false.
    """
    parameters: EmbedParameters = call.parameters
    texts, names = texts_and_names(call.inputs, context)
    recipe = context.manifest.embedding
    assert recipe is not None  # a model with the head has a recipe
    dimensions = recipe.dimensions if parameters.dimensions is None else parameters.dimensions
    check_range(dimensions, 1, recipe.dimensions, "dimensions")
    encodings, truncated = encode(texts, names, parameters, context)
    normalize = recipe.normalize if parameters.normalize is None else parameters.normalize
    return PreparedRequest(encodings, _State(dimensions, normalize), truncated=truncated)


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
    rows = [output[embedding.HEAD.name].embedding for output in outputs]
    vectors = np.array(rows, np.float32)
    if state.dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, : state.dimensions])
    return normalized(vectors) if state.normalize else vectors


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
