"""Keys, TLS, hosts, origins: who may send a request, and what a browser may do."""

import hashlib
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient

from cloze.client import Client
from cloze.service.http.certificate import Certificate as TlsCertificate
from cloze.service.http.keys import Keys
from cloze.service.server.listen import bind, listen
from cloze.service.settings import Settings
from tests.support.certificates import Certificate, make_certificate
from tests.support.command import cloze, cloze_here
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

BODY = {"inputs": "walk"}
OPENAI_BODY = {"input": "walk", "model": "bert"}


@dataclass(frozen=True)
class Guarded:
    """A server with keys."""

    server: Server
    file: Path
    keys: dict[str, str]

    def get(self, path: str, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}
        return httpx.get(self.server.url + path, headers=headers)

    def post(self, path: str, key: str = "", body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}
        return httpx.post(self.server.url + path, json=body or BODY, headers=headers)


@pytest.fixture(scope="module")
def guarded(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    options = {"team": (), "scraper": ("--scope", "metrics"), "gone": ("--expires", "2020-01-31")}
    for name, words in options.items():
        made = cloze("keys", "add", name, "--file", str(file), *words)
        assert made.returncode == 0, made.stderr
        keys[name] = made.stdout.strip()
    arguments = ("--keys-file", str(file), "--model", "bert", "--frontends", "1")
    with running_server(tiny_store, *arguments) as server:
        yield Guarded(server, file, keys)


def test_the_file_has_no_key_and_is_its_owners(guarded: Guarded) -> None:
    text = guarded.file.read_text()
    assert guarded.file.stat().st_mode & 0o077 == 0
    for key in guarded.keys.values():
        assert key not in text
        assert hashlib.sha256(key.encode()).hexdigest() in text
    listed = cloze("keys", "list", "--file", str(guarded.file))
    assert "team" in listed.stdout


def test_without_a_key_nothing_runs(guarded: Guarded) -> None:
    for path in ("/embed", "/", "/v1/embeddings", "/tokenize", "/rerank"):
        for key in ("", "wrong-key-of-a-client", "team "[:3]):
            refused = guarded.post(path, key, OPENAI_BODY if path.startswith("/v1") else BODY)
            assert error_of(refused) == (401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            assert isinstance(refused.json()["error"], dict) == path.startswith("/v1")
    log = "".join(guarded.server.log)
    assert not any(key in log for key in ("wrong-key-of-a-client", *guarded.keys.values()))


def test_a_key_allows_its_scope_only(guarded: Guarded) -> None:
    assert guarded.post("/embed", "team").status_code == 200
    assert guarded.get("/info", "team").status_code == 200
    refused = guarded.post("/embed", "scraper")
    assert error_of(refused) == (403, "forbidden")
    assert guarded.get("/metrics", "scraper").status_code == 200
    assert guarded.get("/metrics", "team").status_code == 403
    assert guarded.get("/metrics").status_code == 401


def test_released_clients_send_keys(guarded: Guarded) -> None:
    key = guarded.keys["team"]
    with openai.OpenAI(base_url=f"{guarded.server.url}/v1", api_key=key, max_retries=0) as client:
        assert client.embeddings.create(model="bert", input="walk").data
    with InferenceClient(base_url=guarded.server.url, token=key) as hub:
        assert hub.feature_extraction("walk").size
    with Client(guarded.server.url, headers={"authorization": f"Bearer {key}"}) as ours:
        assert ours.embed("walk").size
    asked = cloze("ask", "embed", "walk", "--url", guarded.server.url, "--key", key)
    assert asked.returncode == 0, asked.stderr


def test_the_last_key_can_be_removed(tmp_path: Path) -> None:
    """The command says in the file that this is meant, and takes it back with the next key."""
    file = tmp_path / "keys.toml"
    key = cloze_here("keys", "add", "only", "--file", str(file)).stdout.strip()
    keys = Keys(file)
    assert keys.find(b"Bearer " + key.encode()) is not None
    assert cloze_here("keys", "remove", "only", "--file", str(file)).exit_code == 0
    assert file.read_text() == "no_keys = true\n"
    keys.file.look()
    assert keys.find(b"Bearer " + key.encode()) is None
    assert cloze_here("keys", "add", "next", "--file", str(file)).exit_code == 0
    assert "no_keys" not in file.read_text()


def test_a_changed_file_is_read_again(guarded: Guarded) -> None:
    """Both keys of one that is replaced are valid meanwhile."""
    readable = "\ncloze_keys_file_readable 0.0\n"
    file = ("--file", str(guarded.file))
    old = cloze("keys", "add", "moving", *file).stdout.strip()
    new = cloze("keys", "rotate", "moving", *file).stdout.strip()
    wait_until(lambda: guarded.post("/embed", new).status_code == 200)
    assert guarded.post("/embed", old).status_code == 200
    assert cloze("keys", "remove", "moving", "--old", *file).returncode == 0
    wait_until(lambda: guarded.post("/embed", old).status_code == 401)
    assert guarded.post("/embed", new).status_code == 200
    assert cloze("keys", "remove", "moving", *file).returncode == 0
    wait_until(lambda: guarded.post("/embed", new).status_code == 401)
    assert cloze("keys", "rotate", "nobody", *file).returncode == 1
    text = guarded.file.read_text()
    guarded.file.write_text("[broken\n")
    wait_until(lambda: readable in guarded.get("/metrics", "scraper").text)
    assert guarded.post("/embed", "team").status_code == 200
    guarded.file.write_text(text)


def test_probes_and_pages_need_no_key(guarded: Guarded) -> None:
    for path in ("/healthz", "/readyz", "/health", "/", "/docs", "/page/page.js"):
        assert guarded.get(path).status_code == 200, path
    assert guarded.get("/info").status_code == 401


def test_an_open_address_without_keys_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for allows, lines in ((True, 0), (False, 1)):
        settings = Settings(host="0.0.0.0", port=0, allow_anonymous=allows)
        with bind(settings) as listener:
            listen(listener, settings)
        assert sum("no key is needed" in message for message in caplog.messages) == lines


def test_a_server_on_loopback_refuses_other_hosts_but_for_probes(server: Server) -> None:
    """A page of another site cannot reach it by a name. A kubelet asks a pod by its address."""
    for path, host, status in (
        *((path, "evil.example:8000", 403) for path in ("/", "/info", "/readyz")),
        *((path, "10.0.0.7:8000", 403) for path in ("/", "/info", "/docs")),
        *((path, "10.0.0.7:8000", 200) for path in ("/healthz", "/readyz", "/health", "/metrics")),
        *(("/info", host, 200) for host in ("LOCALHOST:8000", "[::1]:8000")),
    ):
        answer = httpx.get(server.url + path, headers={"host": host})
        assert answer.status_code == status, (path, host)


def test_origins_are_refused_unless_named(tiny_store: Path, every_task: Server) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    plain = httpx.options(f"{every_task.url}/embed", headers=asks)
    assert "access-control-allow-origin" not in plain.headers
    origins = {"CLOZE_CORS_ORIGINS": "https://app.example"}
    with running_server(tiny_store, "--model", "bert", **origins) as server:
        own = "authorization, x-expect-embedding-space, x-request-class, x-stainless-lang"
        wanted = asks | {"access-control-request-headers": own}
        allowed = httpx.options(f"{server.url}/embed", headers=wanted)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert allowed.headers["access-control-allow-headers"] == own
        raw = {"origin": asks["origin"], "accept": "application/octet-stream; dtype=int8"}
        answer = httpx.post(f"{server.url}/embed", json=BODY | {"unknown": 1}, headers=raw)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        readable = set(answer.headers["access-control-expose-headers"].split(", "))
        assert {name for name in answer.headers if name.startswith("x-")} <= readable
        assert {"x-warning", "x-scale"} <= answer.headers.keys()
        assert {"x-lengths", "x-ranked-by", "x-error-code", "retry-after-ms"} <= readable
        evil = asks | {"origin": "https://evil.example"}
        other = httpx.options(f"{server.url}/embed", headers=evil)
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_the_server_speaks_tls(tiny_store: Path, certificate: Certificate) -> None:
    public, private = map(str, certificate)
    arguments = ("--tls-certificate", public, "--tls-key", private, "--model", "bert")
    with running_server(tiny_store, *arguments) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=public)
        with httpx.Client(verify=trusting) as client:
            assert client.post(f"{server.url}/embed", json=BODY).status_code == 200
            metrics = client.get(f"{server.url}/metrics").text
            [end] = re.findall(r"^cloze_certificate_end_timestamp_seconds (\S+)", metrics, re.M)
            assert 86_400 < float(end) - time.time() < 2 * 86_400 + 1
            plain = server.url.replace("https", "http")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{plain}/healthz")
            assert client.get(f"{server.url}/healthz").status_code == 200


def test_a_renewed_certificate_is_served(tiny_store: Path, tmp_path: Path) -> None:
    """As the files are replaced: one after the other, so that they do not fit for a moment."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    served, renewed = make_certificate(tmp_path / "old"), make_certificate(tmp_path / "new")
    arguments = ("--tls-certificate", str(served.public), "--tls-key", str(served.private))
    with running_server(tiny_store, *arguments, "--model", "bert", "--frontends", "1") as server:
        host, port = server.url.removeprefix("https://").split(":")
        before = ssl.get_server_certificate((host, int(port)))
        renewed.public.replace(served.public)
        wait_until(lambda: any("the old certificate and key stay" in line for line in server.log))
        assert ssl.get_server_certificate((host, int(port))) == before
        renewed.private.replace(served.private)
        wait_until(lambda: ssl.get_server_certificate((host, int(port))) != before)


def test_tls_1_2_has_forward_secrecy_and_authenticated_encryption(certificate: Certificate) -> None:
    served = TlsCertificate(certificate.public, certificate.private)
    served.files.read()
    assert served.context.minimum_version == ssl.TLSVersion.TLSv1_2
    ciphers = {each["name"]: each for each in served.context.get_ciphers()}
    assert {"ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-GCM-SHA256"} <= ciphers.keys()
    for name, cipher in ciphers.items():
        is_1_3 = cipher["protocol"] == "TLSv1.3"
        assert (cipher["aead"], cipher["kea"]) == (True, "kx-any" if is_1_3 else "kx-ecdhe"), name


def test_a_key_expires(guarded: Guarded) -> None:
    for path, sent in (("/embed", BODY), ("/v1/embeddings", OPENAI_BODY)):
        assert error_of(guarded.post(path, "gone", sent)) == (401, "key_expired")
    assert any("keys that expire within 14 days: gone" in line for line in guarded.server.log)
