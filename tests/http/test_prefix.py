"""A server below a path of a proxy that speaks TLS to the clients: every address is relative."""

import re
from collections.abc import Callable
from urllib.parse import urljoin

import httpx
import pytest

from cloze.service.errors import StartupError
from cloze.service.settings import load_settings
from tests.support.serving import Server

Servers = Callable[[tuple[str, ...]], Server]

PREFIX = "/nlp/v7"
HTML = {"accept": "text/html,*/*"}
OUTSIDE = ("/page/%2e%2e/settings.py", "/page/..%2fsettings.py", "/page//etc/passwd")


def test_every_address_of_a_page_is_below_its_path(server: Server) -> None:
    prefix = f"https://host{PREFIX}"
    for page in ("/", "/docs"):
        text = httpx.get(server.url + page, headers=HTML).text
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


def linked(page: httpx.Response, seen_at: str) -> list[str]:
    """Return the addresses of a page, as a browser resolves those that it sees at an address."""
    base = re.search(r'<base href="([^"]+)">', page.text)
    begin = urljoin(seen_at, base[1]) if base else seen_at
    named = re.findall(r"(?:link|script|a) [^>]*(?:href|src)=\"([^\"]+)\"", page.text)
    return [urljoin(begin, name) for name in named if not name.startswith("data:")]


def test_a_page_at_the_path_itself_has_a_base(server: Server) -> None:
    """A proxy removes the path, and says which one; the page is seen without a slash at its end."""
    for sent in (PREFIX, f"{PREFIX}/", "/nlp, /v7"):
        headers = {"x-forwarded-prefix": sent}
        page = httpx.get(server.url, headers=headers | HTML)
        found = linked(page, f"https://host{PREFIX}")
        assert len(found) >= 4
        assert all(address.startswith(f"https://host{PREFIX}/") for address in found)
        assert "base-uri 'self'" in page.headers["content-security-policy"]
        assert page.headers["vary"] == "x-forwarded-prefix, accept"
        assert linked(httpx.get(f"{server.url}/docs", headers=headers), "https://host/any") != []
        document = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
        assert document["servers"] == [{"url": PREFIX}]
    assert httpx.post(f"{server.url}{PREFIX}/embed", headers=headers).status_code == 404


def test_a_prefix_that_is_no_path_is_ignored(server: Server) -> None:
    plain = httpx.get(server.url, headers=HTML)
    assert "<base" not in plain.text
    assert "base-uri 'none'" in plain.headers["content-security-policy"]
    others = ("//evil.example", "nlp", "/a/../b", "/a b", "https://evil.example/", ",,", "/%22")
    for wrong in ("/a" * 101, '/"><script>', *others):
        page = httpx.get(server.url, headers={"x-forwarded-prefix": wrong} | HTML)
        assert page.text == plain.text, wrong
        document = httpx.get(f"{server.url}/openapi.json", headers={"x-forwarded-prefix": wrong})
        assert document.json()["servers"] == [{"url": "."}]


def test_a_root_path_is_answered_with_and_without_it(servers: Servers) -> None:
    server = servers(("--root-path", f"{PREFIX}/", "--predict-route", "/any/1:predict",
                      "--health-route", "/v1/models/any"))  # fmt: skip
    for begin in ("", PREFIX):
        for path in ("/", "/docs", "/info", "/healthz", "/v1/models/any", "/openapi.json"):
            assert httpx.get(server.url + begin + path).status_code == 200, begin + path
        embedded = httpx.post(f"{server.url}{begin}/embed", json={"inputs": "the king"}).json()
        body = {"instances": ["the king"]}
        predicted = httpx.post(f"{server.url}{begin}/any/1:predict", json=body).json()
        assert predicted == {"predictions": [embedded]}
    for address in (f"{server.url}{PREFIX}", server.url):
        page = httpx.get(address, headers=HTML)
        assert all(a.startswith(f"https://host{PREFIX}/") for a in linked(page, "https://host/x"))
    other = httpx.get(server.url, headers={"x-forwarded-prefix": "/other"} | HTML)
    assert '<base href="/other/">' in other.text
    for path in (f"{PREFIX}x/info", f"{PREFIX}{PREFIX}/info", "/nlp/info"):
        assert httpx.get(server.url + path).status_code == 404, path
    moved = httpx.get(f"{server.url}{PREFIX}/info/").headers["location"]
    assert urljoin(f"https://host{PREFIX}/info/", moved) == f"https://host{PREFIX}/info"
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'route="/embed"' in metrics
    assert PREFIX not in metrics


@pytest.mark.parametrize(
    "path", ["nlp", "/a//b", "/a/../b", "/.", "//host", "/a b", "/" + "a" * 200]
)
def test_a_root_path_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(StartupError, match="--root-path"):
        load_settings({"root_path": path})
