"""Keys, TLS, hosts, origins: who may send a request, and what a browser may do."""

import hashlib
import http.client
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient

from cloze.client import Client
from cloze.service.http.certificate import Certificate as TlsCertificate
from cloze.service.http.keys import Keys
from tests.support.certificates import Certificate, make_certificate
from tests.support.refusals import error_of
from tests.support.serving import Server, bare_environment, failed_start, running_server
from tests.support.waiting import wait_until

BODY = {"inputs": "walk"}


def cloze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cloze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


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


@pytest.fixture(scope="module", params=[(), ("--frontends", "1")], ids=["one", "front-ends"])
def guarded(
    request: pytest.FixtureRequest, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    options = {
        "team": (),
        "scraper": ("--scope", "metrics"),
        "slow": ("--requests-per-minute", "3"),
        "reader": ("--tokens-per-minute", "20"),
        "gone": ("--expires", "2020-01-31"),
    }
    for name, words in options.items():
        made = cloze("keys", "add", name, "--file", str(file), *words)
        assert made.returncode == 0, made.stderr
        keys[name] = made.stdout.strip()
    arguments = ("--keys-file", str(file), "--model", "bert", *request.param)
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


@pytest.mark.parametrize("path", ["/embed", "/", "/v1/embeddings", "/tokenize", "/rerank"])
def test_without_a_key_nothing_runs(guarded: Guarded, path: str) -> None:
    body = {"input": "walk", "model": "bert"} if path.startswith("/v1") else BODY
    for key in ("", "wrong", "team "[:3]):
        refused = guarded.post(path, key, body)
        assert error_of(refused) == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"]
    shape = guarded.post(path, "", body).json()["error"]
    assert isinstance(shape, dict) == path.startswith("/v1")


def test_a_key_allows_its_scope_only(guarded: Guarded) -> None:
    assert guarded.post("/embed", "team").status_code == 200
    assert guarded.get("/info", "team").status_code == 200
    refused = guarded.post("/embed", "scraper")
    assert error_of(refused) == (403, "forbidden")
    assert guarded.get("/metrics", "scraper").status_code == 200
    assert guarded.get("/metrics", "team").status_code == 403
    assert guarded.get("/metrics").status_code == 401


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("POST", "/admin/reload")], ids=["metrics", "admin"]
)
@pytest.mark.parametrize("spelling", ["plain", "one-letter", "all-letters", "absolute"])
def test_a_scope_holds_for_every_spelling_of_a_path(
    guarded: Guarded, method: str, path: str, spelling: str
) -> None:
    target = {
        "plain": path,
        "one-letter": path.replace("m", "%6D"),
        "all-letters": "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:]),
        "absolute": f"http://localhost{path}",
    }[spelling]
    address = guarded.server.url.removeprefix("http://")
    # An encoded spelling is no route, so a key without the scope learns nothing from it.
    without_scope = 404 if "letter" in spelling else 403
    for key, status in (("", 401), ("team", without_scope)):
        headers = {"authorization": f"Bearer {guarded.keys[key]}"} if key else {}
        with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
            connection.request(method, target, headers=headers)
            assert connection.getresponse().status == status


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
    refused = cloze("ask", "embed", "walk", "--url", guarded.server.url)
    assert refused.returncode == 1
    assert "Authorization: Bearer KEY" in refused.stderr


def test_probes_and_pages_need_no_key(guarded: Guarded) -> None:
    for path in ("/healthz", "/readyz", "/health", "/", "/docs", "/page/page.js"):
        assert guarded.get(path).status_code == 200, path
    assert guarded.get("/info").status_code == 401


