"""Similarity: the cosine between the embedding of a text and those of other texts.

Source: huggingface_hub's ``sentence_similarity`` and the route of text-embeddings-inference.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import Field

from cloze.model_store.heads import HeadRequest, embedding, token_embedding
from cloze.service.core import Float32
from cloze.service.tasks.task import INPUTS, Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import CutTextParameters, Offsets, encode_texts
from cloze.service.tasks.wire import Text, Texts, WireModel


class SimilarityInputs(WireModel):
    """A text, and the texts to compare with it."""

    source_sentence: Text
    sentences: Texts


class SimilarityParameters(CutTextParameters):
    """The fields of text-embeddings-inference, and one of our own."""

    details: bool | None = Field(None, description="whether to add the tokens most alike")


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


VECTORS: Final = {embedding.HEAD.name: HeadRequest()}
_ALL_VECTORS: Final = VECTORS | {token_embedding.HEAD.name: HeadRequest()}
_LEAST_LENGTH: Final = np.float32(1e-24)
"""What the product of two lengths is taken for, if the product is less."""


def prepare(
    inputs: SimilarityInputs, parameters: SimilarityParameters, context: TaskContext
) -> PreparedRequest[Any]:
    """Tokenize the text, then the texts to compare with it."""
    texts = context.limits.checked(inputs.source_sentence, INPUTS.below("source_sentence"))
    texts += context.limits.checked(inputs.sentences, INPUTS.below("sentences"), others=1)
    rule, prompt = parameters.rule(report=parameters.return_usage), parameters.prompt(context)
    if not parameters.details:
        return encode_texts(texts, rule, context, VECTORS, prompt).prepared(None)
    context.check_head(token_embedding.HEAD, "details need vectors of tokens")
    encoder = encode_texts(texts, rule, context, _ALL_VECTORS, prompt)
    context.limits.check_results(encoder.tokens, "details need", "vectors")
    return encoder.prepared(encoder.offsets(texts))


def decode(
    offsets: list[Offsets] | None, outputs: Outputs, _: TaskContext
) -> list[float] | list[DetailedSimilarity]:
    """Return a cosine per sentence, in their order, with pairs of tokens if asked for."""
    scores = cosines_to_first(outputs)
    if offsets is None:
        return scores
    tokens = [output[token_embedding.HEAD.name].array for output in outputs]
    source, *sentences = zip(tokens, offsets, strict=True)
    return [
        DetailedSimilarity(score, _pairs(source, sentence))
        for score, sentence in zip(scores, sentences, strict=True)
    ]


def cosines_to_first(outputs: Outputs) -> list[float]:
    """Return the cosine of the first text's embedding with that of each other text."""
    vectors = np.array([output[embedding.HEAD.name].array for output in outputs], np.float32)
    cosines: list[float] = _cosines(vectors[1:], vectors[:1])[:, 0].tolist()
    return cosines


def _cosines(rows: Float32, columns: Float32) -> Float32:
    """Return the cosines [n, m] of vectors [n, D] and vectors [m, D]."""
    lengths = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(columns, axis=1)
    cosines: Float32 = (rows @ columns.T) / np.maximum(lengths, _LEAST_LENGTH)
    return cosines


def _pairs(source: tuple[Float32, Offsets], sentence: tuple[Float32, Offsets]) -> list[TokenPair]:
    """Return tokens of a text with the most similar one of another, the ten best first.

    A text is the vectors [S, H] of its tokens, and their places. Source: the late interaction of
    Khattab & Zaharia 2020, "ColBERT".
    """
    cosines = _cosines(source[0], sentence[0])  # [S, S']
    cosines[:, [place is None for place in sentence[1]]] = -np.inf
    best = cosines.argmax(1).tolist()
    pairs = [
        TokenPair(place, other, float(cosines[row, column]))
        for row, (place, column) in enumerate(zip(source[1], best, strict=True))
        if place is not None and (other := sentence[1][column]) is not None
    ]
    return sorted(pairs, key=lambda pair: -pair.cosine)[:10]


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
            "inputs": {"source_sentence": "The king died.", "sentences": ["He is dead.", "A ship."]}
        }
    },
)
