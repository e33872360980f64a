"""Spans reach a collector by OTLP over HTTP, and continue the traces of clients."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cloze.service.errors import StartupError
from cloze.service.observe.tracing import make_tracing
from cloze.service.settings import Settings
from tests.support.collector import collecting
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def embed(server: Server, headers: dict[str, str] | None = None) -> None:
    body = {"inputs": ["the old king", "a moon"], "model": "bert"}
    assert httpx.post(f"{server.url}/embed", json=body, headers=headers).status_code == 200


def test_spans_of_a_request_and_its_batch(tiny_store: Path) -> None:
    with collecting() as (collector, endpoint):
        settings = {"CLOZE_TRACES_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        arguments = ("--model", "bert", "--frontends", "2")
        with running_server(tiny_store, *arguments, **settings) as server:
            embed(server, SAMPLED)
            httpx.get(f"{server.url}/healthz")
            wait_until(lambda: bool(collector.named("POST /embed") and collector.named("batch")))
    (request,) = collector.named("POST /embed")
    assert request.trace_id.hex() == TRACE_ID
    assert request.parent_span_id.hex() == PARENT_ID
    assert request.kind == Span.SPAN_KIND_SERVER
    expected = {
        "http.response.status_code": 200, "http.route": "/embed", "cloze.model": "bert@1",
        "cloze.client": "127.0.0.1", "cloze.texts": 2,
    }  # fmt: skip
    assert attributes(request).items() >= expected.items()
    ended = request.start_time_unix_nano
    for name in ("tokenize", "queue", "inference"):
        (part,) = collector.named(name)
        assert part.parent_span_id == request.span_id
        assert ended - 1_000_000 <= part.start_time_unix_nano <= part.end_time_unix_nano
        ended = part.end_time_unix_nano
    assert ended <= request.end_time_unix_nano + 1_000_000
    batches = collector.named("batch")
    assert sum(attributes(batch)["cloze.sequences"] for batch in batches) == 2
    for batch in batches:
        (link,) = batch.links
        assert (link.trace_id, link.span_id) == (request.trace_id, request.span_id)
        assert attributes(batch)["cloze.fill"]
    names = {"POST /embed", "tokenize", "queue", "inference", "batch"}
    assert {span.name for span in collector.spans} == names, "no span of a probe"
    assert all(resource["service.name"] == "cloze" for resource in collector.resources)


def test_the_trace_decides_and_else_the_share(tiny_store: Path) -> None:
    with collecting() as (collector, endpoint):
        settings = {"CLOZE_TRACES_ENDPOINT": endpoint, "CLOZE_TRACES_SHARE": "0"}
        with running_server(tiny_store, "--model", "bert", **settings) as server:
            embed(server)
            embed(server, NOT_SAMPLED)
            embed(server, {"traceparent": "nonsense"})
            embed(server, SAMPLED)
    assert len(collector.named("POST /embed")) == 1, "the last spans are sent at the end"
    assert all(len(batch.links) == 1 for batch in collector.named("batch"))


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://a:4317", "http://"])
def test_a_wrong_address_ends_the_start(endpoint: str) -> None:
    with pytest.raises(StartupError, match="it must be like http://HOST:4318"):
        make_tracing(Settings(traces_endpoint=endpoint))


def test_without_a_collector_the_server_answers_and_says_so_once(tiny_store: Path) -> None:
    settings = {"CLOZE_TRACES_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running_server(tiny_store, "--model", "bert", **settings) as server:
        embed(server)
        wait_until(lambda: any("spans are lost" in line for line in server.log))
        embed(server)
    assert sum("spans are lost" in line for line in server.log) == 1
    assert not any("Traceback" in line or "opentelemetry" in line for line in server.log)


def test_without_an_address_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server without the extra starts."""
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; import cloze.service.server.process; "
        "from cloze.service.observe.tracing import make_tracing; "
        "from cloze.service.settings import Settings; assert make_tracing(Settings()) is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(StartupError, match="traces need further packages; run: "):
        make_tracing(Settings(traces_endpoint="http://localhost:4318"))
