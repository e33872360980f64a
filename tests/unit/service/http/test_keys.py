"""Keys, clients, errors and paths of requests, without a server."""

import hashlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cloze.service import errors
from cloze.service.errors import Overloaded, RateLimited, StartupError
from cloze.service.http.errors import describe_error, rejection
from cloze.service.http.keys import Key, KeyEntry, Keys
from cloze.service.http.record import Callers, Paths, timeout_s
from cloze.service.http.watched_files import WatchedFiles
from tests.support.records import pairs, recorded
from tests.support.refusals import check_table, refused


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(requests: int | None = None, tokens: int | None = None) -> KeyEntry:
    limits: Any = {"requests_per_minute": requests, "tokens_per_minute": tokens}
    return KeyEntry(sha256=digest("k"), scopes=["inference"], **limits)


def sent(key: Any, now: float, most: int = 1000) -> int:
    """Return how many requests a key may send at once."""
    for count in range(most):
        try:
            key.count(now)
        except Overloaded:
            return count
    return most


def told_s(key: Key, now: float) -> float:
    """Return after which time a key that sent too much may come back."""
    with pytest.raises(RateLimited) as caught:
        key.count(now)
    assert caught.value.reason is errors.Rejection.KEY_LIMIT
    return caught.value.retry_after_s


def test_a_key_may_send_its_requests_at_once_and_no_more_after_an_idle_hour() -> None:
    key = Key("team", entry(60))
    assert sent(key, 100.0) == 60
    assert sent(key, 100.0) == 0
    assert sent(key, 103.0) == 3
    assert sent(key, 3703.0) == 60
    assert sent(Key("team", entry(None)), 0.0) == 1000, "no limit"


def test_a_refused_key_is_told_when_to_come_back() -> None:
    key = Key("team", entry(6))
    assert sent(key, 0.0) == 6
    assert told_s(key, 2.0) == pytest.approx(8)
    key.count(10.0)
    assert told_s(key, 19.0) == pytest.approx(1)
    key.count(20.5)


def test_tokens_are_taken_when_they_are_known_and_may_be_owed() -> None:
    key = Key("team", entry(tokens=600))
    for now in (0.0, 0.1):  # both are admitted before their tokens are known
        key.count(now)
    key.take_tokens(1000, 1.0)
    key.take_tokens(1000, 1.0)
    assert told_s(key, 1.0) == pytest.approx(140.1)
    key.take_tokens(-1000, 2.0)  # one of them had no result
    assert told_s(key, 2.0) == pytest.approx(39.1)
    key.count(41.2)
    key = Key("team", entry(tokens=60))
    key.count(0.0)
    key.take_tokens(60, 50.0)
    assert told_s(key, 50.9), "an idle minute before that saves nothing up"


def test_a_request_that_one_limit_refuses_costs_nothing_of_the_other() -> None:
    key = Key("team", entry(2, 60))
    key.count(0.0)
    key.take_tokens(69, 0.0)
    for _ in range(5):
        with refused("rate_limited", 60):
            key.count(0.0)
    key.count(10.0)
    assert told_s(key, 10.0) == pytest.approx(20)


TABLE = '[{name}]\nsha256 = "{digest}"\nscopes = ["inference", "metrics"]\n'


