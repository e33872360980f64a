"""Which tokens of a text the model reads: all of them, one end of a long text, or windows.

For example, a model reads 12 tokens per sequence, 2 of which are special tokens. A text of 25
tokens is longer than the 10 that have room. A request may refuse the text, read its first or last
10 tokens, or read the windows (0, 10), (8, 18) and (16, 25), which share a quarter of a window.
"""

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from cloze.model_store.sequences import TEXT_TOKENS, Side
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.task import TaskContext

LongText = Literal["error", "truncate", "window"]

Bounds = tuple[int, int]
"""The first token of a part of a text, and the token after its last."""

_OVERLAP: Final = 4
"""Neighbouring windows share this part of a window: a quarter."""


class LongTextRule(NamedTuple):
    """What a request does with its long texts.

    Attributes:
        choice: whether to refuse, cut or divide them.
        refused_by: the parameter that refuses them, for the error.
        side: the end of a long text to cut; None: the model's.
        stride: tokens that neighbouring windows share; None: a quarter of a window.
        divides_pairs: whether windows divide the second text of a pair, which is refused otherwise.
        report: whether to report how much of each text was used.
    """

    choice: LongText
    refused_by: str = "long_text is error"
    side: Side | None = None
    stride: int | None = None
    report: bool | None = False
    divides_pairs: bool = False

    def check(self, at: Location, tokens: int, most: int, limit: str = "the model reads") -> None:
        """Raise `InvalidRequest` for more tokens than the limit if the rule refuses long texts."""
        if tokens > most and self.choice == "error":
            raise InvalidRequest(f"has {tokens} tokens; {limit} {most}, and {self.refused_by}", at)


@dataclass(slots=True)
class Divider:
    """Chooses the tokens that the model reads of each text of one request.

    Attributes:
        max_tokens: most tokens per sequence, special tokens included.
        window_tokens: tokens of all windows so far.
    """

    rule: LongTextRule
    context: TaskContext
    max_tokens: int
    window_tokens: int = field(default=0, init=False)

    @property
    def keep_end(self) -> bool:
        """Whether the start of a long text is cut, and not its end."""
        return (self.rule.side or self.context.tokenizer.truncation_side) == "left"

    def room(self, at: Location, around: int) -> int:
        """Return the most tokens of a text in a sequence that has ``around`` other tokens.

        Raises:
            InvalidRequest: there is no room.
        """
        if (room := self.max_tokens - around) < 1:
            problem = f"leaves no room for a text beside {around} tokens"
            raise InvalidRequest(f"{problem}; the model reads {self.max_tokens}", at)
        return room

    def divide(
        self, at: Location, tokens: int, around: int = TEXT_TOKENS, stride: int | None = None
    ) -> list[Bounds]:
        """Return the bounds of the parts of a text that the model reads, one per sequence.

        Args:
            at: the place of the text.
            tokens: number of tokens of the text.
            around: tokens of each sequence besides those of the text, such as special tokens.
            stride: tokens that neighbouring windows share; None: those of the rule.

        Raises:
            InvalidRequest: the text is too long and the rule refuses such texts, or the windows so
                far have more tokens than a request may have.
        """
        room = self.room(at, around)
        if tokens <= room:
            return [(0, tokens)]
        self.rule.check(at, tokens + around, self.max_tokens)
        if self.rule.choice == "truncate":
            return [(tokens - room, tokens) if self.keep_end else (0, room)]
        shared = self.rule.stride if stride is None else stride
        step = room - (room // _OVERLAP if shared is None else shared)
        count = 1 - (room - tokens) // step  # rounded up
        self.count(at, count * self.max_tokens)
        firsts = range(0, count * step, step)
        return [(first, min(first + room, tokens)) for first in firsts]

    def count(self, at: Location, tokens: int) -> None:
        """Add tokens to those of all windows.

        Raises:
            InvalidRequest: a request may have fewer.
        """
        self.window_tokens += tokens
        self.context.limits.check_tokens(self.window_tokens, "the windows hold", at)


def centred(middle: int, tokens: int, room: int) -> Bounds:
    """Return the bounds of the part of a text that has a token in its middle, if it can."""
    first = max(0, min(middle - room // 2, tokens - room))
    return first, min(first + room, tokens)