def test_a_key_has_its_own_limit(guarded: Guarded) -> None:
    statuses = [guarded.post("/embed", "slow").status_code for _ in range(5)]
    assert statuses.count(200) == 3
    refused = guarded.post("/embed", "slow")
    assert error_of(refused) == (429, "rate_limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 21
    assert guarded.post("/embed", "team").status_code == 200


def test_a_key_has_its_own_limit_of_tokens(guarded: Guarded) -> None:
    """A request without a result costs nothing; tokens beyond the limit are owed."""
    many = {"inputs": ["walk " * 20] * 20}
    headers = {"authorization": f"Bearer {guarded.keys['reader']}"}
    for limit_ms in range(1, 100):
        headers["x-request-timeout-ms"] = str(limit_ms)
        late = httpx.post(f"{guarded.server.url}/embed", json=many, headers=headers)
        if late.status_code != 408:  # else its body had not arrived
            break
    assert late.status_code == 504, late.text
    answered = guarded.post("/embed", "reader", many)
    assert answered.status_code == 200, answered.text
    tokens = int(answered.headers["x-compute-tokens"])
    assert tokens > 400
    wait_s = (tokens - 19) * 3  # at 20 per minute, until one is left
    body = {"input": "walk", "model": "bert"}
    for path, sent, shape in (("/embed", BODY, str), ("/v1/embeddings", body, dict)):
        refused = guarded.post(path, "reader", sent)
        assert error_of(refused) == (429, "rate_limited")
        assert wait_s - 30 <= int(refused.headers["retry-after"]) <= wait_s
        assert isinstance(refused.json()["error"], shape)
    assert guarded.post("/embed", "team").status_code == 200


def test_a_key_expires(guarded: Guarded) -> None:
    for path, sent in (("/embed", BODY), ("/v1/embeddings", {"input": "walk", "model": "bert"})):
        refused = guarded.post(path, "gone", sent)
        assert error_of(refused) == (401, "key_expired")
    warned = "keys that expire within 14 days: gone (2020-01-31 00:00:00+00:00)\n"
    assert any(line.endswith(warned) for line in guarded.server.log)
    end = (datetime.now(UTC) + timedelta(seconds=4)).isoformat()
    key = cloze("keys", "add", "brief", "--expires", end, "--file", str(guarded.file))
    statuses: list[int] = []

    def has_expired() -> bool:
        answer = guarded.post("/embed", key.stdout.strip())
        statuses.append(answer.status_code)
        return answer.headers.get("x-error-code") == "key_expired"

    wait_until(has_expired)
    assert 200 in statuses
    assert cloze("keys", "remove", "brief", "--file", str(guarded.file)).returncode == 0


def test_a_changed_file_is_read_again(guarded: Guarded) -> None:
    made = cloze("keys", "add", "new", "--file", str(guarded.file))
    key = made.stdout.strip()
    wait_until(lambda: guarded.post("/embed", key).status_code == 200)
    assert cloze("keys", "remove", "new", "--file", str(guarded.file)).returncode == 0
    wait_until(lambda: guarded.post("/embed", key).status_code == 401)
    old = guarded.file.read_text()
    guarded.file.write_text("[broken\n")

    def old_keys_stay() -> bool:
        assert guarded.post("/embed", "team").status_code == 200
        return any("the old keys stay" in line for line in guarded.server.log)

    wait_until(old_keys_stay)
    guarded.file.write_text(old)


def failed(store: Path, *arguments: str) -> str:
    options = ("--model-store", str(store), "--model", "bert", *arguments)
    return failed_start(*options, env=bare_environment()).splitlines()[-1]


def test_the_last_key_can_be_removed(tmp_path: Path) -> None:
    """The command says in the file that this is meant, and takes it back with the next key."""
    file = tmp_path / "keys.toml"
    made = cloze("keys", "add", "only", "--file", str(file))
    key = made.stdout.strip()
    assert f"chmod 644 {file}" in made.stderr, "the user of an image could not read it"
    keys = Keys(file)
    assert keys.find(b"Bearer " + key.encode()) is not None
    removed = cloze("keys", "remove", "only", "--file", str(file))
    assert removed.returncode == 0
    assert "refuses everybody" in removed.stderr
    assert file.read_text() == "no_keys = true\n"
    keys.file.look()
    assert keys.find(b"Bearer " + key.encode()) is None
    assert cloze("keys", "list", "--json", "--file", str(file)).stdout == ""
    next_key = cloze("keys", "add", "next", "--file", str(file)).stdout.strip()
    keys.file.look()
    assert keys.find(b"Bearer " + next_key.encode()) is not None


def test_a_missing_keys_file_stops_the_start(tiny_store: Path) -> None:
    line = failed(tiny_store, "--keys-file", "nowhere.toml")
    assert "the keys file nowhere.toml cannot be read: No such file" in line


# ---- hosts, origins, pages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200),
        ("evil.example", 403), ("localhost.evil.example", 403), ("evil.example:8000", 403),
        ("", 403),
    ],
)  # fmt: skip
def test_on_loopback_other_hosts_are_refused(every_task: Server, host: str, status: int) -> None:
    """A page of another site cannot reach the server by a name of its own."""
    answer = httpx.get(f"{every_task.url}/readyz", headers={"host": host})
    assert answer.status_code == status


def test_what_a_kubelet_and_a_prometheus_ask_is_answered_under_an_address(
    every_task: Server,
) -> None:
    """They ask a pod by its address. No page of another site has that as its name."""
    headers = {"host": "10.0.0.7:8000"}
    for path in ("/healthz", "/readyz", "/health", "/metrics", "/v2/health/live"):
        assert httpx.get(every_task.url + path, headers=headers).status_code == 200, path
    for path in ("/", "/info", "/docs"):
        assert httpx.get(every_task.url + path, headers=headers).status_code == 403, path
    refused = httpx.post(f"{every_task.url}/embed", json={"inputs": "a"}, headers=headers)
    assert refused.status_code == 403


