"""The loads of `load_table.py`: each starts a server, and returns its figures by name."""

import asyncio
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import uvloop
from hdrh.histogram import HdrHistogram

from cloze.bench.http_client import Request, post
from cloze.bench.load import (
    MANY_CONNECTIONS,
    Answer,
    LoadResult,
    closed_loop,
    open_loop,
    poisson,
)
from cloze.bench.probe import probing
from cloze.bench.retries import REFUSED, retrying_loop
from cloze.bench.servers import MeasuredServer
from cloze.bench.texts import make_texts

Figures = dict[str, Any]

CLIENTS = 32
"""Of the closed loop that measures the capacity."""

LEAD_IN_S = 2.0

WORDS = 100
"""Of a passage."""

PATIENT = {"x-request-timeout-ms": "240000"}
"""Requests that state so much are not refused."""

SHARES = {"question": 0.6, "list of 32": 0.2, "long QA": 0.1, "fill-mask": 0.1}
"""Of the requests of a mix."""

POLITE_EVERY_S = 0.3

INGESTIONS = {1: (128, 1000), 32: (64, 128)}
"""Threads and calls, by passages per call."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, and how long.

    Attributes:
        cloze: path of the command `cloze`.
        minilm: a server of all-MiniLM-L6-v2, ours or a peer's.
        default: our server of the default models.
        words: of which texts are made.
    """

    cloze: str
    minilm: MeasuredServer
    default: MeasuredServer
    words: Sequence[str]
    seconds: float


def closed(subject: Subject, texts: str, connections: int, *, waits: bool) -> Figures:
    """Run a closed loop of single texts, with clients that try again after a refusal."""
    server = subject.minilm
    requests = [server.requests([text], each=1)[0] for text in _texts(subject.words, texts)]
    with server.start() as running:
        _warm_up(running.url, requests)
        with probing(running.url + server.ready_path) as probes:
            loop = uvloop.run(
                retrying_loop(
                    running.url,
                    requests,
                    clients=connections,
                    seconds=subject.seconds,
                    waits=waits,
                    lead_in_s=LEAD_IN_S,
                )
            )
    told = loop.told.most_common(1)
    return {
        "rate": round(loop.answers_per_s, 1),
        "refused": loop.statuses[REFUSED],
        "others": _others(loop.statuses),
        **_percentiles(loop.latencies, 50, 99),
        "told": f"{told[0][0]:g}" if told else "",
        "soon": f"{loop.soon_admitted:.1%}" if waits else "",
        "probe_p99": _p99(probes),
    }


def overload(subject: Subject, texts: str, limit_ms: int, *, stated: bool) -> Figures:
    """Offer five times the capacity, each request on a new connection.

    Args:
        limit_ms: later answers do not count.
        stated: each request states the limit.
    """
    server = subject.minilm
    stating = {"x-request-timeout-ms": str(limit_ms)} if stated else {}
    bodies = [orjson.dumps({"inputs": text}) for text in _texts(subject.words, texts)]
    kept = [Request(post("/embed", body, stating)) for body in bodies]
    once = [Request(post("/embed", body, stating | {"connection": "close"})) for body in bodies]
    in_time = 0

    def count(answer: Answer) -> None:
        nonlocal in_time
        answered = answer.response is not None and answer.response.status == 200
        in_time += answered and answer.seconds <= limit_ms / 1000

    with server.start() as running:
        _warm_up(running.url, kept)
        peak = _capacity(running.url, kept, 5.0)
        arrivals = poisson(5 * peak, subject.seconds)
        with probing(running.url + server.ready_path) as probes:
            load = uvloop.run(
                open_loop(
                    running.url, once, arrivals, connections=MANY_CONNECTIONS, on_answer=count
                )
            )
    return {
        "peak": round(peak, 1),
        "in_time": round(in_time / load.seconds, 1),
        "share": round(in_time / load.seconds / peak, 2),
        **_outcome(load.statuses),
        **_percentiles(load.latencies, 50, 99),
        "probe_p99": _p99(probes),
    }


