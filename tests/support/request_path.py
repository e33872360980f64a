"""Counts the files and functions of the project on the way of one short request to ``/embed``, and
the lines of each part of the service.

    python tests/support/request_path.py [--names] [CHECKOUT]

A real server runs in one process, under a profile of all of its threads. After a few requests on
one connection the record is emptied, then one more request is sent, eight times over. What runs in
each of the eight turns counts, the access log and the watchdog too; a timer, or what only runs on
busy cores, does not. A function is what ``def`` defines: neither a lambda nor a comprehension counts.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from tests.support.sources import file_of, name_of, python_path

HERE = Path(__file__).resolve()
MODEL = "cloze-bert"
BODY = b'{"inputs": "what is the capital of france"}'
WARM_UP_REQUESTS, COUNTED_REQUESTS = 5, 8
LINGER_S = 0.3
"""Time after the answer in which the request still counts: the access log writes every 0.1 s."""


class Called(NamedTuple):
    """A function of the project that ran: its file in the checkout, and its qualified name."""

    file: str
    name: str


# ---- the server, in a process of its own ---------------------------------------------------------


def record(checkout: Path, output: Path, arguments: Sequence[str]) -> None:
    """Run ``cloze`` under a profile; SIGUSR2 writes what ran since the last one, and forgets it."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    def write(*_: object) -> None:
        called = {one for code in codes.copy() if (one := project_function(code, checkout))}
        codes.clear()
        unfinished = output.with_suffix(".new")
        unfinished.write_text(json.dumps(sorted(called)))
        unfinished.replace(output)

    signal.signal(signal.SIGUSR2, write)
    threading.setprofile(profile)
    sys.setprofile(profile)
    from cloze.cli import main

    main(list(arguments))


def project_function(code: CodeType, checkout: Path) -> Called | None:
    """Return the function of a code object; None if another project or no ``def`` has it."""
    if code.co_name.startswith("<") or code.co_filename.startswith("<"):
        return None
    file = Path(code.co_filename).resolve()
    if not file.is_relative_to(checkout) or file == HERE or "site-packages" in file.parts:
        return None
    return Called(name_of(file, checkout), code.co_qualname)


# ---- the count -----------------------------------------------------------------------------------


def count(checkout: Path, model: str = MODEL, *options: str) -> list[Called]:
    """Return the functions that run for one request on an open connection.

    Args:
        checkout: root of the project.
        model: the served model.
        options: further options of ``cloze serve``.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "called.json"
        serve = ("serve", "--port", "0", "--model", model, *options)
        process = subprocess.Popen(
            # -P: the folder of this file must not come before other packages.
            [sys.executable, "-P", str(HERE), "--record", str(checkout), str(output), *serve],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": python_path(checkout)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connection = http.client.HTTPConnection("127.0.0.1", _port(process), timeout=30)
            for _ in range(WARM_UP_REQUESTS):
                _embed(connection)
            time.sleep(LINGER_S)
            _written(process, output)
            turns = []
            for _ in range(COUNTED_REQUESTS):
                _embed(connection)
                time.sleep(LINGER_S)
                turns.append(_written(process, output))
            connection.close()
        finally:
            process.terminate()
            process.communicate()
    return sorted(set.intersection(*turns))


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"listening on http://127.0.0.1:(\d+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return int(found[1])
    raise RuntimeError(f"the server did not start: {''.join(lines)}")


def _embed(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/embed", BODY, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text


def _written(process: subprocess.Popen[str], output: Path) -> set[Called]:
    """Return what ran since the last call."""
    output.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 10
    while not output.exists():
        assert time.monotonic() < deadline, "the server did not write what ran"
        time.sleep(0.01)
    return {Called(*one) for one in json.loads(output.read_text())}


# ---- the report ----------------------------------------------------------------------------------


def lines_by_part(checkout: Path) -> Counter[str]:
    """Return the lines of each package of the service; its own modules are ``core``."""
    lines: Counter[str] = Counter()
    service = file_of("service", checkout)
    for file in service.rglob("*.py"):
        part, *rest = file.relative_to(service).parts
        lines[part if rest else "core"] += len(file.read_text().splitlines())
    return lines


def report(checkout: Path, *, with_names: bool, show: Callable[[str], object] = print) -> None:
    """Print the counts as a table of Markdown."""
    called = count(checkout)
    parts = Counter(one.file for one in called)
    show(f"| on the way of /embed: files, functions | {len(parts)}, {len(called)} |\n|---|---|")
    lines = lines_by_part(checkout)
    for part, size in lines.most_common():
        show(f"| {part}: lines | {size:,} |")
    show(f"| service: lines | {lines.total():,} |")
    for one in called if with_names else ():
        show(f"{one.file} {one.name}")


def main(arguments: list[str]) -> None:
    """Print the report, or be the server that `count` starts."""
    if arguments[:1] == ["--record"]:
        record(Path(arguments[1]), Path(arguments[2]), arguments[3:])
        return
    paths = [Path(argument).resolve() for argument in arguments if argument != "--names"]
    report(*paths or [HERE.parents[2]], with_names="--names" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
