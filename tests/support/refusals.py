"""Refusals by their codes: `tests/http/error-wording.txt` has the wording."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from cloze.service.errors import RequestError, ServiceError


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of an error."""
    return response.status_code, response.headers["x-error-code"]


@contextmanager
def refused(code: str, *figures: float, at: str | None = None) -> Iterator[None]:
    """Expect an error.

    Args:
        code: the code of the error.
        figures: numbers that its message has, such as the limit and the value.
        at: the place of the problem in the request, like ``inputs[3]``; None: there is none.
    """
    with pytest.raises(ServiceError) as raised:
        yield
    error = raised.value
    message, place = str(error), None
    if isinstance(error, RequestError) and error.at is not None:
        message, place = error.problem, str(error.at)
    assert (error.code, place) == (code, at)
    named = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", message)}
    assert named >= set(figures), message
