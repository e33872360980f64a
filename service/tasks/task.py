"""What a task is: the contract that every module of this package fulfils with its `TASK`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

from model_store import Manifest
from model_store.batch import Encoding, HeadOutputs
from service.core import EmptyRequest, InvalidRequest
from service.tokenizer import Tokenizer

T = TypeVar("T")
S = TypeVar("S")


class WireModel(BaseModel):
    """A part of a request body: exact types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NoParameters(WireModel):
    """The parameters of a task that has none."""


class FirstError(FailFast):
    """`FailFast`, hashable, as a union's members must be.

    One error is enough to say what is wrong. Collecting one per element of a large body would
    exhaust the memory.
    """

    def __hash__(self) -> int:
        return hash(type(self))


Texts = Annotated[list[str], FirstError()]


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The most that one request may ask of a task.

    Attributes:
        max_tokens: per sequence, special tokens included; the model's limit.
        max_masks: mask tokens per text.
        max_top_k: predictions per mask, or answers per question.
        max_results: predictions, or answers, per request.
        max_text_characters: per text, however much of the text the model reads.
        max_request_tokens: that run for one request, all windows of its contexts counted.
        max_request_texts: texts per request.
    """

    max_tokens: int
    max_masks: int
    max_top_k: int
    max_results: int
    max_request_tokens: int
    max_text_characters: int
    max_request_texts: int = 2048


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The model that a task call runs on."""

    manifest: Manifest
    tokenizer: Tokenizer
    limits: TaskLimits


@dataclass(frozen=True, slots=True)
class TaskCall:
    """What a client asks of a task, whatever the protocol.

    Attributes:
        inputs: an instance of the task's `inputs` type.
        parameters: an instance of the task's `parameters` type.
    """

    inputs: Any
    parameters: Any


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[S]):
    """A tokenized request.

    Attributes:
        encodings: what to run, at least one.
        state: what `Task.decode` needs besides the outputs.
        results: how many things `Task.decode` makes, where that may be many.
        truncated: how many of the request's texts were cut.
        warnings: what the client should know of the request, in ASCII.
    """

    encodings: list[Encoding]
    state: S
    results: int = 0
    truncated: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """A request that runs on any model which serves the task.

    Attributes:
        title: what the example shows.
        body: of the native protocol.
    """

    title: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What a client can ask.

    Attributes:
        name: in `/info`, metric labels and messages.
        route: the path of the native protocol.
        summary: one line for the documentation.
        heads: names of the heads that a model needs for the task.
        inputs: the type of a call's inputs; one input or a list, as the task defines.
        parameters: the model of a call's parameters; every field has a default.
        result: the type of `decode`'s value, for the documentation.
        prepare: (call, context) -> the encodings to run; raises `InvalidRequest`.
        decode: (prepared, outputs in the order of the encodings, context) -> the result: values
            that JSON has, frozen dataclasses, or, if `vectors`, a float32 array [n, D].
        examples: runnable requests.
        vectors: whether the result is an array, which clients may ask for as bytes.
    """

    name: str
    route: str
    summary: str
    heads: tuple[str, ...]
    inputs: Any
    parameters: type[WireModel]
    result: Any
    prepare: Callable[[TaskCall, TaskContext], PreparedRequest[Any]]
    decode: Callable[[PreparedRequest[Any], Sequence[HeadOutputs], TaskContext], Any]
    examples: tuple[Example, ...]
    vectors: bool = False

    def is_served_by(self, manifest: Manifest) -> bool:
        """Return whether a bundle has the heads that the task needs."""
        return {head.name for head in manifest.graph_heads}.issuperset(self.heads)


def listed(inputs: T | list[T], limits: TaskLimits) -> list[T]:
    """Return one input or many as a list.

    Raises:
        EmptyRequest: the list is empty.
        InvalidRequest: the list is longer than the limit.
    """
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not texts:
        raise EmptyRequest("inputs is an empty list; it needs at least 1 text")
    if len(texts) > limits.max_request_texts:
        limit = limits.max_request_texts
        raise InvalidRequest(f"inputs has {len(texts)} texts; the limit is {limit}")
    return texts


def input_name(index: int, *, many: bool) -> str:
    """Return how an error names one text of a request: ``inputs`` or ``inputs[3]``."""
    return f"inputs[{index}]" if many else "inputs"


def check_text(text: str, name: str, limits: TaskLimits) -> None:
    """Refuse an empty text, and a text whose tokens alone would fill the memory.

    Raises:
        InvalidRequest: the error names the limit and the text's length.
    """
    if not text:
        raise InvalidRequest(f"{name} is empty; it needs at least 1 character")
    if len(text) > limits.max_text_characters:
        limit = limits.max_text_characters
        raise InvalidRequest(f"{name} has {len(text)} characters; the limit is {limit}")


def check_range(value: int, low: int, high: int, name: str) -> None:
    """Refuse a number outside its limits.

    Raises:
        InvalidRequest: the error names the limits and the value.
    """
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}")
