"""Similarity: the cosine between the embedding of a text and those of other texts.

Source: huggingface_hub's ``sentence_similarity`` and the route of text-embeddings-inference.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import embedding
from cloze.service.core import EmptyRequest, InvalidRequest
from cloze.service.tasks import embed
from cloze.service.tasks.task import (
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


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[None]:
    """Tokenize the text, then the texts to compare with it.

    Raises:
        EmptyRequest: there is no sentence, or a text is empty.
        InvalidRequest: there are too many sentences, or a text cannot be embedded.
    """
    inputs: SimilarityInputs = call.inputs
    count, most = len(inputs.sentences), context.limits.max_request_texts - 1
    if not count:
        raise EmptyRequest("inputs.sentences is an empty list; it needs at least 1 text")
    if count > most:
        raise InvalidRequest(f"inputs.sentences has {count} texts; the limit is {most}")
    names = [f"inputs.sentences[{index}]" for index in range(count)]
    encodings, truncated = embed.encode(
        [inputs.source_sentence, *inputs.sentences],
        ["inputs.source_sentence", *names],
        call.parameters,
        context,
    )
    return PreparedRequest(encodings, None, truncated=truncated)


def decode(
    _: PreparedRequest[None], outputs: Sequence[HeadOutputs], __: TaskContext
) -> list[float]:
    """Return a cosine per sentence, in their order."""
    rows = [output[embedding.HEAD.name].embedding for output in outputs]
    vectors = embed.normalized(np.array(rows, np.float32))
    cosines: list[float] = (vectors[1:] @ vectors[0]).tolist()
    return cosines


TASK: Final = Task(
    name="similarity",
    route="/similarity",
    summary="How similar a text is to each of other texts: the cosine of their embeddings",
    heads=(embedding.HEAD.name,),
    inputs=SimilarityInputs,
    parameters=embed.TextParameters,
    result=list[float],
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
