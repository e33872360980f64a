"""A collector of spans on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.loopback import Handler, serving, url_of


class Collector:
    """The spans that a collector on loopback has received."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(
                {each.key: each.value.string_value for each in group.resource.attributes}
            )
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Traces(Handler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.answer(200)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Traces)) as server:
        yield collector, url_of(server)
