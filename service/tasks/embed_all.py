"""Token embeddings: one vector per token of a text.

Source: the route ``/embed_all`` of text-embeddings-inference.
"""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from cloze.model_store.embedding_space import VectorRecipe
from cloze.model_store.heads import HeadRequest, token_embedding
from cloze.service.core import Float32, InvalidRequest
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import EmbedInputs, Offsets, TextParameters, encode_texts, offsets

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


def prepare(
    inputs: Any, parameters: TokenParameters, context: TaskContext
) -> PreparedRequest[list[Offsets] | None]:
    """Tokenize the texts."""
    texts = context.limits.listed(inputs)
    for at, text in texts:
        if parameters.return_offsets and not isinstance(text, str):
            raise InvalidRequest("is a list of token ids, which have no offsets", at)
    encoder = encode_texts(texts, parameters, context, _REQUEST)
    tokens = sum(map(len, encoder.encodings))
    context.limits.check_results(tokens, "the request asks for", "vectors")
    places = offsets(texts, encoder, parameters) if parameters.return_offsets else None
    recipe = VectorRecipe(
        "tokens",
        normalize=False,
        dimensions=context.manifest.architecture.hidden_size,
        prompt=parameters.prompt(context),
    )
    return encoder.prepared(places, tokens)._replace(vectors=recipe)


def decode(
    offsets: list[Offsets] | None, outputs: Outputs, _: TaskContext
) -> list[Float32] | list[TokenVectors]:
    """Return the vectors [S, H] float32 of each text, special tokens included."""
    vectors = [output[token_embedding.HEAD.name].array for output in outputs]
    if offsets is None:
        return vectors
    return [TokenVectors(*pair) for pair in zip(vectors, offsets, strict=True)]


TASK: Final = Task(
    name="embed-all",
    route="/embed_all",
    summary="One vector per token of a text",
    heads=(token_embedding.HEAD.name,),
    inputs=EmbedInputs,
    parameters=TokenParameters,
    result=list[list[list[float]]] | list[TokenVectors],
    prepare=prepare,
    decode=decode,
    examples={
        "One text": {"inputs": "What is deep learning?"},
        "With the place of each token": {
            "inputs": "What is deep learning?",
            "return_offsets": True,
        },
    },
    vectors=True,
)
