"""Long texts: whether to refuse, cut or divide them, and how much of each text was used."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.task import TaskLimits, WireModel
from cloze.service.tasks.windows import window_count, windows

LongText = Literal["error", "truncate", "window"]

_OVERLAP = 4
"""Neighbouring windows share this part of a window: a quarter."""


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class UsageParameters(WireModel):
    """Whether to report how much of each text was used."""

    return_usage: bool | None = Field(
        None,
        description="whether to return {result, usage}: with the result, the tokens of each input, "
        "how many of them the model read, and its windows; the answer is JSON",
    )


class TruncationParameters(WireModel):
    """What to do with a text that is too long for the model."""

    truncate: bool | None = Field(
        None, description="true cuts a long text, false refuses the text; the default is true"
    )
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(_lower)] = (
        Field(None, description="the end of a long text to cut; the default is right")
    )
    long_text: Literal["error", "truncate"] | None = Field(
        None, description="error refuses a long text, truncate cuts it; the default is truncate"
    )

    @property
    def keep_end(self) -> bool:
        """Whether to cut the start of a long text."""
        return self.truncation_direction == "left"

    @property
    def choice(self) -> LongText:
        """What to do with a long text.

        Raises:
            InvalidRequest: ``truncate`` and ``long_text`` contradict each other.
        """
        if self.long_text is None:
            return "error" if self.truncate is False else "truncate"
        if self.truncate is not None and self.long_text == (
            "error" if self.truncate else "truncate"
        ):
            given = str(self.truncate).lower()
            raise InvalidRequest(
                f"truncate {given} contradicts long_text {self.long_text}; leave out one of them"
            )
        return self.long_text

    def check_cut(self, name: Location, tokens: int, max_tokens: int) -> None:
        """Check that a long text may be cut.

        Args:
            name: name of the text in errors.
            tokens: number of its tokens, special tokens included.
            max_tokens: most tokens that the model reads.

        Raises:
            InvalidRequest: long texts are refused.
        """
        if self.choice == "error":
            asked = "truncate is false" if self.long_text is None else "long_text is error"
            raise too_long(name, tokens, max_tokens, asked)


def too_long(name: Location, tokens: int, max_tokens: int, asked: str) -> InvalidRequest:
    """Return the error for a text that is not to be cut.

    Args:
        name: name of the text in errors.
        tokens: number of its tokens, special tokens included.
        max_tokens: most tokens that the model reads.
        asked: the parameter that asks for the error.
    """
    return InvalidRequest(f"has {tokens} tokens; the model reads {max_tokens}, and {asked}", name)


class WindowBudget:
    """Divides the texts of one request into windows, within the tokens that a request may have."""

    def __init__(self, limits: TaskLimits) -> None:
        self._most = limits.max_request_tokens
        self._tokens = 0

    def divide(
        self, tokens: int, window_tokens: int, name: Location, stride: int | None = None
    ) -> list[tuple[int, int]]:
        """Return the bounds of a text's windows; see `windows`.

        Args:
            tokens: tokens of the text, without special tokens.
            window_tokens: most tokens per window, without special tokens.
            name: name of the text in errors.
            stride: tokens that neighbouring windows share; None: a quarter of a window.

        Raises:
            InvalidRequest: the windows hold more tokens than a request may have.
        """
        stride = window_tokens // _OVERLAP if stride is None else stride
        self._tokens += window_count(tokens, window_tokens, stride) * (window_tokens + 2)
        if self._tokens > self._most:
            raise InvalidRequest(
                f"up to {name} the windows hold {self._tokens} tokens; the limit of a request is "
                f"{self._most}"
            )
        return windows(tokens, window_tokens, stride)


def characters(
    bounds: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the (start, end) characters of windows.

    Args:
        bounds: the (first, end) tokens of each window.
        offsets: the (start, end) characters of each token.
    """
    return [(offsets[first][0], offsets[end - 1][1]) for first, end in bounds]
