"""Similarity: the cosine between the embedding of a text and those of other texts.

Source: huggingface_hub's ``sentence_similarity`` and the route of text-embeddings-inference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import embedding, token_embedding
from cloze.service.core import EmptyRequest, Float32, InvalidRequest, WrongTask
from cloze.service.tasks import embed, embed_inputs
from cloze.service.tasks.embed_inputs import Offsets, TextParameters
from cloze.service.tasks.task import (
    INPUTS,
    Example,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    Texts,
    WireModel,
)


class SimilarityInputs(WireModel):
    """A text, and the texts to compare with it."""

    source_sentence: Text
    sentences: Texts


class SimilarityParameters(TextParameters):
    """The fields of text-embeddings-inference, and one of our own."""

    details: bool | None = Field(
        None, description="whether to return the tokens that are most alike too"
    )


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A token of the source sentence, and the token of the other text that is most like it.

    Attributes:
        source, sentence: the characters of both tokens, (start, end).
        cosine: the cosine of the vectors of both tokens.
    """

    source: tuple[int, int]
    sentence: tuple[int, int]
    cosine: float


@dataclass(frozen=True, slots=True)
class DetailedSimilarity:
    """A cosine, and the pairs of tokens that are most alike, best first."""

    score: float
    pairs: list[TokenPair]


_PAIRS = 10
"""Most pairs of tokens per sentence in the result."""

_VECTORS: Final = {embedding.HEAD.name: embedding.EmbeddingRequest()}
_ALL_VECTORS: Final = _VECTORS | {
    token_embedding.HEAD.name: token_embedding.TokenEmbeddingRequest(),
}


_SENTENCES: Final = INPUTS.below("sentences")


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[list[Offsets] | None]:
    """Tokenize the text, then the texts to compare with it.

    Raises:
        EmptyRequest: there is no sentence, or a text is empty.
        InvalidRequest: there are too many sentences, or a text cannot be embedded; or details are
            asked for of more tokens than a request may have results.
        WrongTask: details are asked for of a model without vectors of tokens.
    """
    inputs: SimilarityInputs = call.inputs
    parameters: SimilarityParameters = call.parameters
    count, most = len(inputs.sentences), context.limits.max_request_texts - 1
    if not count:
        raise EmptyRequest("is an empty list; it needs at least 1 text", _SENTENCES)
    if count > most:
        raise InvalidRequest(f"has {count} texts; the limit is {most}", _SENTENCES)
    texts = [inputs.source_sentence, *inputs.sentences]
    names = [INPUTS.below("source_sentence"), *(_SENTENCES.below(n) for n in range(count))]
    if not parameters.details:
        encoded = embed_inputs.encode(texts, names, parameters, context, _VECTORS)
        return PreparedRequest(
            encoded.encodings,
            None,
            truncated=encoded.truncated,
            usage=encoded.usage,
            texts=len(texts),
        )
    _check_token_vectors(context)
    encoded = embed_inputs.encode(texts, names, parameters, context, _ALL_VECTORS)
    tokens, most = sum(map(len, encoded.encodings)), context.limits.max_results
    if tokens > most:
        raise InvalidRequest(f"details need {tokens} vectors; the limit is {most}")
    offsets = [
        embed_inputs.offsets(text, len(encoding), parameters, context)
        for text, encoding in zip(texts, encoded.encodings, strict=True)
    ]
    return PreparedRequest(
        encoded.encodings,
        offsets,
        tokens,
        encoded.truncated,
        usage=encoded.usage,
        texts=len(texts),
    )


def _check_token_vectors(context: TaskContext) -> None:
    heads = {head.name for head in context.manifest.graph_heads}
    if token_embedding.HEAD.name not in heads:
        name = context.manifest.reference
        task = token_embedding.HEAD.task
        raise WrongTask(f"details need vectors of tokens; export {name} with --task {task} too")


def decode(
    prepared: PreparedRequest[list[Offsets] | None],
    outputs: Sequence[HeadOutputs],
    _: TaskContext,
) -> list[float] | list[DetailedSimilarity]:
    """Return a cosine per sentence, in their order, with pairs of tokens if asked for."""
    rows = [output[embedding.HEAD.name].embedding for output in outputs]
    vectors = embed.normalized(np.array(rows, np.float32))
    cosines: list[float] = (vectors[1:] @ vectors[0]).tolist()
    if prepared.state is None:
        return cosines
    tokens = [embed.normalized(output[token_embedding.HEAD.name].embeddings) for output in outputs]
    source, *sentences = zip(tokens, prepared.state, strict=True)
    return [
        DetailedSimilarity(cosine, _pairs(source, sentence))
        for cosine, sentence in zip(cosines, sentences, strict=True)
    ]


_Tokens = tuple[Float32, Offsets]
"""The vectors [S, H] of a text's tokens, of length 1, and the places of the tokens."""


def _pairs(source: _Tokens, sentence: _Tokens) -> list[TokenPair]:
    """Return each token of a text with the most similar one of another, best first.

    Source: the late interaction of Khattab & Zaharia 2020, "ColBERT".
    """
    cosines = source[0] @ sentence[0].T  # [S, S']
    cosines[:, [place is None for place in sentence[1]]] = -np.inf
    best = cosines.argmax(1).tolist()
    pairs = [
        TokenPair(place, other, float(cosines[row, column]))
        for row, (place, column) in enumerate(zip(source[1], best, strict=True))
        if place is not None and (other := sentence[1][column]) is not None
    ]
    return sorted(pairs, key=lambda pair: -pair.cosine)[:_PAIRS]


TASK: Final = Task(
    name="similarity",
    route="/similarity",
    summary="How similar a text is to each of other texts: the cosine of their embeddings",
    heads=(embedding.HEAD.name,),
    inputs=SimilarityInputs,
    parameters=SimilarityParameters,
    result=list[float] | list[DetailedSimilarity],
    own_fields=("source_sentence",),
    prepare=prepare,
    decode=decode,
    examples=(
        Example(
            "A text and two others",
            {
                "inputs": {
                    "source_sentence": "The king was dead.",
                    "sentences": ["The old king died.", "A ship left the harbour."],
                }
            },
        ),
    ),
)
