"""The definition of a task. Every other task module of the package defines one as its `TASK`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from cloze.model_store import Manifest
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import EmptyRequest, InvalidRequest, Location
from cloze.service.tokenizer import Tokenizer

INPUTS = Location(("inputs",))
"""The place of a call's inputs, as the native protocol names it."""

T = TypeVar("T")
S = TypeVar("S")


def _stop_at_first_error(schema: Any) -> None:
    """Set what a core schema says of lists, tuples and dictionaries, in all of its parts."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "dict"):
            schema["fail_fast"] = True
        if schema.get("type") == "tuple":
            schema["strict"] = False  # JSON has lists only
        for part in schema.values():
            _stop_at_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_error(part)


class WireModel(BaseModel):
    """A part of a request body. Validation is strict and refuses unknown fields.

    Validation stops at the first wrong element of each list, tuple and dictionary, and at the first
    unknown field: one error per element of a large body would exhaust the memory.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the model, with validation that stops at the first error."""
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        fields = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(fields):
            return value
        if cls.model_config["extra"] != "forbid":
            return value
        unknown = next(name for name in value if name not in fields)
        return {name: value[name] for name in (*fields, unknown) if name in value}


class NoParameters(WireModel):
    """The parameters of a task that has none."""


@dataclass(frozen=True, slots=True)
class SchemaKeyword:
    """A keyword for a type's JSON schema. The task checks the value, with an error of its own."""

    keyword: str
    value: int

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the type's schema with the keyword."""
        return handler(schema) | {self.keyword: self.value}


NotEmpty = SchemaKeyword("minItems", 1)
"""Marks a list that has at least one element."""

NotEmptyText = SchemaKeyword("minLength", 1)
"""Marks a text that has at least one character."""

Text = Annotated[str, NotEmptyText]
Texts = Annotated[list[Text], NotEmpty]
Count = Annotated[int, SchemaKeyword("minimum", 1)]
CountOrZero = Annotated[int, SchemaKeyword("minimum", 0)]

_IDS_AT_ONCE = 65_536
"""Ids that are checked in one call: more would keep the interpreter from other threads."""


def _check_ids(ids: list[Any]) -> list[Any]:
    """Check that a list has integers only.

    A request may have a million token ids. pydantic needs 40 ms for them, in one call that keeps
    the interpreter from the event loop.
    """
    for start in range(0, len(ids), _IDS_AT_ONCE):
        part = ids[start : start + _IDS_AT_ONCE]
        if set(map(type, part)) != {int}:
            index = next(index for index, item in enumerate(part) if type(item) is not int)
            place = f"element {start + index}"
            message = f"Input should be a list of integers; {place} is another value"
            raise PydanticCustomError("ids", message)
    return ids


