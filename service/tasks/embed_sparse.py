"""Sparse embedding: the words of the vocabulary that a text is about, with weights.

Source: Formal et al. 2021, "SPLADE v2"; the route ``/embed_sparse`` of text-embeddings-inference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import sparse_embedding
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest, SparseEmbeddingResult
from cloze.service.core import InvalidRequest
from cloze.service.tasks import embed_inputs
from cloze.service.tasks.embed_inputs import TextParameters
from cloze.service.tasks.task import (
    Count,
    Example,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    check_range,
)


class SparseParameters(TextParameters):
    """The fields of text-embeddings-inference, and two of our own."""

    top_k: Count | None = Field(
        None, description="most words per text; the default is the server's limit of results"
    )
    return_tokens: bool | None = Field(
        None, description="whether to add the word itself, a token of the vocabulary"
    )


@dataclass(frozen=True, slots=True)
class SparseValue:
    """A word of the vocabulary by its index, and its weight."""

    index: int
    value: float


@dataclass(frozen=True, slots=True)
class NamedSparseValue:
    """A word of the vocabulary by its index and as a token, and its weight."""

    index: int
    value: float
    token: str


SparseVectors = list[list[SparseValue]] | list[list[NamedSparseValue]]


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[bool]:
    """Tokenize the texts.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: see `embed_inputs.encode`; or the request asks for too many words.
    """
    parameters: SparseParameters = call.parameters
    texts, names = embed_inputs.texts_and_names(call.inputs, context)
    largest = min(context.limits.max_top_k, context.tokenizer.vocab_size)
    top_k = largest if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, largest, "top_k")
    most = context.limits.max_results
    if parameters.top_k is not None and len(texts) * top_k > most:
        raise InvalidRequest(
            f"the request asks for {len(texts) * top_k} words; the limit is {most}"
        )
    encoded = embed_inputs.encode(texts, names, parameters, context, {})
    for encoding in encoded.encodings:
        request = SparseEmbeddingRequest(len(encoding), top_k)
        encoding.requests = {sparse_embedding.HEAD.name: request}
    named = bool(parameters.return_tokens)
    return PreparedRequest(
        encoded.encodings,
        named,
        len(texts) * top_k,
        encoded.truncated,
        usage=encoded.usage,
        texts=len(texts),
    )


def decode(
    prepared: PreparedRequest[bool], outputs: Sequence[HeadOutputs], context: TaskContext
) -> SparseVectors:
    """Return the words of each text, the heaviest first."""
    results = [output[sparse_embedding.HEAD.name] for output in outputs]
    if prepared.state:
        token = context.tokenizer.token_of
        return [[NamedSparseValue(i, v, token(i)) for i, v in _pairs(r)] for r in results]
    return [[SparseValue(i, v) for i, v in _pairs(result)] for result in results]


def _pairs(result: SparseEmbeddingResult) -> Sequence[tuple[int, float]]:
    weights = result.weights.astype(np.float32)
    return list(zip(result.ids.tolist(), weights.tolist(), strict=True))


TASK: Final = Task(
    name="embed-sparse",
    route="/embed_sparse",
    summary="The words of the vocabulary that a text is about, with weights",
    heads=(sparse_embedding.HEAD.name,),
    inputs=embed_inputs.Inputs,
    parameters=SparseParameters,
    result=SparseVectors,
    prepare=prepare,
    decode=decode,
    examples=(
        Example("One text", {"inputs": "What is deep learning?"}),
        Example(
            "The ten heaviest words, named",
            {"inputs": ["What is deep learning?"], "top_k": 10, "return_tokens": True},
        ),
    ),
)
