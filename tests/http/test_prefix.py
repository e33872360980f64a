"""A server below a path of a proxy that speaks TLS to the clients: every address is relative."""

import re
from urllib.parse import urljoin

import httpx

from tests.support.serving import Server

PREFIX = "/nlp/v7"
OUTSIDE = ("/page/%2e%2e/settings.py", "/page/..%2fsettings.py", "/page//etc/passwd")


def test_every_address_of_a_page_is_below_its_path(server: Server) -> None:
    prefix = f"https://host{PREFIX}"
    for page in ("/", "/docs"):
        text = httpx.get(server.url + page).text
        named = re.findall(r"(?:href|src)=\"([^\"]+)\"|url: '([^']+)'", text)
        addresses = [urljoin(prefix + page, one or other) for one, other in named]
        linked = [address for address in addresses if not address.startswith("data:")]
        assert len(linked) >= 4, page
        for address in linked:
            path = address.removeprefix(prefix)
            assert httpx.get(server.url + path).status_code == 200, address
    [api] = httpx.get(f"{server.url}/openapi.json").json()["servers"]
    assert urljoin(f"{prefix}/openapi.json", api["url"]) == f"{prefix}/"


def test_a_redirect_names_neither_scheme_nor_host(server: Server) -> None:
    for path, target in {
        "/docs/": "/docs",
        "/info/": "/info",
        "/embed/": "/embed",
        "/info/?x=1&y=%2F": "/info?x=1&y=%2F",
        "/v2/models/bert/": "/v2/models/bert",
        "/page/style.css/": "/page/style.css",
    }.items():
        method = "POST" if path == "/embed/" else "GET"
        location = httpx.request(method, server.url + path).headers["location"]
        assert urljoin(f"https://host{PREFIX}{path}", location) == f"https://host{PREFIX}{target}"
    for path in ("/nothing/", "//", "//evil.example/", "/info//", "/docs/assets", *OUTSIDE):
        assert httpx.get(server.url + path).status_code == 404, path
    assert httpx.post(f"{server.url}/info/").status_code == 405
