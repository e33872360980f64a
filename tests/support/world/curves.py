"""Plays closed loops and overloads, and prints what they get, to choose the limits of admission.

Usage: python -m tests.support.world.curves [NAME=VALUE ...], for example _FREE_REQUESTS=16: a limit
of `cloze.service.batching.admission`

A closed loop has clients of several connections each, which wait as they are told. An open load
comes from several addresses, at a multiple of the capacity, and is not sent again.
"""

import logging
import sys
from dataclasses import replace

from cloze.service.batching import admission
from tests.support.world.clients import Client
from tests.support.world.history import History, World

TEXTS = {"12 to 92 tokens": (10, 90), "102 to 502 tokens": (100, 500)}
CLOSED = ((1, 1), (1, 64), (2, 64), (3, 64), (8, 64), (1, 256))
ADDRESSES, FACTORS = (1, 2, 4, 8, 16), (0.5, 1.0, 2.0, 4.0)

_RATE, _SECONDS, _PATIENCE_S = 2000.0, 30.0, 5.0


class Load(World):
    """A server under one load, whose promises are not checked."""

    def __init__(
        self, words: tuple[int, int], clients: int, *, connections: int = 0, factor: float = 0.0
    ) -> None:
        super().__init__(History(1, (), _SECONDS, _RATE))
        self._words, self._clients = words, clients
        self._connections, self._factor = connections, factor
        self._capacity = 2 * _RATE / (sum(words) / 2 + 2)  # requests per second

    def answered(self, _: object) -> None:
        """Check nothing."""

    def _client(self, number: int) -> Client:
        client = Client(self, "told", f"10.1.0.{number % self._clients}", str(number))
        client.kind = replace(client.kind, words=self._words)
        return client

    def _direct(self) -> None:
        kernel = self.kernel
        while not self.server.is_ready:
            kernel.sleep(0.01)
        until, threads = kernel.now + _SECONDS, []
        for number in range(self._clients * self._connections):
            threads.append(kernel.spawn(self._client(number).run, until))
        while self._factor and kernel.now < until:
            kernel.sleep(kernel.random.expovariate(self._factor * self._capacity))
            threads.append(kernel.spawn(self._client(len(threads)).run_once))
        for thread in threads:
            thread.join()
        self.server.is_ending = self.kernel.has_ended = True

    def cell(self) -> str:
        """Return the refused share, p50 and p99 in s, and answers in time over the capacity."""
        self.play()
        ended = [one for one in self.requests if one.ended and one.began > 1005.0]
        took = sorted(one.ended - one.began for one in ended if one.status == 200)  # type: ignore[operator]
        refused = sum(one.status == 429 for one in ended) / max(1, len(ended))
        in_time = sum(seconds <= _PATIENCE_S for seconds in took)
        good = in_time / (_SECONDS - 5.0) / self._capacity
        p50, p99 = (took[int(len(took) * q)] if took else 0.0 for q in (0.5, 0.99))
        return f"{refused:.0%} / {p50:.2f} / {p99:.2f} / {good:.2f}"


def main(limits: list[str]) -> None:
    """Print a table of closed loops and one of open loads for each kind of texts."""
    logging.disable(logging.CRITICAL)
    for limit in limits:
        name, _, value = limit.partition("=")
        setattr(admission, name, float(value))
    for text, words in TEXTS.items():
        print(f"\n| {text} | " + " | ".join(f"{factor:g}" for factor in FACTORS) + " |", flush=True)
        for addresses in ADDRESSES:
            cells = [Load(words, addresses, factor=factor).cell() for factor in FACTORS]
            print(f"| {addresses} addresses | " + " | ".join(cells) + " |", flush=True)
        for clients, connections in CLOSED:
            cell = Load(words, clients, connections=connections).cell()
            print(f"| {clients} x {connections} connections | {cell} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
