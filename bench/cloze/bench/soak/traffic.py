"""The mixed traffic of a soak: requests of four tasks, bad requests, and clients that leave."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from cloze.bench.http_client import Request, post
from cloze.bench.texts import make_texts

BAD = "bad"
"""Group of the requests that the server must refuse with a status of their own."""

_SHARES = {"embed": 0.35, "fill-mask": 0.3, "nsp": 0.12, "qa": 0.13, BAD: 0.1}
"""Shares of the requests by task. Texts are mixed: 75 % questions, 20 % sentences, 5 % passages."""

_TEXTS_PER_REQUEST = (1, 1, 1, 4)
"""Numbers of texts of a request to embed or to fill; one of these at random."""

_LONGEST_STAY_S = 0.03
"""Longest time after which a client that leaves closes its connection."""


def make_requests(
    words: Sequence[str], mask: str, count: int, seed: int = 0
) -> tuple[list[Request], list[int]]:
    """Make distinct requests, so that an answer to another request is noticed.

    Returns:
        The requests, whose groups are tasks or `BAD`, and the status that each one must get.
    """
    rng = np.random.default_rng(seed)
    texts = iter(make_texts(words, count * max(_TEXTS_PER_REQUEST), "mixed", seed).texts)
    passages = iter(make_texts(words, count, "passages", seed + 1).texts)
    groups = rng.choice(list(_SHARES), size=count, p=list(_SHARES.values()))
    requests, statuses = [], []
    for number, group in enumerate(groups):
        own = [next(texts) for _ in range(rng.choice(_TEXTS_PER_REQUEST))]
        if group == BAD:
            path, body, status = _bad(number, own[0])
        else:
            inputs = _inputs(group, own, next(passages), mask)
            path, body, status = f"/{group}", _json(inputs=inputs), 200
        requests.append(Request(post(path, body), len(own), str(group)))
        statuses.append(status)
    return requests, statuses


def _inputs(group: str, texts: list[str], passage: str, mask: str) -> Any:
    if group == "nsp":
        return {"text": texts[0], "next": passage[:80].strip()}
    if group == "qa":
        return {"question": texts[0][:60].strip(), "context": passage}
    return [f"{text} {mask}" for text in texts] if group == "fill-mask" else texts


def _bad(number: int, text: str) -> tuple[str, bytes, int]:
    """Return the path and the body of a bad request, and its status as docs/api.md has it."""
    kinds = (
        ("/embed", b'{"inputs": "a body that ends here', 400),
        ("/embed", _json(inputs=""), 400),
        ("/embed", _json(inputs=text, model="no-such-model"), 404),
        (f"/no-such-route-{number}", _json(inputs=text), 404),
        ("/fill-mask", _json(inputs=text), 422),
        ("/nsp", _json(inputs=number), 422),
    )
    return kinds[number % len(kinds)]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def leave(
    url: str, requests: Sequence[Request], arrivals: NDArray[np.float64], seed: int = 0
) -> int:
    """Send requests whose clients close their connections before the answer.

    Returns:
        The number of clients that left.
    """
    stays = np.random.default_rng(seed).uniform(0, _LONGEST_STAY_S, len(arrivals))
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(start + float(arrival) - loop.time())
            request = requests[number % len(requests)]
            tasks.create_task(_leave_one(url, request.data, float(stays[number])))
    return len(arrivals)


async def _leave_one(url: str, data: bytes, stay_s: float) -> None:
    parts = urlsplit(url)
    # A front end that ends in this moment refuses, which is no matter of this client.
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(data)
        await asyncio.sleep(stay_s)
        writer.close()
        await writer.wait_closed()
