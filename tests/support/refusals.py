"""Refusals by their codes, and tables of refusals with their wording."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def check_table(file: Path, outcome: Callable[[str, str], str]) -> None:
    """Compare a table with what happens; each line is ``SERVER | REQUEST | OUTCOME``.

    With ``REWRITE_WORDING=1`` in the environment, the table gets what happens.

    Args:
        file: the table.
        outcome: returns the outcome of a request to a server.
    """
    lines = file.read_text().splitlines()
    asked = [line.split(" | ")[:2] for line in lines]
    found = [f"{server} | {sent} | {outcome(server, sent)}" for server, sent in asked]
    if os.environ.get("REWRITE_WORDING"):
        file.write_text("\n".join(found) + "\n")
    assert found == lines


def check_shape(path: str, error: Any) -> None:
    """Check that an error has the shape of the protocol of a path."""
    if path in ("/v1/embed", "/v2/embed", "/v1/tokenize"):
        assert error.keys() == {"message"}, path
    elif path in ("/v1/rerank", "/v2/rerank"):
        assert error.keys() == {"error", "detail", "message"}, path
    elif path.startswith(("/v2", "/api", "/vectors", "/gliner")):
        assert error.keys() == {"error"}, path
    elif path.startswith(("/v1", "/embeddings", "/pooling")) and ":predict" not in path:
        assert error["error"].keys() == {"message", "type", "param", "code"}, path
    elif path in ("/rerank", "/score", "/classify"):  # several protocols: each reads its own
        keys = {"error", "error_type", "code", "message", "detail"}
        assert error.keys() == keys, path
    else:
        assert error.keys() == {"error", "error_type", "code"}, path
