"""A call of a task, and what the calls of all tasks share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

Float32 = NDArray[np.float32]
Pair = tuple[str, str]
LongText = Literal["error", "truncate", "window"]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A task call, which the client divides into requests.

    Attributes:
        body: some inputs -> the body of a request.
        read: (response, number of the request's first input) -> the results of one request.
        join: the results of all requests -> the result.
        accept: media type of the responses.
        headers: further headers of the requests.
    """

    route: str
    inputs: Sequence[Any]
    body: Callable[[Sequence[Any]], Mapping[str, Any]]
    read: Callable[[httpx.Response, int], Any]
    join: Callable[[list[Any]], T]
    accept: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def json_call(
    route: str,
    inputs: Sequence[Any],
    read: Callable[[Any], R],
    model: str | None,
    **parameters: Any,
) -> Call[list[R]]:
    """Return the call of a task whose options are parameters, and whose results are JSON.

    Args:
        read: the JSON value of one input -> its result.
        model: a field of the body, beside the parameters.
    """
    options = given(parameters=given(**parameters) or None, model=model)
    return Call(route, inputs, partial(body_with, options), partial(_read_each, read), chain)


def body_with(options: Mapping[str, Any], inputs: Sequence[Any]) -> Mapping[str, Any]:
    """Return the body of a request, with options beside the inputs."""
    return {"inputs": inputs, **options}


def given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def _read_each(read: Callable[[Any], R], response: httpx.Response, _: int) -> list[R]:
    return [read(value) for value in response.json()]


def result(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return a result from a JSON object, without fields that later servers may add."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def results(kind: type[R], values: Sequence[Mapping[str, Any]]) -> list[R]:
    """Return a result per JSON object."""
    return [result(kind, value) for value in values]


def chain(parts: list[list[R]]) -> list[R]:
    """Return the results of all requests as one list."""
    return [item for part in parts for item in part]
