"""Decoding of token ids: the texts that ids stand for. The task needs no head of a model."""

from typing import Annotated, Any, Final

from pydantic import Field

from cloze.service.abandonment import check_awaited
from cloze.service.core import EmptyRequest, InvalidRequest
from cloze.service.tasks.task import (
    INPUTS,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TokenIds,
    WireModel,
)

_IDS_PER_RESULT = 32
"""Number of ids whose decoding costs about as much as one prediction of a mask."""

_MOST_ID = 2**32 - 1
"""Largest id that the tokenizers library reads; it skips those outside the vocabulary."""

Ids = TokenIds | Annotated[list[TokenIds], NotEmpty]
"""The token ids of a text, or a list of such lists."""


class DecodeParameters(WireModel):
    """The parameters of text-embeddings-inference."""

    skip_special_tokens: bool = Field(True, description="whether to omit special tokens")


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[tuple[list[list[int]], bool]]:
    """Check the ids.

    Raises:
        EmptyRequest: a list is empty.
        InvalidRequest: there are too many lists or ids, or a number is no token id.
    """
    parameters: DecodeParameters = call.parameters
    limits, inputs = context.limits, call.inputs
    lists: list[list[int]] = inputs if inputs and isinstance(inputs[0], list) else [inputs]
    if len(lists) > (most := limits.max_request_texts):
        raise InvalidRequest(f"has {len(lists)} texts; the limit is {most}", INPUTS)
    if not all(lists):
        raise EmptyRequest("has an empty list; it needs at least 1 token id", INPUTS)
    if (count := sum(map(len, lists))) > (most := limits.max_results):
        raise InvalidRequest(f"has {count} token ids; the limit is {most}", INPUTS)
    low, high = min(map(min, lists)), max(map(max, lists))
    if low < 0 or high > _MOST_ID:
        raise InvalidRequest(
            f"has token ids from {low} to {high}; they are 0 to {_MOST_ID}", INPUTS
        )
    return PreparedRequest(
        [],
        (lists, parameters.skip_special_tokens),
        count // _IDS_PER_RESULT,
        texts=len(lists),
    )


def decode(
    prepared: PreparedRequest[tuple[list[list[int]], bool]], _: Any, context: TaskContext
) -> list[str]:
    """Return the text of each list of ids."""
    lists, skip = prepared.state
    texts = []
    for ids in lists:
        check_awaited()
        texts += context.tokenizer.decode([ids], skip_special_tokens=skip)
    return texts


TASK: Final = Task(
    name="decode",
    route="/decode",
    summary="The texts of token ids",
    heads=(),
    inputs=Ids,
    parameters=DecodeParameters,
    result=list[str],
    prepare=prepare,
    decode=decode,
    examples=(),
)
