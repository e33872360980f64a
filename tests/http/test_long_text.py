"""Long texts: refused, cut or divided, on every route; and what of a text was used."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.refusals import error_of
from tests.support.route_service import Service
from tests.support.serving import Server
from tests.support.tensor_requests import tensor

LIMIT = 160  # tokens that the tiny models read
LONG = "the king was red . " * 40  # 200 tokens
INPUTS: dict[str, Any] = {
    **dict.fromkeys(("/embed", "/embed_all", "/embed_sparse", "/score", "/classify"), LONG),
    "/token-classification": LONG,
    "/similarity": {"source_sentence": "the king", "sentences": [LONG]},
    "/fill-mask": "[MASK] " + LONG,
    "/nsp": {"text": LONG, "next": "a moon"},
    "/qa": {"question": "who was red", "context": LONG},
}


def ask(server: Server, route: str, inputs: Any, **parameters: Any) -> httpx.Response:
    body: dict[str, Any] = {"inputs": inputs}
    at_root = route in ("/embed", "/embed_all", "/embed_sparse")
    body |= parameters if at_root else {"parameters": parameters}
    return httpx.post(server.url + route, json=body, timeout=60)


@pytest.mark.parametrize("route", INPUTS)
def test_every_route_refuses_cuts_and_reports(every_task: Server, route: str) -> None:
    refused = ask(every_task, route, INPUTS[route], long_text="error")
    assert error_of(refused) == (422, "text_too_long")
    cut = ask(every_task, route, INPUTS[route], long_text="truncate", return_usage=True)
    assert cut.status_code == 200, cut.text
    assert cut.headers["x-truncated"] == "1"
    usage = cut.json()["usage"]
    assert usage[-1]["tokens"] > LIMIT
    assert usage[-1]["used"] == LIMIT
    assert usage[-1]["windows"] is None
    plain = ask(every_task, route, INPUTS[route], long_text="truncate")
    assert cut.json()["result"] == plain.json()


CUT = "war a b c d e f g h i j k l"
"""The engine of `route_service` fails on the first word."""


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [CUT]}}, {}),
        ("/rerank", {"query": "a", "texts": [CUT]}, {"truncation_direction": "left"}),
        ("/v1/embeddings", {"input": CUT, "model": "tiny"}, {"truncate": "START"}),
        ("/v2/models/tiny.embed/infer", {"inputs": [tensor("text", CUT)]}, {}),
    ],
)
def test_every_protocol_cuts_the_end_that_is_asked_for(
    tmp_path: Path, path: str, body: dict[str, Any], left: dict[str, Any]
) -> None:
    left = left or {"parameters": {"truncation_direction": "left"}}
    with Service(tmp_path) as service:
        assert service.post(path, body).status_code == 500
        assert service.post(path, body | left).status_code == 200
