"""The calls of tasks whose results are vectors, or similarities of vectors."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import httpx
import numpy as np
from numpy.typing import NDArray

from cloze.client.arguments import one_text, texts_of
from cloze.client.call import Call, Float32, LongText, body_with, chain, given, results
from cloze.client.errors import ServerFailed
from cloze.client.results import SparseVectors, Vectors, Word

Direction = Literal["left", "right"]
Layers = Literal["first", "second-to-last", "last", "sum-last-four", "concat-last-four", "sum-all"]
InputType = Literal["query", "document"]
DType = Literal["float32", "float16", "int8", "ubinary"]

_VECTORS = "application/octet-stream"
_NUMPY_TYPES: Final = {"float32": "<f4", "float16": "<f2", "int8": "i1", "ubinary": "u1"}


def embed(
    texts: str | Sequence[str],
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    long_text: LongText | None = None,
    pooling: Literal["cls", "mean", "max"] | None = None,
    layers: Layers | None = None,
    dtype: DType = "float32",
    input_type: InputType | None = None,
    expect_embedding_space: str | None = None,
    model: str | None = None,
) -> Call[Vectors]:
    """Return one vector per text, [n, D] float32; with dtype ubinary [n, ceil(D / 8)] uint8.

    Args:
        normalize: whether to scale vectors to length 1; None selects the model's default.
        dimensions: number of leading dimensions to keep.
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
        pooling: how tokens become one vector; None selects the model's.
        layers: the layers to pool; None selects the last.
        dtype: type of the numbers on their way. float16 and int8 are less exact, and take a half
            and a quarter of the bytes; the result is float32 all the same. ubinary has only signs.
        input_type: what the texts are for, which chooses the model's own prompt.
        expect_embedding_space: the only space whose vectors are wanted; another one is refused.
    """
    options = given(
        normalize=normalize,
        dimensions=dimensions,
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        long_text=long_text,
        pooling=pooling,
        layers=layers,
        input_type=input_type,
        model=model,
    )

    def join(parts: list[Vectors]) -> Vectors:
        return Vectors.of(np.concatenate(parts), _one_space(parts))

    body, accept = partial(body_with, options), f"{_VECTORS}; dtype={dtype}"
    listed, expected = texts_of("embed", texts), _expected(expect_embedding_space)
    return Call("/embed", listed, body, _vectors, join, accept, expected)


def embed_all(
    texts: str | Sequence[str],
    *,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    input_type: InputType | None = None,
    expect_embedding_space: str | None = None,
    model: str | None = None,
) -> Call[list[Vectors]]:
    """Return one vector per token of each text, [S, H] float32, special tokens included.

    Args:
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        input_type: what the texts are for, which chooses the model's own prompt.
        expect_embedding_space: the only space whose vectors are wanted; another one is refused.
    """
    options = given(
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        input_type=input_type,
        model=model,
    )

    def read(response: httpx.Response, _: int) -> list[Vectors]:
        lengths = list(map(int, response.headers["x-lengths"].split(",")))
        parts = np.split(_vectors(response, 0), np.cumsum(lengths)[:-1])
        return [Vectors.of(part.copy(), _space(response)) for part in parts]

    def join(parts: list[list[Vectors]]) -> list[Vectors]:
        vectors = chain(parts)
        _one_space(vectors)
        return vectors

    body, expected = partial(body_with, options), _expected(expect_embedding_space)
    return Call("/embed_all", texts_of("embed_all", texts), body, read, join, _VECTORS, expected)


def embed_sparse(
    texts: str | Sequence[str],
    *,
    top_k: int | None = None,
    truncate: bool | None = None,
    truncation_direction: Direction | None = None,
    prompt_name: str | None = None,
    input_type: InputType | None = None,
    expect_embedding_space: str | None = None,
    model: str | None = None,
) -> Call[SparseVectors]:
    """Return the words of the vocabulary that each text is about, the heaviest first.

    Args:
        top_k: most words per text; None selects the server's limit.
        truncate: whether to cut a long text; False refuses it.
        truncation_direction: the end of a long text to cut.
        prompt_name: name of a prompt of the model, which is put before each text.
        input_type: what the texts are for, which chooses the model's own prompt.
        expect_embedding_space: the only space whose vectors are wanted; another one is refused.
    """
    options = given(
        top_k=top_k,
        return_tokens=True,
        truncate=truncate,
        truncation_direction=truncation_direction,
        prompt_name=prompt_name,
        input_type=input_type,
        model=model,
    )

    def read(response: httpx.Response, _: int) -> SparseVectors:
        vectors = SparseVectors(results(Word, words) for words in response.json())
        vectors.embedding_space = _space(response)
        return vectors

    def join(parts: list[SparseVectors]) -> SparseVectors:
        vectors = SparseVectors(words for part in parts for words in part)
        vectors.embedding_space = _one_space(parts)
        return vectors

    return Call(
        "/embed_sparse",
        texts_of("embed_sparse", texts),
        partial(body_with, options),
        read,
        join,
        headers=_expected(expect_embedding_space),
    )


def similarity(
    source: str, texts: str | Sequence[str], *, model: str | None = None
) -> Call[Float32]:
    """Return the cosine between a text and each of other texts, [n] float32."""
    source = one_text("similarity", "source", source)

    def body(part: Sequence[str]) -> Mapping[str, Any]:
        return {"inputs": {"source_sentence": source, "sentences": part}, **given(model=model)}

    def read(response: httpx.Response, _: int) -> Float32:
        return np.array(response.json(), np.float32)

    return Call("/similarity", texts_of("similarity", texts), body, read, np.concatenate)


def _expected(space: str | None) -> dict[str, str]:
    """Return the headers of a request for vectors of one space."""
    return {} if space is None else {"x-expect-embedding-space": space}


def _space(response: httpx.Response) -> str | None:
    """Return the name of the space of a response's vectors; None if it has no name."""
    space: str | None = response.headers.get("x-embedding-space")
    return space


def _one_space(parts: Sequence[Vectors | SparseVectors]) -> str | None:
    """Return the name of the space of the vectors of all requests.

    Raises:
        ServerFailed: the server began to serve another model between two requests.
    """
    names = dict.fromkeys(part.embedding_space for part in parts)
    if len(names) > 1:
        shown = " and ".join(map(str, names))
        raise ServerFailed(f"the vectors of one call are in different spaces, {shown}; call again")
    return next(iter(names), None)


def _vectors(response: httpx.Response, _: int) -> Vectors:
    """Return the rows of a response, float32 or uint8 for signs, and their space."""
    return Vectors.of(_numbers(response), _space(response))


def _numbers(response: httpx.Response) -> NDArray[Any]:
    rows, columns = map(int, response.headers["x-shape"].split(","))
    dtype = response.headers["x-dtype"]
    values = np.frombuffer(response.content, _NUMPY_TYPES[dtype]).reshape(rows, columns)
    if dtype == "int8":
        return values * np.float32(response.headers["x-scale"])
    return values if dtype == "ubinary" else values.astype(np.float32, copy=False)
