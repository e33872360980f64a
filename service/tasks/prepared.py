"""What a task hands to the pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.core import InvalidRequest, Output, Query

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The most that one request may ask of a task.

    Attributes:
        max_tokens: of one sequence, special tokens included; the model's.
        max_masks: mask tokens in one text.
        max_top_k: predictions a mask, or answers a question.
        max_results: predictions, or answers, of a whole request.
        max_text_characters: of one text, however much of it the model reads.
        max_request_tokens: run for one request, all windows of its contexts counted.
    """

    max_tokens: int
    max_masks: int
    max_top_k: int
    max_results: int
    max_request_tokens: int
    max_text_characters: int


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """A tokenized request.

    Attributes:
        queries: what to run, at least one.
        decode: makes the task's result of the outputs, given in the queries' order.
        results: how many things `decode` makes, where that may be many.
        truncated: how many of the request's texts were cut.
        warnings: what the client should know of its request, in ASCII.
    """

    queries: list[Query]
    decode: Callable[[Sequence[Output]], T]
    results: int = 0
    truncated: int = 0
    warnings: tuple[str, ...] = ()


def place(index: int, many: bool) -> str:
    """How an error names one text of a request: ``inputs``, or ``inputs[3]`` where there are many."""
    return f"inputs[{index}]" if many else "inputs"


def check_text(text: str, name: str, limits: TaskLimits) -> None:
    """Refuse an empty text, and one whose tokens alone would fill the memory.

    Raises:
        InvalidRequest: naming the limit and the text's length.
    """
    if not text:
        raise InvalidRequest(f"{name} is empty; it needs at least 1 character")
    if len(text) > limits.max_text_characters:
        raise InvalidRequest(f"{name} has {len(text)} characters; the limit is {limits.max_text_characters}")


def check_range(value: int, low: int, high: int, name: str) -> None:
    """Refuse a number out of its limits.

    Raises:
        InvalidRequest: naming the limits and the value.
    """
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}")
