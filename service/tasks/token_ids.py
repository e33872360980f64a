"""Tokens of texts, and texts of token ids. Both tasks need no head of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cloze.service.core import EmptyRequest, InvalidRequest
from cloze.service.tasks.task import (
    INPUTS,
    UP_TO,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskContext,
    Text,
    Texts,
    TokenIds,
    WireModel,
)
from cloze.service.threads import check_awaited

_PART_TOKENS = 1024
"""Most tokens of a part in which a long text's tokens are written; a part takes about 1 ms."""

_MOST_ID = 2**32 - 1
"""Largest id that the tokenizers library reads; it skips those outside the vocabulary."""


# ---- texts to tokens -----------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text, which take less memory here than as a list of `Token`.

    Attributes:
        text: the text, after its prompt.
        ids: vocabulary ids [n] int32, without special tokens.
        offsets: (start, end) of each token [n, 2] int32, in characters of the text.
        around: the special tokens before and after the text, if there are any.
    """

    text: str
    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    around: tuple[Token, ...]

    def parts(self) -> Iterator[list[Token]]:
        """Yield the tokens in order, at most `_PART_TOKENS` at once."""
        if self.around:
            yield [self.around[0]]
        ends = _byte_ends(self.text)
        for first in range(0, len(self.ids), _PART_TOKENS):
            check_awaited()
            part = slice(first, first + _PART_TOKENS)
            offsets = self.offsets[part]
            rows = zip(
                self.ids[part].tolist(), offsets.tolist(), ends[offsets].tolist(), strict=True
            )
            yield [
                Token(token_id, self.text[start:end], False, *in_bytes)
                for token_id, (start, end), in_bytes in rows
            ]
        if self.around:
            yield [self.around[1]]


def _byte_ends(text: str) -> NDArray[np.int64]:
    """Return the number of bytes in UTF-8 before each character, and of the whole text [n + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ends = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000), out=ends[1:])
    return ends


def prepare_texts(
    inputs: Any, parameters: TokenizeParameters, context: TaskContext
) -> PreparedRequest[list[TokenizedText]]:
    """Tokenize the texts."""
    limits, tokenizer = context.limits, context.tokenizer
    texts = limits.listed(inputs)
    prompt = context.prompt(parameters.prompt_name)
    special = tokenizer.special
    around = tuple(
        Token(token, tokenizer.token_of(token), True, None, None)
        for token in ((special.cls, special.sep) if parameters.add_special_tokens else ())
    )
    tokenized: list[TokenizedText] = []
    tokens = 0
    for at, text in texts:
        check_awaited()
        spans = tokenizer.spans(prompt + text, limits.max_results - tokens)
        tokens += len(spans.ids) + len(around)
        if tokens > limits.max_results:
            problem = f"at least {tokens} tokens; the limit is {limits.max_results}"
            if tokenized:
                raise InvalidRequest(f"have {problem}", at, f"the texts {UP_TO}")
            raise InvalidRequest(f"has {problem}", INPUTS)
        ids = np.array(spans.ids, np.int32)
        offsets = np.array(spans.offsets, np.int32).reshape(-1, 2)
        tokenized.append(TokenizedText(prompt + text, ids, offsets, around))
    return PreparedRequest([], tokenized, texts=len(tokenized), others=tokens)


TOKENIZE: Final = Task(
    name="tokenize",
    route="/tokenize",
    summary="The tokens of texts",
    heads=(),
    inputs=Annotated[Text | Texts, Field(description="a text or a list of texts")],
    parameters=TokenizeParameters,
    result=list[list[Token]],
    takes_long=lambda _: True,  # each text may have a long prompt, and each token is an object
    prepare=prepare_texts,
    decode=lambda texts, _outputs, _context: texts,
)


# ---- token ids to texts --------------------------------------------------------------------------


class DecodeParameters(WireModel):
    """The parameters of text-embeddings-inference."""

    skip_special_tokens: bool = Field(True, description="whether to omit special tokens")


_Ids = tuple[list[list[int]], bool]
"""The ids of each text, and whether to omit special tokens."""


def prepare_ids(
    inputs: Any, parameters: DecodeParameters, context: TaskContext
) -> PreparedRequest[_Ids]:
    """Check the ids."""
    limits = context.limits
    lists: list[list[int]] = inputs if inputs and isinstance(inputs[0], list) else [inputs]
    limits.check_count(len(lists), INPUTS)
    if not all(lists):
        raise EmptyRequest("has an empty list; it needs at least 1 token id", INPUTS)
    if (count := sum(map(len, lists))) > (most := limits.max_results):
        raise InvalidRequest(f"has {count} token ids; the limit is {most}", INPUTS)
    low, high = min(map(min, lists)), max(map(max, lists))
    if low < 0 or high > _MOST_ID:
        raise InvalidRequest(
            f"has token ids from {low} to {high}; they are 0 to {_MOST_ID}", INPUTS
        )
    state = lists, parameters.skip_special_tokens
    return PreparedRequest([], state, texts=len(lists))


def decode_ids(state: _Ids, _: Any, context: TaskContext) -> list[str]:
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
