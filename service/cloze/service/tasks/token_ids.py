"""Tokens of texts, and texts of token ids. Both tasks need no head of a model."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cloze.service.errors import EmptyRequest, InvalidRequest, TooMany
from cloze.service.tasks.task import INPUTS, UP_TO, PreparedRequest, Task, TaskContext
from cloze.service.tasks.wire import NotEmpty, Text, Texts, TokenIds, WireModel
from cloze.service.text.tokenizer import Spans
from cloze.service.threads import check_awaited

_MOST_ID = 2**32 - 1
"""Largest id that the tokenizers library reads; it skips those outside the vocabulary."""


class TokenizeParameters(WireModel):
    """The parameters of text-embeddings-inference."""

    add_special_tokens: bool = Field(True, description="whether to add the tokens around a text")
    prompt_name: str | None = Field(None, description="name of a prompt to put before each text")


@dataclass(frozen=True, slots=True)
class Token:
    """A token; ``start`` and ``stop`` are in bytes of the text, and null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class _Tokenized(NamedTuple):
    """The texts after their prompt with their tokens, and the special tokens around each text."""

    texts: list[tuple[str, Spans]]
    around: tuple[Token, ...]


def prepare_texts(
    inputs: Any, parameters: TokenizeParameters, context: TaskContext
) -> PreparedRequest[_Tokenized]:
    """Tokenize the texts."""
    limits, tokenizer = context.limits, context.tokenizer
    prompt, special = context.prompt(parameters.prompt_name), tokenizer.special
    around = tuple(
        Token(token, tokenizer.token_of(token), True, None, None)
        for token in ((special.cls, special.sep) if parameters.add_special_tokens else ())
    )
    texts: list[tuple[str, Spans]] = []
    tokens = 0
    for at, text in limits.checked(inputs):
        check_awaited()
        spans = tokenizer.spans(prompt + text, limits.max_results - tokens)
        tokens += len(spans.ids) + len(around)
        if tokens > limits.max_results:
            verb, lead = ("have", f"the texts {UP_TO}") if texts else ("has", "")
            problem = f"{verb} at least {tokens} tokens; the limit is {limits.max_results}"
            raise TooMany(problem, at, lead)
        texts.append((prompt + text, spans))
    return PreparedRequest([], _Tokenized(texts, around), texts=len(texts), others=tokens)


def decode_texts(state: _Tokenized, _: Any, __: TaskContext) -> list[list[Token]]:
    """Return the tokens of each text."""
    results = []
    for text, spans in state.texts:
        check_awaited()
        ends = byte_ends(text).tolist()
        tokens = [
            Token(token_id, text[start:end], False, ends[start], ends[end])
            for token_id, (start, end) in zip(spans.ids, spans.offsets(), strict=True)
        ]
        results.append([*state.around[:1], *tokens, *state.around[1:]])
    return results


def byte_ends(text: str) -> NDArray[np.int64]:
    """Return the number of bytes in UTF-8 before each character, and of the whole text [n + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ends = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000), out=ends[1:])
    return ends


TOKENIZE: Final = Task(
    name="tokenize",
    route="/tokenize",
    summary="The tokens of texts",
    heads=(),
    inputs=Annotated[Text | Texts, Field(description="a text or a list of texts")],
    parameters=TokenizeParameters,
    result=list[list[Token]],
    needs_thread=lambda _: True,  # each text may have a long prompt, and each token is an object
    prepare=prepare_texts,
    decode=decode_texts,
)


class DecodeParameters(WireModel):
    """The parameters of text-embeddings-inference."""

    skip_special_tokens: bool = Field(True, description="whether to omit special tokens")


def prepare_ids(
    inputs: Any, parameters: DecodeParameters, context: TaskContext
) -> PreparedRequest[Any]:
    """Check the ids; the state is the ids of each text, and whether to omit special tokens."""
    limits = context.limits
    lists: list[list[int]] = inputs if inputs and isinstance(inputs[0], list) else [inputs]
    limits.checked(lists)
    if not all(lists):
        raise EmptyRequest("has an empty list; it needs at least 1 token id", INPUTS)
    if (count := sum(map(len, lists))) > (most := limits.max_results):
        raise TooMany(f"has {count} token ids; the limit is {most}", INPUTS)
    low, high = min(map(min, lists)), max(map(max, lists))
    if low < 0 or high > _MOST_ID:
        problem = f"has token ids from {low} to {high}; they are 0 to {_MOST_ID}"
        raise InvalidRequest(problem, INPUTS)
    return PreparedRequest([], (lists, parameters.skip_special_tokens), texts=len(lists))


def decode_ids(state: tuple[list[list[int]], bool], _: Any, context: TaskContext) -> list[str]:
    """Return the text of each list of ids."""
    lists, skip = state
    texts = []
    for ids in lists:
        check_awaited()
        texts += context.tokenizer.decode([ids], skip_special_tokens=skip)
    return texts


DECODE: Final = Task(
    name="decode",
    route="/decode",
    summary="The texts of token ids",
    heads=(),
    inputs=TokenIds | Annotated[list[TokenIds], NotEmpty],
    parameters=DecodeParameters,
    result=list[str],
    prepare=prepare_ids,
    decode=decode_ids,
)
