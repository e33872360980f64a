"""A server below a path of a proxy that speaks TLS to the clients: every address is relative."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urljoin

import httpx

from tests.support.serving import Server

PREFIX = "/nlp/v7"
OUTSIDE = ("/page/%2e%2e/settings.py", "/page/..%2fsettings.py", "/page//etc/passwd")


@contextmanager
def proxied(server: Server) -> Iterator[str]:
    """Run a proxy that answers below `PREFIX` and passes the rest of the path on."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            address = server.url + self.path.removeprefix(PREFIX)
            headers = {name: self.headers[name] for name in ("host", "content-type") if body}
            answer = httpx.request(self.command, address, content=body, headers=headers)
            self.send_response(answer.status_code)
            for name in ("content-type", "location"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{PREFIX}"
        finally:
            proxy.shutdown()
            thread.join()


def test_pages_and_redirects_work_below_a_path(server: Server) -> None:
    with proxied(server) as url:
        for page in ("/", "/docs"):
            text = httpx.get(url + page).text
            named = re.findall(r"(?:href|src)=\"([^\"]+)\"|url: '([^']+)'", text)
            addresses = [urljoin(url + page, one or other) for one, other in named]
            linked = [address for address in addresses if not address.startswith("data:")]
            assert len(linked) >= 4, page
            for address in linked:
                assert httpx.get(address).status_code == 200, address
        document = f"{url}/openapi.json"
        [api] = httpx.get(document).json()["servers"]
        assert urljoin(document, api["url"]) == f"{url}/"
        for path in ("/docs/", "/info/"):
            followed = httpx.get(url + path, follow_redirects=True)
            assert (followed.status_code, str(followed.url)) == (200, url + path.rstrip("/"))
        followed = httpx.post(f"{url}/embed/", json={"inputs": "walk"}, follow_redirects=True)
        assert followed.status_code == 200
        assert len(followed.json()) == 1


def test_a_redirect_names_neither_scheme_nor_host(server: Server) -> None:
    for path, target in {
        "/info/": "/info",
        "/info/?x=1&y=%2F": "/info?x=1&y=%2F",
        "/v2/models/bert/": "/v2/models/bert",
        "/page/style.css/": "/page/style.css",
    }.items():
        location = httpx.get(server.url + path).headers["location"]
        assert urljoin(f"https://host{PREFIX}{path}", location) == f"https://host{PREFIX}{target}"
    for path in ("/nothing/", "//", "//evil.example/", "/info//", "/docs/assets", *OUTSIDE):
        assert httpx.get(server.url + path).status_code == 404, path
    assert httpx.post(f"{server.url}/info/").status_code == 405