TokenIds = Annotated[
    list[Any],
    AfterValidator(_check_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
]
"""The token ids of a text."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The limits of one request.

    Attributes:
        max_tokens: most tokens per sequence, special tokens included; the model's limit.
        max_masks: most mask tokens per text.
        max_top_k: most predictions per mask, or answers per question.
        max_results: most predictions, or answers, per request.
        max_text_characters: most characters per text, before truncation.
        max_request_tokens: most tokens per request, including all windows of long texts.
        max_request_texts: most texts per request.
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
    """The model and the limits of a task call."""

    manifest: Manifest
    tokenizer: Tokenizer
    limits: TaskLimits


class TaskCall(NamedTuple):
    """A client's call of a task, independent of the protocol.

    Attributes:
        inputs: an instance of the task's `inputs` type.
        parameters: an instance of the task's `parameters` type.
    """

    inputs: Any
    parameters: Any


@dataclass(frozen=True, slots=True)
class TextUsage:
    """How much of one input the model read.

    Attributes:
        tokens: tokens of the whole input, special tokens included.
        used: how many of them the model read.
        windows: (start, end) of each window in characters; null if the input was not divided.
    """

    tokens: int
    used: int
    windows: list[tuple[int, int]] | None = None


class PreparedRequest(NamedTuple, Generic[S]):
    """A tokenized request.

    Attributes:
        encodings: the encodings to run; without any, `Task.decode` follows at once.
        state: the values that `Task.decode` needs besides the outputs.
        results: number of predictions, vectors or answers; 0 if their cost is low. Many of them are
            decoded and written on a thread.
        truncated: number of the request's texts that were cut.
        warnings: messages for the client, in ASCII.
        usage: how much of each input was used; None unless the client asks.
        advance: (outputs, context) -> the next round of the engine, or None if `Task.decode`
            follows; None if there is one round.
        texts: number of texts, pairs or questions of the request.
    """

    encodings: list[Encoding]
    state: S
    results: int = 0
    truncated: int = 0
    warnings: tuple[str, ...] = ()
    usage: Sequence[TextUsage] | None = None
    advance: "Advance | None" = None
    texts: int = 1


Advance = Callable[[Sequence[HeadOutputs], TaskContext], PreparedRequest[Any] | None]


@dataclass(frozen=True, slots=True)
class Example:
    """An example request, which runs on any model that serves the task.

    Attributes:
        title: title of the example in the documentation.
        body: request body of the native protocol.
    """

    title: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A task that clients can request.

    Attributes:
        name: name of the task in `/info`, metric labels and messages.
        route: path of the task in the native protocol.
        summary: one line for the documentation.
        heads: names of the heads that a model needs for the task.
        inputs: the type of a call's inputs: one input, a list of inputs, or either.
        parameters: the model of a call's parameters; every field has a default.
        result: the type of the value that `decode` returns, for the documentation.
        prepare: (call, context) -> the tokenized request; raises `InvalidRequest`.
        decode: (prepared, outputs in the order of the encodings, context) -> the result. The result
            consists of JSON values and frozen dataclasses, or if `vectors` is set, is a float32
            array [n, D] or a list of such arrays.
        examples: example requests.
        takes_long: call -> whether `prepare` may take milliseconds for a short body, because one
            text becomes many encodings.
        vectors: whether the result is an array or a list of arrays, which clients may request as
            bytes.
        own_fields: fields that only objects among this task's inputs have. ``POST /`` recognises
            the task by them.
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
    takes_long: Callable[[TaskCall], bool] = lambda _: False
    vectors: bool = False
    own_fields: tuple[str, ...] = ()

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
        raise EmptyRequest("is an empty list; it needs at least 1 text", INPUTS)
    if len(texts) > limits.max_request_texts:
        limit = limits.max_request_texts
        raise InvalidRequest(f"has {len(texts)} texts; the limit is {limit}", INPUTS)
    return texts


def input_name(index: int, *, many: bool) -> Location:
    """Return the place of one text of a request: ``inputs`` or ``inputs[3]``."""
    return INPUTS.below(index) if many else INPUTS


def check_text(text: str, name: Location, limits: TaskLimits) -> None:
    """Check that a text is neither empty nor longer than the limit.

    Raises:
        EmptyRequest: the text is empty.
        InvalidRequest: the text exceeds `TaskLimits.max_text_characters`.
    """
    if not text:
        raise EmptyRequest("is empty; it needs at least 1 character", name)
    if len(text) > limits.max_text_characters:
        limit = limits.max_text_characters
        raise InvalidRequest(f"has {len(text)} characters; the limit is {limit}", name)


def check_results(results: int, asked: str, limits: TaskLimits) -> None:
    """Check the number of a request's results, or of the encodings that it needs.

    Raises:
        InvalidRequest: the number exceeds `TaskLimits.max_results`.
    """
    if results > (most := limits.max_results):
        raise InvalidRequest(f"{asked} {results} predictions; the limit is {most}")


def check_range(value: int, low: int, high: int, name: str) -> None:
    """Check that a number is within its limits.

    Raises:
        InvalidRequest: the number is below ``low`` or above ``high``.
    """
    if not low <= value <= high:
        raise InvalidRequest(f"must be between {low} and {high}, got {value}", Location((name,)))
