"""Texts to encodings: long texts are refused, cut, or divided into overlapping windows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HeadRequest
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.task import (
    UP_TO,
    PreparedRequest,
    TaskContext,
    TaskLimits,
    TextUsage,
    WireModel,
)

LongText = Literal["error", "truncate", "window"]

Bounds = tuple[int, int]
"""The first token of a window, and the token after its last."""

S = TypeVar("S")

_REFUSED: Final = "long_text is error"

_OVERLAP: Final = 4
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

    def rule(self, *, report: bool | None = False) -> "LongTextRule":
        """Return what to do with long texts.

        Raises:
            InvalidRequest: ``truncate`` and ``long_text`` contradict each other.
        """
        keep_end = self.truncation_direction == "left"
        choice: LongText | None = self.long_text
        if choice is None:
            choice = "error" if self.truncate is False else "truncate"
            return LongTextRule(choice, "truncate is false", keep_end, report=bool(report))
        if self.truncate is not None and choice == ("error" if self.truncate else "truncate"):
            given = str(self.truncate).lower()
            raise InvalidRequest(
                f"truncate {given} contradicts long_text {choice}; leave out one of them"
            )
        return LongTextRule(choice, keep_end=keep_end, report=bool(report))


@dataclass(frozen=True, slots=True)
class LongTextRule:
    """What a request does with its long texts.

    Attributes:
        choice: whether to refuse, cut or divide them.
        refused_by: the parameter that refuses them, for the error.
        keep_end: whether to cut the start of a long text instead of its end.
        stride: tokens that neighbouring windows share; None: a quarter of a window.
        report: whether to report how much of each text was used.
    """

    choice: LongText
    refused_by: str = _REFUSED
    keep_end: bool = False
    stride: int | None = None
    report: bool = False

    def check(self, at: Location, tokens: int, most: int) -> None:
        """Check that a long text is not refused.

        Args:
            at: place of the text.
            tokens: number of its tokens, special tokens included.
            most: most tokens that the model reads.

        Raises:
            InvalidRequest: long texts are refused.
        """
        if self.choice == "error":
            raise InvalidRequest(
                f"has {tokens} tokens; the model reads {most}, and {self.refused_by}", at
            )


class TextEncoder:
    """Builds the encodings of one request, text by text.

    Args:
        rule: what to do with long texts.
        context: the model.
        requests: what each encoding asks of the heads; None: each has its own requests.
        max_tokens: most tokens per encoding; None: the model's limit.

    Attributes:
        rule: what to do with long texts.
        encodings: one per text or pair, or one per window of a text.
        windows: number of encodings of each text or pair.
        truncated: number of texts and pairs that were cut.
        usage: how much of each was used; None without a report.
    """

    def __init__(
        self,
        rule: LongTextRule,
        context: TaskContext,
        requests: Mapping[str, HeadRequest] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.rule, self._tokenizer, self._requests = rule, context.tokenizer, requests
        self._most = context.limits.max_tokens if max_tokens is None else max_tokens
        self._budget = TokenBudget(context.limits, "the windows hold")
        self.encodings: list[Encoding] = []
        self.windows: list[int] = []
        self.truncated = 0
        self.usage: list[TextUsage] | None = [] if rule.report else None

    def add(
        self, at: Location, ids: Sequence[int], text: str | None, prompt: str = ""
    ) -> Sequence[Bounds]:
        """Add a text; return the (first, end) tokens of each of its encodings.

        Args:
            at: place of the text.
            ids: its tokens, without special tokens.
            text: the text itself; None: the client sent its ids.
            prompt: the start of the text that each window repeats.

        Raises:
            InvalidRequest: the text is too long and long texts are refused, or the windows have
                more tokens than a request may.
        """
        if self.rule.choice == "window" and (prompt or len(ids) + 2 > self._most):
            return self._add_windows(at, ids, text, prompt)
        keep_end = self.rule.keep_end
        encoding, cut = self._tokenizer.encode(ids, self._most, keep_end=keep_end)
        usage = TextUsage(len(ids) + 2, len(encoding))
        self.add_encodings(at, [encoding], usage, cut=cut)
        return [(0, len(encoding) - 2)]

    def _add_windows(
        self, at: Location, ids: Sequence[int], text: str | None, prompt: str
    ) -> Sequence[Bounds]:
        """Add the windows of a text; each begins with the prompt's tokens. See `add`."""
        needs_places = text is not None and (prompt or self.usage is not None)
        places = self._tokenizer.spans(text or "").offsets if needs_places else []
        prefix = ids[: sum(start < len(prompt) for start, _ in places)]
        own, room = ids[len(prefix) :], self._most - 2 - len(prefix)
        if room < 1:
            raise InvalidRequest(
                f"the prompt of {len(prefix)} tokens leaves no room; the model reads {self._most}"
            )
        bounds = [(0, len(own))]
        if len(own) > room:
            bounds = self.divide(len(own), room, at, self.rule.stride)
        encodings = [
            self._tokenizer.encode([*prefix, *own[first:end]], self._most)[0]
            for first, end in bounds
        ]
        windows = None
        if len(bounds) > 1 and places:
            windows = [
                (start - len(prompt), end - len(prompt))
                for start, end in characters(bounds, places[len(prefix) :])
            ]
        self.add_encodings(at, encodings, TextUsage(len(ids) + 2, len(ids) + 2, windows))
        return bounds

    def add_pair(self, at: Location, first: Sequence[int], second: Sequence[int]) -> None:
        """Add a pair of texts by their tokens, without special tokens.

        Raises:
            InvalidRequest: the pair is too long, and long texts are refused or divided.
        """
        tokens = len(first) + len(second) + self._tokenizer.special.pair_tokens
        if self.rule.choice == "window" and tokens > self._most:
            raise InvalidRequest(
                f"is a pair of {tokens} tokens; the model reads {self._most}, and long_text "
                "window divides only texts without a pair",
                at,
            )
        keep_end = self.rule.keep_end
        encoding, cut = self._tokenizer.pair(first, second, self._most, keep_end=keep_end)
        self.add_encodings(at, [encoding], TextUsage(tokens, len(encoding)), cut=cut)

    def add_encodings(
        self, at: Location, encodings: Sequence[Encoding], usage: TextUsage, *, cut: bool = False
    ) -> None:
        """Add the encodings of one text or pair.

        Args:
            at: place of the text.
            encodings: its encodings.
            usage: how much of it they have.
            cut: whether it was cut.

        Raises:
            InvalidRequest: it was cut, but long texts are refused.
        """
        if cut:
            self.rule.check(at, usage.tokens, self._most)
        if self._requests is not None:
            for encoding in encodings:
                encoding.requests = self._requests
        self.encodings += encodings
        self.windows.append(len(encodings))
        self.truncated += cut
        if self.usage is not None:
            self.usage.append(usage)

    def divide(
        self, tokens: int, room: int, at: Location, stride: int | None = None, around: int = 2
    ) -> list[Bounds]:
        """Return the bounds of a text's windows; see `windows`.

        Args:
            tokens: tokens of the text, without special tokens.
            room: most tokens of the text per window.
            at: place of the text.
            stride: tokens that neighbouring windows share; None: a quarter of a window.
            around: tokens of each window besides those of the text.

        Raises:
            InvalidRequest: the windows hold more tokens than a request may have.
        """
        stride = room // _OVERLAP if stride is None else stride
        self._budget.add(window_count(tokens, room, stride) * (room + around), at)
        return windows(tokens, room, stride)

    def prepared(self, state: S, results: int = 0) -> PreparedRequest[S]:
        """Return the request with all its encodings; see `PreparedRequest`."""
        return PreparedRequest(
            self.encodings,
            state,
            results,
            self.truncated,
            usage=self.usage,
            texts=len(self.windows),
        )