def test_origins_are_refused_unless_named(tiny_store: Path, every_task: Server) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    plain = httpx.options(f"{every_task.url}/embed", headers=asks)
    assert "access-control-allow-origin" not in plain.headers
    with running_server(
        tiny_store, "--model", "bert", CLOZE_CORS_ORIGINS="https://app.example"
    ) as server:
        allowed = httpx.options(f"{server.url}/embed", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        answer = httpx.post(f"{server.url}/embed", json=BODY, headers={"origin": asks["origin"]})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        own = "authorization, x-expect-embedding-space, x-request-class, x-stainless-lang"
        wanted = httpx.options(
            f"{server.url}/embed", headers=asks | {"access-control-request-headers": own}
        )
        assert wanted.status_code == 200
        assert wanted.headers["access-control-allow-headers"] == own
        raw = {"origin": asks["origin"], "accept": "application/octet-stream; dtype=int8"}
        body = BODY | {"unknown": 1}
        answer = httpx.post(f"{server.url}/embed", json=body, headers=raw)
        assert answer.status_code == 200
        readable = set(answer.headers["access-control-expose-headers"].split(", "))
        assert {
            "x-shape", "x-dtype", "x-scale", "x-lengths", "x-embedding-space", "x-warning",
            "x-ranked-by", "x-request-id", "x-model", "x-error-code", "retry-after", "retry-after-ms",
        } <= readable  # fmt: skip
        assert {name for name in answer.headers if name.startswith("x-")} <= readable
        assert {"x-warning", "x-scale"} <= answer.headers.keys()
        other = httpx.options(
            f"{server.url}/embed", headers=asks | {"origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers


# ---- TLS -----------------------------------------------------------------------------------------


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
            plain = server.url.replace("https", "http")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{plain}/healthz")
            assert client.get(f"{server.url}/healthz").status_code == 200


def served_certificate(server: Server) -> str:
    host, port = server.url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


@pytest.mark.parametrize(
    ("ciphers", "accepted"),
    [
        ("ECDHE-RSA-AES128-GCM-SHA256", True),
        ("ECDHE-RSA-CHACHA20-POLY1305", True),
        ("ECDHE-RSA-AES128-SHA", False),  # CBC
        ("ECDHE-RSA-AES256-SHA384", False),  # CBC
        ("AES128-GCM-SHA256", False),  # RSA key exchange
        ("AES256-SHA", False),
    ],
)
def test_tls_1_2_has_forward_secrecy_and_authenticated_encryption(
    certificate: Certificate, ciphers: str, accepted: bool
) -> None:
    served = TlsCertificate(certificate.public, certificate.private)
    served.files.read()
    assert served.context is not None
    client = ssl.create_default_context(cafile=str(certificate.public))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers(f"{ciphers}:@SECLEVEL=0")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="localhost"),
        served.context.wrap_bio(there, back, server_side=True),
    ]
    pending = ends
    try:
        for _ in range(6):
            pending = [end for end in pending if not is_done(end)]
    except ssl.SSLError:
        assert not accepted
    else:
        assert accepted
        assert not pending
        assert ends[0].version() == "TLSv1.2"


def is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


@pytest.mark.parametrize("mode", [(), ("--frontends", "1")], ids=["one", "front-ends"])
def test_a_renewed_certificate_is_served(
    tiny_store: Path, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """As the files are replaced: one after the other, so that they do not fit for a moment."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    served, renewed = make_certificate(tmp_path / "old"), make_certificate(tmp_path / "new")
    arguments = ("--tls-certificate", str(served.public), "--tls-key", str(served.private))
    with running_server(tiny_store, *arguments, "--model", "bert", *mode) as server:
        before = served_certificate(server)
        renewed.public.replace(served.public)
        wait_until(lambda: any("the old certificate and key stay" in line for line in server.log))
        assert served_certificate(server) == before
        new = served.public.read_text()
        renewed.private.replace(served.private)
        wait_until(lambda: served_certificate(server).split() == new.split())


def test_a_wrong_certificate_stops_the_start(
    tiny_store: Path, certificate: Certificate, tmp_path: Path
) -> None:
    public, private = map(str, certificate)
    line = failed(tiny_store, "--tls-certificate", public)
    assert "tls_certificate and tls_key belong together" in line
    (tmp_path / "x.pem").write_text("nothing")
    for first, second in ((str(tmp_path / "x.pem"), private), (public, "nowhere.pem")):
        line = failed(tiny_store, "--tls-certificate", first, "--tls-key", second)
        assert "or its key cannot be used" in line


def test_an_open_address_without_keys_is_reported(tiny_store: Path) -> None:
    with running_server(tiny_store, "--model", "bert", CLOZE_HOST="0.0.0.0") as server:
        wait_until(lambda: any("no key is needed" in line for line in server.log))
    with running_server(
        tiny_store, "--model", "bert", CLOZE_HOST="0.0.0.0", CLOZE_ALLOW_ANONYMOUS="1"
    ) as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert not any("no key is needed" in line for line in server.log)
