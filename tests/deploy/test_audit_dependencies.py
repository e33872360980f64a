"""The audit of pinned versions, by the real pip-audit against a local advisory service."""

import json
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import call
from tests.support.loopback import Handler, serving, url_of

ROOT = Path(__file__).parents[2]
CLEAN, VULNERABLE, FAILED, UNREACHABLE = range(4)
PINS = "certifi==2026.10.18\nnumpy==2.4.6\nPyYAML==6.0.3\n"

Answer = tuple[int, str]
"""Status and body."""

NOTHING = 200, "{}"


def advisory(package: str, number: str) -> Answer:
    """Return an advisory for all versions of a package before 9.9."""
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "9.9"}]}]
    affected = [{"package": {"name": package, "ecosystem": "PyPI"}, "ranges": ranges}]
    return 200, json.dumps({"vulns": [{"id": number, "summary": "x", "affected": affected}]})


@contextmanager
def service(answer: Callable[[str], Answer]) -> Iterator[tuple[str, list[str]]]:
    """Run an advisory service; yield its address and the packages that it was asked for."""
    asked: list[str] = []

    class Advisories(Handler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(f"{query['package']['name']}=={query['version']}")
            status, body = answer(query["package"]["name"])
            self.answer(status, body.encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Advisories)) as server:
        yield f"{url_of(server)}/query", asked


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    (tmp_path / "pins.txt").write_text(PINS)
    return tmp_path / "pins.txt"


def audit(url: str, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of an audit."""
    done = call(
        sys.executable,
        "scripts/audit-dependencies",
        "--service-url",
        url,
        *arguments,
        check=False,
        cwd=ROOT,
        env={**os.environ, "no_proxy": "127.0.0.1"},
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_vulnerable_pin_is_named_with_the_release_that_fixes_it(pins: Path) -> None:
    answers = {"numpy": advisory("numpy", "TEST-1")}
    with service(lambda name: answers.get(name, NOTHING)) as (url, _):
        assert audit(url, str(pins)) == (VULNERABLE, ["numpy 2.4.6: TEST-1, fixed in 9.9"])


def test_a_service_that_cannot_be_reached_is_no_vulnerability(pins: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nothing listens
        code, lines = audit(f"http://127.0.0.1:{closed.getsockname()[1]}/", str(pins))
    assert (code, len(lines)) == (UNREACHABLE, 1), lines
    assert lines[0].startswith("not audited: the advisory service could not be reached (")


def test_packages_without_an_answer_are_not_clean(capsys: pytest.CaptureFixture[str]) -> None:
    report = runpy.run_path(str(ROOT / "scripts" / "audit-dependencies"))["report"]
    clean: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
    skipped = {"name": "b", "skip_reason": "the service does not know the package"}
    assert report([clean, skipped], pins=2) == FAILED
    assert report([clean], pins=2) == FAILED
    assert report([clean], pins=1) == CLEAN
    assert capsys.readouterr().out.splitlines() == [
        "not audited: 1 of 2 pinned versions have an answer",
        "not audited: 1 of 2 pinned versions have an answer",
        "none of 1 pinned versions has a known vulnerability",
    ]