class TokenBudget:
    """Counts the tokens that a request takes, text by text, against the limit of a request.

    Args:
        limits: the limits of the request.
        use: what takes the tokens, for the error: ``the windows hold``.
    """

    def __init__(self, limits: TaskLimits, use: str) -> None:
        self._most, self._use = limits.max_request_tokens, use
        self._tokens = 0

    def add(self, tokens: int, at: Location) -> None:
        """Count the tokens of the text at a place.

        Raises:
            InvalidRequest: the texts so far take more tokens than a request may have.
        """
        self._tokens += tokens
        if self._tokens > self._most:
            raise InvalidRequest(
                f"{self._use} {self._tokens} tokens; the limit of a request is {self._most}",
                at,
                UP_TO,
            )


def windows(tokens: int, room: int, stride: int) -> list[Bounds]:
    """Return the bounds of each window, as (first token, token after the last).

    Args:
        tokens: number of tokens of the text.
        room: most tokens per window.
        stride: number of tokens that neighbouring windows share; less than ``room``.
    """
    bounds = [(0, min(room, tokens))]
    while bounds[-1][1] < tokens:
        first = bounds[-1][0] + room - stride
        bounds.append((first, min(first + room, tokens)))
    return bounds


def window_count(tokens: int, room: int, stride: int) -> int:
    """Return the number of windows that `windows` returns, without creating the windows."""
    return 1 + max(0, -(-(tokens - room) // (room - stride)))


def characters(
    bounds: Sequence[Bounds], offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the (start, end) characters of windows.

    Args:
        bounds: the (first, end) tokens of each window.
        offsets: the (start, end) characters of each token.
    """
    return [(offsets[first][0], offsets[end - 1][1]) for first, end in bounds]
