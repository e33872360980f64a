"""Sparse embedding: the words of the vocabulary that a text is about, with weights.

The words are those that a masked-language model predicts, or for a model with lexical weights the
text's own tokens.

Sources: Formal et al. 2021, "SPLADE v2"; Chen et al. 2024, "BGE M3"; the route ``/embed_sparse`` of
text-embeddings-inference.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding
from cloze.model_store.embedding_space import words_recipe
from cloze.model_store.heads import HeadRequest, lexical, sparse_embedding
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest, SparseEmbeddingResult
from cloze.service.core import Float32
from cloze.service.errors import TooMany
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import CutTextParameters, EmbedInputs, encode_texts
from cloze.service.tasks.wire import Count, check_range

_WORDS_PER_RESULT = 16
"""Number of words that cost about as much as one prediction of a mask, in time and memory."""


class SparseParameters(CutTextParameters):
    """The fields of text-embeddings-inference, and two of our own."""

    top_k: Count | None = Field(None, description="most words per text")
    return_tokens: bool | None = Field(None, description="whether to add the word itself")


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


class _State(NamedTuple):
    """How the outputs become words; a model with lexical weights needs the encodings."""

    with_tokens: bool
    top_k: int
    encodings: list[Encoding] | None = None


def prepare(
    inputs: Any, parameters: SparseParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the texts."""
    texts = context.limits.checked(inputs)
    largest = min(context.limits.max_top_k, context.tokenizer.vocab_size)
    top_k = largest if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, largest, "top_k")
    if parameters.top_k is not None:
        context.limits.check_results(len(texts) * top_k, "the request asks for", "words")
    is_lexical = lexical.HEAD.name in context.manifest.heads
    rule, prompt = parameters.rule(report=parameters.return_usage), parameters.prompt(context)
    requests = {lexical.HEAD.name: HeadRequest()} if is_lexical else {}
    encoder = encode_texts(texts, rule, context, requests, prompt)
    recipe = words_recipe(context.manifest, prompt)
    prepared = encoder.prepared(_State(bool(parameters.return_tokens), top_k), recipe)
    if is_lexical:
        return prepared._replace(state=prepared.state._replace(encodings=prepared.encodings))
    for encoding in prepared.encodings:
        request = SparseEmbeddingRequest(len(encoding), top_k)
        encoding.requests = {sparse_embedding.HEAD.name: request}
    return prepared


def decode(state: _State, outputs: Outputs, context: TaskContext) -> SparseVectors:
    """Return the words of each text, the heaviest first."""
    if state.encodings is None:
        results: list[SparseEmbeddingResult] = [o[sparse_embedding.HEAD.name] for o in outputs]
    else:
        options = context.manifest.heads[lexical.HEAD.name]
        assert isinstance(options, lexical.LexicalOptions)  # the manifest's parser made it
        results = [
            _of_own_tokens(encoding, output[lexical.HEAD.name].array[:, 0], options, state.top_k)
            for encoding, output in zip(state.encodings, outputs, strict=True)
        ]
    words = sum(len(result.ids) for result in results)  # known only after the run
    if words > (most := _WORDS_PER_RESULT * context.limits.max_results):
        problem = f"the texts have {words} words; the limit is {most}; send fewer texts, or top_k"
        raise TooMany(problem)
    pairs = [
        zip(result.ids.tolist(), result.weights.astype(np.float32).tolist(), strict=True)
        for result in results
    ]
    if state.with_tokens:
        token = context.tokenizer.token_of
        return [[NamedSparseValue(i, weight, token(i)) for i, weight in text] for text in pairs]
    return [[SparseValue(i, weight) for i, weight in text] for text in pairs]


def _of_own_tokens(
    encoding: Encoding, weights: Float32, options: lexical.LexicalOptions, top_k: int
) -> SparseEmbeddingResult:
    """Return the largest weight of each id among a text's tokens, the heaviest first.

    Ids of special tokens, and those without a weight, are left out.
    """
    ids, places = np.unique(encoding.input_ids, return_inverse=True)
    largest = np.zeros(len(ids), np.float32)
    np.maximum.at(largest, places, weights)
    largest[np.isin(ids, options.skipped_ids)] = 0
    order = np.argsort(-largest, kind="stable")[: min(top_k, np.count_nonzero(largest))]
    return SparseEmbeddingResult(largest[order], ids[order].astype(np.int64))


TASK: Final = Task(
    name="embed-sparse",
    route="/embed_sparse",
    summary="The words of the vocabulary that a text is about, with weights",
    heads=(sparse_embedding.HEAD.name,),
    other_heads=(lexical.HEAD.name,),
    inputs=EmbedInputs,
    parameters=SparseParameters,
    result=SparseVectors,
    prepare=prepare,
    decode=decode,
    examples={
        "One text": {"inputs": "What is deep learning?"},
        "The heaviest words, named": {"inputs": "A cat.", "top_k": 10, "return_tokens": True},
    },
)
