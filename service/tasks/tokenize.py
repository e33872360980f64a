"""Tokenization: the tokens of texts, with their places. The task needs no head of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cloze.service.abandonment import check_awaited
from cloze.service.core import InvalidRequest
from cloze.service.tasks import embed_inputs
from cloze.service.tasks.task import (
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    Texts,
    WireModel,
    check_text,
    input_name,
    listed,
)
from cloze.service.tokenizer import Tokenizer

_TOKENS_PER_RESULT = 8
"""Number of tokens whose writing costs about as much as one prediction of a mask."""

_PART_TOKENS = 1024
"""Most tokens of a part in which a long text's tokens are written; a part takes about 1 ms."""


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
        before, after: the special tokens around the text.
    """

    text: str
    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    before: tuple[Token, ...]
    after: tuple[Token, ...]

    def parts(self) -> Iterator[list[Token]]:
        """Yield the tokens in order, at most `_PART_TOKENS` at once."""
        if self.before:
            yield list(self.before)
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
        if self.after:
            yield list(self.after)


def _byte_ends(text: str) -> NDArray[np.int64]:
    """Return the number of bytes in UTF-8 before each character, and of the whole text [n + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ends = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000), out=ends[1:])
    return ends


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[list[TokenizedText]]:
    """Tokenize the texts.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: the texts have more tokens than a request may have results, a text is too
            long, or the prompt is unknown.
    """
    parameters: TokenizeParameters = call.parameters
    limits, tokenizer = context.limits, context.tokenizer
    texts, many = listed(call.inputs, limits), isinstance(call.inputs, list)
    for index, text in enumerate(texts):
        check_text(text, input_name(index, many=many), limits)
    prompt = embed_inputs.prompt_of(context, parameters.prompt_name)
    before = (_special(tokenizer, tokenizer.special.cls),) if parameters.add_special_tokens else ()
    after = (_special(tokenizer, tokenizer.special.sep),) if parameters.add_special_tokens else ()
    tokenized, tokens = [], 0
    for index, text in enumerate(texts):
        check_awaited()
        spans = tokenizer.spans(prompt + text, limits.max_results - tokens)
        tokens += len(spans.ids) + len(before) + len(after)
        if tokens > limits.max_results:
            texts_so_far = "inputs has"
            if index:
                texts_so_far = f"the texts up to {input_name(index, many=many)} have"
            raise InvalidRequest(
                f"{texts_so_far} at least {tokens} tokens; the limit is {limits.max_results}"
            )
        ids = np.array(spans.ids, np.int32)
        offsets = np.array(spans.offsets, np.int32).reshape(-1, 2)
        tokenized.append(TokenizedText(prompt + text, ids, offsets, before, after))
    return PreparedRequest([], tokenized, tokens // _TOKENS_PER_RESULT, texts=len(tokenized))


def _special(tokenizer: Tokenizer, token_id: int) -> Token:
    return Token(token_id, tokenizer.token_of(token_id), True, None, None)


def decode(
    prepared: PreparedRequest[list[TokenizedText]], _: Any, __: TaskContext
) -> list[TokenizedText]:
    """Return the tokens of each text."""
    return prepared.state


TASK: Final = Task(
    name="tokenize",
    route="/tokenize",
    summary="The tokens of texts",
    heads=(),
    inputs=Annotated[Text | Texts, Field(description="a text or a list of texts")],
    parameters=TokenizeParameters,
    result=list[list[Token]],
    prepare=prepare,
    decode=decode,
    examples=(),
)
