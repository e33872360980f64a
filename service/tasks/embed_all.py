"""Token embeddings: one vector per token of a text.

Source: the route ``/embed_all`` of text-embeddings-inference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import HeadRequest, token_embedding
from cloze.service.core import Float32, InvalidRequest
from cloze.service.tasks import embed_inputs
from cloze.service.tasks.embed_inputs import Offsets, TextParameters
from cloze.service.tasks.task import (
    Example,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    check_results,
    listed,
)

_REQUEST: Final = {token_embedding.HEAD.name: HeadRequest()}


class TokenParameters(TextParameters):
    """The fields of text-embeddings-inference, and one of our own."""

    return_offsets: bool | None = Field(
        None, description="whether to add the place of each token in its text; the answer is JSON"
    )


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """The vectors of a text's tokens, special tokens included, and their places.

    Attributes:
        embeddings: [S][H].
        offsets: (start, end) in characters; null for special tokens and those of a prompt.
    """

    embeddings: list[list[float]]
    offsets: Offsets


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[list[Offsets] | None]:
    """Tokenize the texts.

    Raises:
        InvalidRequest: see `embed_inputs.encode`; or the texts have more tokens than a request may
            have results, or offsets are asked for of token ids.
    """
    parameters: TokenParameters = call.parameters
    texts = listed(call.inputs, context.limits)
    for at, text in texts:
        if parameters.return_offsets and not isinstance(text, str):
            raise InvalidRequest("is a list of token ids, which have no offsets", at)
    encoded = embed_inputs.encode(texts, parameters, context, _REQUEST)
    tokens = sum(map(len, encoded.encodings))
    check_results(tokens, "the request asks for", context.limits, "vectors")
    offsets = None
    if parameters.return_offsets:
        offsets = [
            embed_inputs.offsets(str(text), len(encoding), parameters, context)
            for (_, text), encoding in zip(texts, encoded.encodings, strict=True)
        ]
    return encoded.prepared(offsets, tokens)


def decode(
    prepared: PreparedRequest[list[Offsets] | None],
    outputs: Sequence[HeadOutputs],
    _: TaskContext,
) -> list[Float32] | list[TokenVectors]:
    """Return the vectors [S, H] float32 of each text, special tokens included."""
    vectors = [output[token_embedding.HEAD.name].array for output in outputs]
    if prepared.state is None:
        return vectors
    return [TokenVectors(*pair) for pair in zip(vectors, prepared.state, strict=True)]


TASK: Final = Task(
    name="embed-all",
    route="/embed_all",
    summary="One vector per token of a text",
    heads=(token_embedding.HEAD.name,),
    inputs=embed_inputs.Inputs,
    parameters=TokenParameters,
    result=list[list[list[float]]] | list[TokenVectors],
    prepare=prepare,
    decode=decode,
    examples=(
        Example("One text", {"inputs": "What is deep learning?"}),
        Example(
            "With the place of each token",
            {"inputs": "What is deep learning?", "return_offsets": True},
        ),
    ),
    vectors=True,
)
