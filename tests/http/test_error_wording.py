"""The wording of errors: `error-wording.txt` has one line per provoked error.

A line names the server, the path of a POST request with its body and headers, and the error. Other
tests compare statuses and codes, so a better sentence changes this file only. To accept new
sentences, run this test with ``REWRITE_WORDING=1`` and read the difference. To provoke another
error, add its first two parts. `test_parameters.py` provokes the errors that follow from types.
"""

import json
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.refusals import check_shape, check_table
from tests.support.serving import Server

WORDING = Path(__file__).with_name("error-wording.txt")


def error(server: Server, request: str) -> str:
    """Send a request that is written in Python; return its error."""
    path, body, *headers = eval(request)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | (headers[0] if headers else {})
    response = httpx.post(server.url + path, content=content, headers=sent, timeout=30)
    assert response.status_code >= 400, request
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    answer = response.json()
    check_shape(path, answer)
    found = answer.get("error", answer.get("message"))
    message = found if isinstance(found, str) else found["message"]
    assert len(message) < 500, "an error does not repeat what was sent"
    assert message.isascii()
    assert message.isprintable()
    code = response.headers["x-error-code"]
    assert answer.get("code", code) == code
    return f"{response.status_code} {code} | {message}"


def test_every_error_says_what_is_wrong(
    servers: Callable[[tuple[str, ...]], Server], every_task: Server
) -> None:
    models = {"tiny": servers(()), "every task": every_task}
    check_table(WORDING, lambda name, request: error(models[name], request))
