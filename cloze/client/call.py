"""A call of a task, and what the calls of all tasks share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

Float32 = NDArray[np.float32]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A task call, which the client divides into requests.

    Attributes:
        route: path of the route.
        inputs: all inputs.
        body: some inputs -> the body of a request.
        read: (response, number of the request's first input) -> the results of one request.
        join: the results of all requests -> the result.
        accept: media type of the responses.
    """

    route: str
    inputs: Sequence[Any]
    body: Callable[[Sequence[Any]], Mapping[str, Any]]
    read: Callable[[httpx.Response, int], Any]
    join: Callable[[list[Any]], T]
    accept: str = "application/json"


def many(texts: str | Sequence[str]) -> list[str]:
    """Return one text or many as a list."""
    return [texts] if isinstance(texts, str) else list(texts)


def pairs_of(pairs: Pair | Sequence[Pair]) -> list[Any]:
    """Return one pair or many as a list."""
    is_one = isinstance(pairs, tuple) and len(pairs) == 2 and isinstance(pairs[0], str)
    return [pairs] if is_one else list(pairs)


def given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def request_body(
    parameters: Mapping[str, Any], model: str | None, inputs: Sequence[Any]
) -> Mapping[str, Any]:
    """Return the body of a request, without what is not given."""
    return {
        "inputs": inputs,
        **({"parameters": parameters} if parameters else {}),
        **given(model=model),
    }


def body_at_root(options: Mapping[str, Any], inputs: Sequence[Any]) -> Mapping[str, Any]:
    """Return the body of a request whose options are fields of the body itself."""
    return {"inputs": inputs, **options}


def result(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return a result from a JSON object, without fields that later servers may add."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def chain(parts: list[list[R]]) -> list[R]:
    """Return the results of all requests as one list."""
    return [item for part in parts for item in part]


def stack(parts: list[Float32]) -> Float32:
    """Return the arrays of all requests as one."""
    return np.concatenate(parts)
