"""Plays closed loops and overloads, and prints what they get, to choose the limits of admission.

Usage: python -m tests.support.world.curves [NAME=VALUE ...], for example _FREE_REQUESTS=16: a limit
of `cloze.service.batching.admission`

A closed loop has clients of several connections each, which wait as they are told. An open load
comes from several addresses, at a multiple of the capacity, and is not sent again. The capacity is
that of the loop of one client with 64 connections.
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
        self, words: tuple[int, int], clients: int, *, connections: int = 0, per_s: float = 0.0
    ) -> None:
        super().__init__(History(1, (), _SECONDS, _RATE))
        self._words, self._clients = words, clients
        self._connections, self._per_s = connections, per_s
        self.play()
        ended = [one for one in self.requests if one.ended and one.began > 1005.0]
        self._took = sorted(one.ended - one.began for one in ended if one.status == 200)  # type: ignore[operator]
        self._refused = sum(one.status == 429 for one in ended) / max(1, len(ended))
        self.answers_per_s = len(self._took) / (_SECONDS - 5.0)

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
        until, connections = kernel.now + _SECONDS, range(self._clients * self._connections)
        threads = [kernel.spawn(self._client(number).run, until) for number in connections]
        while self._per_s and kernel.now < until:
            kernel.sleep(kernel.random.expovariate(self._per_s))
            threads.append(kernel.spawn(self._client(len(threads)).run_once))
        for thread in threads:
            thread.join()
        self.server.is_ending = self.kernel.has_ended = True

    def cell(self, capacity: float) -> str:
        """Return the refused share, p50 and p99 in s, and answers in time over the capacity."""
        took = self._took
        in_time = sum(seconds <= _PATIENCE_S for seconds in took)
        good = in_time / (_SECONDS - 5.0) / capacity
        p50, p99 = (took[int(len(took) * q)] if took else 0.0 for q in (0.5, 0.99))
        return f"{self._refused:.0%} / {p50:.2f} / {p99:.2f} / {good:.2f}"


def main(limits: list[str]) -> None:
    """Print a table of closed loops and one of open loads for each kind of texts."""
    logging.disable(logging.CRITICAL)
    for limit in limits:
        name, _, value = limit.partition("=")
        setattr(admission, name, float(value))
    for text, words in TEXTS.items():
        capacity = Load(words, 1, connections=64).answers_per_s
        print(
            f"\n| {text}: {capacity:.1f}/s |", *(f"{factor:g} |" for factor in FACTORS), flush=True
        )
        for addresses in ADDRESSES:
            loads = (Load(words, addresses, per_s=factor * capacity) for factor in FACTORS)
            print(f"| {addresses} addresses |", *(f"{load.cell(capacity)} |" for load in loads))
        for clients, connections in CLOSED:
            cell = Load(words, clients, connections=connections).cell(capacity)
            print(f"| {clients} x {connections} connections | {cell} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