def polite(subject: Subject, times: float) -> Figures:
    """Send questions of one key beside another key, which offers a multiple of the capacity.

    The greedy key sends questions, and a list of 32 passages for every five.
    """
    made = _bodies(subject.words, "")
    questions, lists = made["question"], made["list of 32"]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        greedy_key, polite_key = (_make_key(subject.cloze, keys, name) for name in ("a", "b"))
        mixed = [*questions, *(lists * (len(questions) // 5 // len(lists)))]
        order = np.random.default_rng(0).permutation(len(mixed))
        shuffled = (mixed[number] for number in order)
        greedy = [Request(post(path, body, greedy_key)) for path, body in shuffled]
        steady = [Request(post(*each, polite_key)) for each in questions]
        due = np.arange(0.0, subject.seconds, POLITE_EVERY_S)
        server = replace(subject.default, environment={"CLOZE_KEYS_FILE": str(keys)})
        with server.start() as running:
            _warm_up(running.url, greedy)
            peak = _capacity(running.url, greedy, 5.0)
            arrivals = poisson(times * peak, subject.seconds)

            async def both() -> list[LoadResult]:
                url = running.url
                many = open_loop(url, greedy, arrivals, connections=MANY_CONNECTIONS)
                return [
                    *await asyncio.gather(open_loop(url, steady, due, connections=CLIENTS), many)
                ]

            ours, others = uvloop.run(both())
    return {
        "peak": round(peak, 1),
        **_outcome(ours.statuses),
        **_percentiles(ours.latencies, 50, 100),
        "greedy": f"{others.statuses[200]} of {others.statuses.total()}",
    }


def ingestion(subject: Subject, passages: int, *, patient: bool) -> Figures:
    """Call openai's client in many threads at once, with its two retries and its own timeout.

    Args:
        passages: per call.
        patient: send the header in which the client states its timeout; other clients send none.
    """
    threads, calls = INGESTIONS[passages]
    rng = np.random.default_rng(0)
    outcomes: Counter[str] = Counter()
    seconds: list[float] = []
    headers = None if patient else {"x-stainless-read-timeout": openai.Omit()}
    inputs = [_passages(subject.words, rng, passages) for _ in range(calls)]
    with (
        subject.minilm.start() as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):

        def call(texts: list[str]) -> None:
            started = time.monotonic()
            try:
                client.embeddings.create(model="minilm", input=texts, extra_headers=headers)
                outcomes["answered"] += 1
                seconds.append(time.monotonic() - started)
            except openai.OpenAIError as error:
                outcomes[type(error).__name__] += 1

        call(inputs[0])
        outcomes.clear()
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(call, inputs))
        all_s = time.monotonic() - started
    p50, most = np.percentile(seconds or [0.0], [50, 100])
    return {
        "failed": f"{calls - outcomes.pop('answered')} of {calls}",
        "others": dict(outcomes),
        "rate": round(len(seconds) * passages / all_s, 1),
        "p50": round(float(p50), 2),
        "p100": round(float(most), 2),
    }


def mix(subject: Subject, times: float) -> Figures:
    """Offer a multiple of the capacity in requests of all sizes, of one client.

    Accepted is what was not refused with 429, and lost is what was accepted and not answered.
    """
    made = _bodies(subject.words, "[MASK]")
    rng = np.random.default_rng(1)
    kinds = [str(kind) for kind in rng.choice(list(SHARES), 2000, p=list(SHARES.values()))]
    chosen = [made[kind][number % len(made[kind])] for number, kind in enumerate(kinds)]
    stated = [Request(post(*each, PATIENT)) for each in chosen]
    requests = [Request(post(*each), group=kind) for each, kind in zip(chosen, kinds, strict=True)]
    with subject.default.start() as running:
        _warm_up(running.url, stated)
        peak = _capacity(running.url, stated, 8.0)
        arrivals = poisson(times * peak, subject.seconds)
        with probing(running.url + subject.default.ready_path) as probes:
            load = uvloop.run(
                open_loop(running.url, requests, arrivals, connections=MANY_CONNECTIONS)
            )
    accepted = load.statuses.total() - load.statuses[REFUSED]
    p99s = {kind: load.by_group[kind].get_value_at_percentile(99) / 1e6 for kind in SHARES}
    return {
        "peak": round(peak, 1),
        **_outcome(load.statuses),
        "lost": f"{accepted - load.statuses[200]} of {accepted}",
        "p99s": " / ".join(f"{seconds:.2f}" for seconds in p99s.values()),
        "probe_p99": _p99(probes),
    }


def _texts(words: Sequence[str], kind: str) -> list[str]:
    """Return short texts as long as search questions, or passages of 100 words."""
    if kind == "questions":
        return make_texts(words, 2000, kind).texts
    return _passages(words, np.random.default_rng(0), 500)


def _passages(words: Sequence[str], rng: np.random.Generator, count: int) -> list[str]:
    return [" ".join(rng.choice(words, WORDS)) for _ in range(count)]


def _bodies(words: Sequence[str], mask: str) -> dict[str, list[tuple[str, bytes]]]:
    """Return the path and the body of some requests of each kind of `SHARES`."""
    rng = np.random.default_rng(0)
    questions = make_texts(words, 200, "questions").texts
    lists = [_passages(words, rng, 32) for _ in range(10)]
    contexts = [" ".join(rng.choice(words, 2000)) for _ in range(20)]
    pairs = zip(questions, contexts, strict=False)
    inputs: dict[str, tuple[str, Sequence[Any]]] = {
        "question": ("/embed", questions),
        "list of 32": ("/embed", lists),
        "long QA": ("/qa", [{"question": each, "context": context} for each, context in pairs]),
        "fill-mask": ("/fill-mask", [f"{text} {mask} ." for text in questions]),
    }
    return {
        kind: [(path, orjson.dumps({"inputs": each})) for each in several]
        for kind, (path, several) in inputs.items()
    }


def _make_key(cloze: str, file: Path, name: str) -> dict[str, str]:
    """Add a key to a keys file, and return the header that sends the key."""
    command = (cloze, "keys", "add", name, "--file", str(file))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"authorization": f"Bearer {printed.split()[-1]}"}


def _warm_up(url: str, requests: Sequence[Request]) -> None:
    """Let the server measure what requests cost."""
    uvloop.run(closed_loop(url, requests, clients=CLIENTS, seconds=2.0))


def _capacity(url: str, requests: Sequence[Request], seconds: float) -> float:
    """Return the answers per second of a closed loop of 32 connections."""
    loop = retrying_loop(
        url, requests, clients=CLIENTS, seconds=seconds, waits=False, lead_in_s=LEAD_IN_S / 2
    )
    return uvloop.run(loop).answers_per_s


def _outcome(statuses: Counter[int]) -> Figures:
    return {
        "answered": f"{statuses[200]} of {statuses.total()}",
        "refused": statuses[REFUSED],
        "others": _others(statuses),
    }


def _others(statuses: Counter[int]) -> dict[str, int]:
    """Return what was neither answered nor refused."""
    return {str(each): n for each, n in statuses.items() if each not in (200, REFUSED)}


def _percentiles(latencies: HdrHistogram, *percentiles: int) -> Figures:
    """Return seconds by name: ``p50`` and so on."""
    return {
        f"p{each}": round(latencies.get_value_at_percentile(each) / 1e6, 3) for each in percentiles
    }


def _p99(seconds: Sequence[float]) -> float:
    return round(float(np.percentile(seconds, 99)), 3)
