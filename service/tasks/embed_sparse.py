"""Sparse embedding: the words of the vocabulary that a text is about, with weights.

Source: Formal et al. 2021, "SPLADE v2"; the route ``/embed_sparse`` of text-embeddings-inference.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import Field

from cloze.model_store.embedding_space import VectorRecipe
from cloze.model_store.heads import sparse_embedding
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest, SparseEmbeddingResult
from cloze.service.tasks.task import Count, Outputs, PreparedRequest, Task, TaskContext, check_range
from cloze.service.tasks.texts import EmbedInputs, TextParameters, encode_texts


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
class NamedSparseValue(SparseValue):
    """A word of the vocabulary by its index and as a token, and its weight."""

    token: str


SparseVectors = list[list[SparseValue]] | list[list[NamedSparseValue]]


def prepare(
    inputs: Any, parameters: SparseParameters, context: TaskContext
) -> PreparedRequest[bool]:
    """Tokenize the texts."""
    texts = context.limits.listed(inputs)
    largest = min(context.limits.max_top_k, context.tokenizer.vocab_size)
    top_k = largest if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, largest, "top_k")
    if parameters.top_k is not None:
        context.limits.check_results(len(texts) * top_k, "the request asks for", "words")
    encoder = encode_texts(texts, parameters, context, None)
    for encoding in encoder.encodings:
        request = SparseEmbeddingRequest(len(encoding), top_k)
        encoding.requests = {sparse_embedding.HEAD.name: request}
    vocabulary = context.tokenizer.vocab_size
    recipe = VectorRecipe(
        "sparse", normalize=False, dimensions=vocabulary, prompt=parameters.prompt(context)
    )
    prepared = encoder.prepared(bool(parameters.return_tokens), len(texts) * top_k)
    return prepared._replace(vectors=recipe)


def decode(with_tokens: bool, outputs: Outputs, context: TaskContext) -> SparseVectors:
    """Return the words of each text, the heaviest first."""
    pairs = []
    for output in outputs:
        result: SparseEmbeddingResult = output[sparse_embedding.HEAD.name]
        weights = result.weights.astype(np.float32).tolist()
        pairs.append(zip(result.ids.tolist(), weights, strict=True))
    if with_tokens:
        token = context.tokenizer.token_of
        return [[NamedSparseValue(i, weight, token(i)) for i, weight in text] for text in pairs]
    return [[SparseValue(i, weight) for i, weight in text] for text in pairs]


TASK: Final = Task(
    name="embed-sparse",
    route="/embed_sparse",
    summary="The words of the vocabulary that a text is about, with weights",
    heads=(sparse_embedding.HEAD.name,),
    inputs=EmbedInputs,
    parameters=SparseParameters,
    result=SparseVectors,
    prepare=prepare,
    decode=decode,
    examples={
        "One text": {"inputs": "What is deep learning?"},
        "The ten heaviest words, named": {
            "inputs": ["What is deep learning?"],
            "top_k": 10,
            "return_tokens": True,
        },
    },
)
