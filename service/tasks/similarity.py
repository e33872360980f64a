"""Similarity: the cosine between the embedding of a text and those of other texts.

Source: huggingface_hub's ``sentence_similarity`` and the route of text-embeddings-inference.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import Field

from cloze.model_store.heads import HeadRequest, embedding, token_embedding
from cloze.model_store.manifest import Role
from cloze.service.core import Float32
from cloze.service.tasks.embed import normalized
from cloze.service.tasks.task import (
    INPUTS,
    Outputs,
    PreparedRequest,
    Task,
    TaskContext,
    Text,
    Texts,
    WireModel,
)
from cloze.service.tasks.texts import CutTextParameters, Offsets, encode_texts, offsets


class SimilarityInputs(WireModel):
    """A text, and the texts to compare with it."""

    source_sentence: Text
    sentences: Texts


class SimilarityParameters(CutTextParameters):
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

_VECTORS: Final = {embedding.HEAD.name: HeadRequest()}
_ALL_VECTORS: Final = _VECTORS | {token_embedding.HEAD.name: HeadRequest()}
_SENTENCES: Final = INPUTS.below("sentences")


def prepare(
    inputs: SimilarityInputs,
    parameters: SimilarityParameters,
    context: TaskContext,
    *,
    in_roles: bool = False,
) -> PreparedRequest[Any]:
    """Tokenize the text, then the texts to compare with it.

    In roles, the text is a query and the others are documents, each with the prompt of its role.
    """
    context.limits.check_count(len(inputs.sentences), _SENTENCES, others=1)
    texts = [(INPUTS.below("source_sentence"), inputs.source_sentence)]
    texts += [(_SENTENCES.below(n), text) for n, text in enumerate(inputs.sentences)]
    for at, text in texts:
        context.limits.check_text(text, at)
    prompts = None
    if in_roles:
        query, document = context.prompt_of(Role.QUERY), context.prompt_of(Role.DOCUMENT)
        prompts = [query, *[document] * len(inputs.sentences)]
    if not parameters.details:
        return encode_texts(texts, parameters, context, _VECTORS, prompts).prepared(None)
    context.check_head(token_embedding.HEAD, "details need vectors of tokens")
    encoder = encode_texts(texts, parameters, context, _ALL_VECTORS)
    tokens = sum(map(len, encoder.encodings))
    context.limits.check_results(tokens, "details need", "vectors")
    return encoder.prepared(offsets(texts, encoder, parameters))


def decode(
    offsets: list[Offsets] | None, outputs: Outputs, _: TaskContext
) -> list[float] | list[DetailedSimilarity]:
    """Return a cosine per sentence, in their order, with pairs of tokens if asked for."""
    rows = [output[embedding.HEAD.name].array for output in outputs]
    vectors = normalized(np.array(rows, np.float32))
    cosines: list[float] = (vectors[1:] @ vectors[0]).tolist()
    if offsets is None:
        return cosines
    tokens = [normalized(output[token_embedding.HEAD.name].array) for output in outputs]
    source, *sentences = zip(tokens, offsets, strict=True)
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
    scores=lambda *_: "cosine",
    examples={
        "A text and two others": {
            "inputs": {
                "source_sentence": "The king was dead.",
                "sentences": ["The old king died.", "A ship left the harbour."],
            }
        }
    },
)
