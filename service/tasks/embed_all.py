"""Token embeddings: one vector per token of a text.

Source: the route ``/embed_all`` of text-embeddings-inference.
"""

from collections.abc import Sequence
from typing import Final

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import token_embedding
from cloze.service.core import Float32, InvalidRequest
from cloze.service.tasks import embed
from cloze.service.tasks.task import Example, PreparedRequest, Task, TaskCall, TaskContext

_REQUEST: Final = {token_embedding.HEAD.name: token_embedding.TokenEmbeddingRequest()}


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[None]:
    """Tokenize the texts.

    Raises:
        InvalidRequest: see `embed.prepare`; or the texts have more tokens than a request may have
            results.
    """
    texts, names = embed.texts_and_names(call.inputs, context)
    encodings, truncated = embed.encode(texts, names, call.parameters, context, _REQUEST)
    tokens, most = sum(map(len, encodings)), context.limits.max_results
    if tokens > most:
        raise InvalidRequest(f"the request asks for {tokens} vectors; the limit is {most}")
    return PreparedRequest(encodings, None, results=tokens, truncated=truncated)


def decode(
    _: PreparedRequest[None], outputs: Sequence[HeadOutputs], __: TaskContext
) -> list[Float32]:
    """Return the vectors [S, H] float32 of each text, special tokens included."""
    return [output[token_embedding.HEAD.name].embeddings for output in outputs]


TASK: Final = Task(
    name="embed-all",
    route="/embed_all",
    summary="One vector per token of a text",
    heads=(token_embedding.HEAD.name,),
    inputs=embed.TASK.inputs,
    parameters=embed.TextParameters,
    result=list[list[list[float]]],
    prepare=prepare,
    decode=decode,
    examples=(Example("One text", {"inputs": "What is deep learning?"}),),
    vectors=True,
)