def file_of(path: Path, **keys: str) -> Path:
    tables = [TABLE.format(name=name, digest=digest(key)) for name, key in keys.items()]
    path.write_text("".join(tables))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with one key."""
    return file_of(tmp_path / "keys", one="first")


def test_a_key_is_found_by_its_hash(tmp_path: Path) -> None:
    keys = Keys(file_of(tmp_path / "keys", one="first", two="second"))
    for header, name in (
        (b"Bearer first", "one"),
        (b"bearer second", "two"),
        (b"BEARER   first  ", "one"),
        (b"Bearer third", None),
        (b"Basic first", None),
        (b"first", None),
        (b"", None),
    ):
        key = keys.find(header)
        assert (key.name if key else None) == name


def test_files_of_keys_that_are_refused(tmp_path: Path) -> None:
    """`keys.txt` has the kind of a fault, a file in Python, and the refusal per line."""
    table = TABLE.format(name="one", digest=digest("k"))

    def outcome(_: str, content: str) -> str:
        (tmp_path / "keys").unlink(missing_ok=True)
        if (text := eval(content, {"TABLE": table, "DIGEST": digest("k")})) is not None:
            (tmp_path / "keys").write_text(text)
        with pytest.raises(StartupError) as error:
            Keys(tmp_path / "keys")
        message = str(error.value).replace(str(tmp_path), "FOLDER")
        return re.sub("no TOML: .*", "no TOML", message)  # the interpreter's own words

    check_table(Path(__file__).with_name("keys.txt"), outcome)


@pytest.mark.parametrize(
    ("written", "expires"),
    [
        ("2030-01-31", "2030-01-31T00:00:00+00:00"),
        ("2030-01-31 12:00:00+02:00", "2030-01-31T10:00:00+00:00"),
        ('"2030-01-31T12:00Z"', "2030-01-31T12:00:00+00:00"),
    ],
)
def test_a_key_ends_at_its_time(file: Path, written: str, expires: str) -> None:
    end = datetime.fromisoformat(expires)
    file.write_text(f"{file.read_text()}expires = {written}\n")
    key = Keys(file).find(b"Bearer first")
    assert key.expires_before(end.timestamp())
    assert not key.expires_before(end.timestamp() - 1)


def test_the_log_warns_of_keys_that_expire_within_two_weeks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    tables = [TABLE.format(name="ever", digest=digest("ever"))]
    for name, days in (("past", -100), ("soon", 13), ("later", 15)):
        table = TABLE.format(name=name, digest=digest(name))
        tables.append(f"{table}expires = {now + timedelta(days)}\n")
    (tmp_path / "keys").write_text("".join(tables))
    Keys(tmp_path / "keys")
    (line,) = caplog.messages
    assert line == (
        "keys that expire within 14 days: "
        f"past ({now - timedelta(100)}), soon ({now + timedelta(13)})"
    )


def test_a_file_of_keys_has_a_limit(file: Path) -> None:
    text = file.read_text()
    file.write_text(text + "#" * (1_000_000 - len(text)))
    assert Keys(file).find(b"Bearer first")
    file.write_text(file.read_text() + "#")
    with pytest.raises(StartupError, match="has more than 1000000 bytes"):
        Keys(file)


def test_a_changed_file_is_read_again_and_counts_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cloze")
    file = file_of(tmp_path / "keys", one="first", two="second")
    limited = f'[slow]\nsha256 = "{digest("k")}"\nscopes = ["inference"]\ntokens_per_minute = 1\n'
    file.write_text(file.read_text() + limited)
    keys = Keys(file)
    one, two = keys.find(b"Bearer first"), keys.find(b"Bearer second")
    slow = keys.find(b"Bearer k")
    slow.take_tokens(1, 1.0)
    keys.file.look()
    assert caplog.messages == [], "it has not changed"
    changed = "requests_per_minute = 2\n"  # of the key "three", and then of the key "one"
    file_of(file, two="other", three="third", one="first")
    file.write_text(file.read_text() + changed)
    rotated = limited.replace(f'"{digest("k")}"', f'["{digest("k")}", "{digest("new")}"]')
    file.write_text(file.read_text() + rotated)
    keys.file.look()
    keys.file.look()
    assert caplog.messages == ["read the keys again"]
    assert keys.find(b"Bearer third") is not None
    for each in (b"Bearer k", b"Bearer new"):
        again = keys.find(each)
        with refused("rate_limited", 1):  # its limit has not changed
            again.count(1.0)
    assert keys.find(b"Bearer second") is None
    assert keys.find(b"Bearer other") is not two
    assert keys.find(b"Bearer first") is not one, "its entry is another"
    file.write_text(file.read_text().replace("tokens_per_minute = 1", "tokens_per_minute = 60"))
    keys.file.look()
    assert sent(keys.find(b"Bearer k"), 1.0) == 1000, "another limit begins anew"


def test_files_whose_permissions_change_are_read_again(file: Path) -> None:
    modes: list[int] = []
    files = WatchedFiles([file], lambda: modes.append(file.stat().st_mode & 0o777), "keys")
    files.read()
    files.look()
    first = file.stat()
    while file.stat().st_ctime_ns == first.st_ctime_ns:  # its clock has ticks of milliseconds
        file.chmod(0o640)
    files.look()
    assert modes == [first.st_mode & 0o777, 0o640]


NO_FLOAT = f"[a]\nsha256 = '{'0' * 64}'\nscopes = ['admin']\ntokens_per_minute = {'9' * 400}"


@pytest.mark.parametrize(
    "text", ["# all comments", "\xff", None, pytest.param(NO_FLOAT, id="no float")]
)
def test_a_file_without_keys_is_refused_as_a_damaged_one_is(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """The old keys stay, and the log has one error."""
    keys = Keys(file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text, "latin-1")
    keys.file.look()
    keys.file.look()
    assert keys.find(b"Bearer first")
    assert keys.file.problem
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == f"the old keys stay: {keys.file.problem}"
    file_of(file, two="second")
    keys.file.look()
    assert not keys.file.problem
    assert keys.find(b"Bearer first") is None


def test_a_file_says_that_it_is_meant_to_have_no_keys(file: Path) -> None:
    keys, table = Keys(file), file.read_text()
    file.write_text("no_keys = true\n")
    keys.file.look()
    assert keys.find(b"Bearer first") is None
    assert not keys.file.problem
    file.write_text(f"no_keys = true\n{table}")
    with pytest.raises(StartupError, match="has keys, and the line `no_keys = true` too"):
        keys.file.read()
    assert keys.find(b"Bearer first") is None


def headers(**sent: str) -> dict[bytes, bytes]:
    return dict(pairs(sent))


def test_a_client_is_its_address_or_its_key(file: Path) -> None:
    assert recorded(client="192.0.2.7").client == "192.0.2.7"
    assert recorded(client=None).client == ""
    proxied = recorded(client="10.0.0.1", x_forwarded_for="192.0.2.1")
    assert proxied.client == "10.0.0.1", "no proxy is trusted"
    callers = Callers(keys=Keys(file))
    first, again = (recorded(callers=callers, authorization="Bearer first") for _ in range(2))
    assert first.client == "key:one"
    assert first.key is again.key is not None
    assert recorded(callers=callers, authorization="Bearer other").client == "a"
    assert recorded(callers=callers).key is None
    assert recorded(authorization="Bearer first").key is None


def test_a_request_states_its_time() -> None:
    for value, seconds in (("1", 0.001), ("1500", 1.5), ("30000", 30.0), ("0001", 0.001)):
        assert timeout_s(headers(x_request_timeout_ms=value), 30.0) == seconds
    for value in ("0", "30001", "-1", "1.5", "", "1e3", "\u00b2", "1" * 16):
        with refused("invalid_value", 1, 30000):
            timeout_s(headers(x_request_timeout_ms=value), 30.0)
    both = pairs({"x_stainless_read_timeout": "9", "x_request_timeout_ms": "1500"})
    for order in (both, both[::-1]):
        assert timeout_s(dict(order), 30.0) == 1.5, "not that of the OpenAI client"
    assert timeout_s({}, 30.0) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2.5", 2.5), ("600", 30.0), ("0.001", 0.001), ("0.0009", None), ("0", None), ("-1", None),
     ("nan", None), ("1e3", None), ("9" * 9, 30.0), ("9" * 10, None), ("1." + "0" * 9, 1.0),
     ("1." + "0" * 10, None), ("1.", None), (".5", None), ("5\n", None)],
)  # fmt: skip
def test_the_time_that_the_openai_client_waits(value: str, seconds: float | None) -> None:
    assert timeout_s(headers(x_stainless_read_timeout=value), 30.0) == seconds


def test_what_the_headers_of_a_request_say(file: Path) -> None:
    callers = Callers(keys=Keys(file), max_timeout_s=30.0)
    sent = {"authorization": "Bearer first", "x_request_timeout_ms": "1500", "x_request_id": "mine"}
    record = recorded(callers=callers, **sent)
    assert record.key is not None
    assert (record.client, record.stated_s, record.terms_problem) == ("key:one", 1.5, "")
    assert (record.method, record.path, record.route) == ("POST", "/embed", "/embed")
    assert (record.identity, record.headers) == (b"mine", pairs(sent))
    assert record.model == record.error == ""
    assert (record.limit_s, record.deadline) == (1.5, record.arrived + 1.5)
    wrong = recorded(callers=callers, route="other", x_request_timeout_ms="30001")
    assert (wrong.key, wrong.stated_s, wrong.route) == (None, None, "other")
    assert wrong.limit_s == 30.0
    assert wrong.terms_problem == (
        "x-request-timeout-ms: a whole number from 1 to 30000, got '30001'"
    )


def test_ids_of_requests() -> None:
    good = "aZ09._:/+=-" + "x" * 117
    assert recorded(x_request_id=good).identity == good.encode()
    for wrong in ("", good + "x", "a b", "a\n", "\u00e9"):
        made = recorded(x_request_id=wrong).identity
        assert made != wrong.encode("latin-1")
        assert len(made) == 16
    assert recorded().identity != recorded().identity


REJECTIONS = {
    errors.DeadlineExceeded: errors.Rejection.TIMEOUT,
    errors.ShuttingDown: errors.Rejection.SHUTTING_DOWN,
    errors.EngineDead: errors.Rejection.ENGINE_DEAD,
}


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        (errors.ShuttingDown, {"retry-after": "1"}),
        (errors.EngineDead, {"retry-after": "1"}),
        (errors.AdapterUnavailable, {"retry-after": "1"}),
        (errors.Unauthorized, {"www-authenticate": "Bearer"}),
        (errors.UnsupportedEncoding, {"accept-encoding": "gzip"}),
        (errors.SlowRequest, {"connection": "close"}),
        (errors.DeadlineExceeded, {}),
        (errors.InvalidRequest, {}),
    ],
)
def test_headers_and_reasons_of_errors(kind: Any, headers: dict[str, str]) -> None:
    info = described(kind("x"))
    assert info.headers == headers
    assert (info.message, info.code) == ("x", kind.code)
    assert rejection(kind("x")) is REJECTIONS.get(kind)


def test_a_refusal_says_when_to_come_back() -> None:
    times = ((7, 7, 7000), (1.2001, 2, 1201), (0.0, 1, 1), (0.5, 1, 500), (-3, 1, 1))
    for seconds, whole, milliseconds in times:
        refusal = Overloaded("x", seconds, errors.Rejection.MEMORY)
        headers = {"retry-after": f"{whole}", "retry-after-ms": f"{milliseconds}"}
        assert described(refusal).headers == headers
        assert rejection(refusal) is errors.Rejection.MEMORY


def described(error: Exception, path: str = "/x") -> Any:
    scope = {"type": "http", "method": "PUT", "path": path, "headers": [], "server": ("h", 1)}
    return describe_error(Request(scope), error)


def test_errors_of_the_router_and_of_bugs() -> None:
    missing = described(HTTPException(404))
    other = described(HTTPException(405, headers={"allow": "GET"}))
    assert (missing.status, other.status, other.headers) == (404, 405, {"allow": "GET"})
    assert missing.kind == other.kind == "Validation"
    long = described(HTTPException(404), "/" + "x" * 500)
    assert long.message == f"there is no route '/{'x' * 118}; see /docs"
    bug = described(ValueError("secret"))
    assert rejection(ValueError()) is None
    assert (bug.status, bug.kind) == (500, "Backend")
    assert "secret" not in bug.message


def test_routes_of_paths() -> None:
    paths = Paths(["/embed", "/models/{name}", "/v2/models/{name}/infer", "/a.b/{x}"])
    for path, route in (
        ("/embed", "/embed"),
        ("/embed/", None),
        ("/models/x", "/models/{name}"),
        ("/models/", None),
        ("/models/x/y", None),
        ("/v2/models/x/infer", "/v2/models/{name}/infer"),
        ("/v2/models/x/infer/more", None),
        ("/a.b/c", "/a.b/{x}"),
        ("/aXb/c", None),
        ("/models/{name}", "/models/{name}"),
    ):
        assert paths.route(path) == route
