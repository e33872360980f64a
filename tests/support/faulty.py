"""Servers whose engine misbehaves on certain words, and requests to them."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.faulty_server import started_line
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

FAULTY = (sys.executable, "-m", "tests.support.faulty_server")

WORDS = ["paris", "france", "door", "house", "time", "year", "water", "red", "green", "walk"]
SLOW_TEXTS = [f"moon {a} {b}" for a, b in itertools.combinations(WORDS, 2)]
"""Texts of 5 tokens each, with [CLS] and [SEP]. Equal ones would share a run."""

QUEUED = r'cloze_queue_tokens\{model="bert",version="1"\}'
BATCHES = r'cloze_batch_sequences_count\{model="bert",version="1"\}'


Faulty = Callable[..., AbstractContextManager[Server]]
"""Starts a server whose engine misbehaves on certain words."""


@contextmanager
def one_process(store: Path, **environment: str) -> Iterator[Server]:
    with running_server(store, "--model", "bert", command=FAULTY, **environment) as server:
        yield server


@contextmanager
def front_ends(store: Path, **environment: str) -> Iterator[Server]:
    arguments = ("--model", "bert", "--frontends", "2")
    with running_server(store, *arguments, command=FAULTY, **environment) as server:
        yield server


def embed(server: Server, inputs: str | list[str], timeout: float = 30.0) -> httpx.Response:
    # Loading the authorities' certificates takes tens of milliseconds: many requests in threads
    # would come one after the other.
    url = f"{server.url}/embed"
    return httpx.post(url, json={"inputs": inputs}, timeout=timeout, verify=False)


def at_once(server: Server, texts: list[Any]) -> list[httpx.Response]:
    # One client: making one takes tens of milliseconds, so that the requests of many would come one
    # after the other.
    with (
        httpx.Client(timeout=30.0, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(len(texts)) as pool,
    ):
        return list(
            pool.map(lambda text: client.post(f"{server.url}/embed", json={"inputs": text}), texts)
        )


def metric(server: Server, pattern: str) -> float:
    page = httpx.get(f"{server.url}/metrics", verify=False).text
    found = re.search(rf"^{pattern} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def wait_for_run(server: Server, word: str, count: int = 1) -> None:
    """Return when so many runs with the word have started."""
    line = started_line(word)
    wait_until(lambda: sum(line in logged for logged in server.log) >= count)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare answers, whose numbers may differ by rounding."""
    assert isinstance(actual, type(expected))
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_close(actual[key], expected[key], tolerance)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=tolerance)
    else:
        assert actual == expected


def until(ask: Callable[[], httpx.Response], status: int) -> httpx.Response:
    """Ask again until that is the answer."""
    answers: list[httpx.Response] = []

    def is_given() -> bool:
        answers.append(ask())
        return answers[-1].status_code == status

    wait_until(is_given)
    return answers[-1]


def numbers(answer: object) -> list[float]:
    """All scores and vectors of an answer, in order; not ids and offsets, which are not near each
    other when they differ.
    """
    if isinstance(answer, dict):
        return [
            number
            for key, part in answer.items()
            if key not in ("token", "start", "end")
            for number in numbers(part)
        ]
    if isinstance(answer, list):
        return [number for part in answer for number in numbers(part)]
    return [answer] if isinstance(answer, float) else []
