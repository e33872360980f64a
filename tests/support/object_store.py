"""Servers on loopback that speak as much of S3 and of plain HTTP as reading a model needs."""

import sys
from contextlib import AbstractContextManager
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.loopback import Handler, serving, url_of


class ObjectStore(ThreadingHTTPServer):
    """Serves objects by their path, ``/bucket/key``, and lists those of a bucket as S3 does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.truncates = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may leave before the end of its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return url_of(self)

    @property
    def s3(self) -> dict[str, str]:
        """The variables by which a client of S3 finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


class _Handler(Handler):
    server: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        url = urlsplit(self.path)
        query, path = parse_qs(url.query), unquote(url.path)
        if "list-type" in query:
            return self._answer(200, self._listing(path.strip("/"), query))
        if (data := self.server.objects.get(path)) is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if (wanted := self.headers.get("range")) is None:
            return self._answer(200, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = min(int(last or len(data)), len(data) - 1)
        span = f"bytes {first}-{end}/{len(data)}"
        return self._answer(206, data[int(first) : end + 1], ("content-range", span))

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        keys = [
            (path.removeprefix(f"/{bucket}/"), data)
            for path, data in sorted(self.server.objects.items())
            if path.startswith(f"/{bucket}/{prefix}")
        ]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in keys
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        return body.encode()

    def _answer(self, status: int, data: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("etag", '"x"')
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if self.server.truncates else data)
            self.close_connection = self.server.truncates


def running_object_store() -> AbstractContextManager[ObjectStore]:
    """Run a store on a free port."""
    return serving(ObjectStore())
