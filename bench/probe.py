"""Probes a URL ten times per second, each time on a new connection, in a process of its own.

    python bench/probe.py URL    # until the end of its input; prints the seconds of each probe

In the process of the load generator, the generator would delay the probes. The process imports no
module of Cloze, so that it starts in milliseconds.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

EVERY_S = 0.1

TIMEOUT_S = 10.0
"""A failed probe counts as one that took so long."""


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Probe until the context ends; the list has the seconds of each probe afterwards."""
    seconds: list[float] = []
    with subprocess.Popen(
        (sys.executable, "-I", __file__, url), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield seconds
        finally:
            seconds += json.loads(process.communicate()[0])


def probe(url: str) -> list[float]:
    """Probe until the input ends, and return the seconds from each due time to the answer.

    A probe that is late because the one before it was slow counts from its own due time. The
    process has a higher priority than the server if that is allowed, as if it ran on another
    machine.
    """
    if hasattr(os, "nice"):  # not on Windows
        with suppress(OSError):
            os.nice(-10)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    seconds: list[float] = []
    due = time.perf_counter()
    while not ended.wait(max(0.0, due - time.perf_counter())):
        try:
            urllib.request.urlopen(url, timeout=TIMEOUT_S).read()
            seconds.append(time.perf_counter() - due)
        except OSError:
            seconds.append(TIMEOUT_S)
        due += EVERY_S
    return seconds


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
