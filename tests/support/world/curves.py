"""Plays closed loops and overloads over values of the limits of admission, and prints a table.

Usage: python -m tests.support.world.curves

Requests have one text of 10 to 90 words. Clients of a closed loop have one address, and wait as
they are told. Requests of an open load come from eight addresses, and are not sent again.
"""

import logging
from collections.abc import Mapping
from unittest.mock import patch

from cloze.service.batching import admission
from tests.support.world.clients import Client
from tests.support.world.history import History, World

CLOSED, OPEN = (1, 16, 64, 256), (0.5, 1.0, 2.0, 4.0)
VALUES: Mapping[str, tuple[float, ...]] = {
    "_LONGEST_WAIT_S": (2.5, 1.0, 5.0),
    "_FREE_REQUESTS": (0, 16, 32, 256),
    "_SHARE_OF_TIME": (0.25,),
}
"""The limits, and their values; the first row is that of now."""

_RATE, _SECONDS, _PATIENCE_S = 2000.0, 30.0, 5.0
_CAPACITY = 2 * _RATE / 52  # requests per second


class Load(World):
    """A server under one load, whose promises are not checked."""

    def __init__(self, *, connections: int = 0, factor: float = 0.0) -> None:
        super().__init__(History(1, (), _SECONDS, _RATE))
        self._connections, self._factor = connections, factor

    def answered(self, _: object) -> None:
        """Check nothing."""

    def _direct(self) -> None:
        kernel = self.kernel
        while not self.server.is_ready:
            kernel.sleep(0.01)
        until, threads = kernel.now + _SECONDS, []
        for number in range(self._connections):
            client = Client(self, "told", "10.1.0.1", str(number))
            threads.append(kernel.spawn(client.run, until))
        while self._factor and kernel.now < until:
            kernel.sleep(kernel.random.expovariate(self._factor * _CAPACITY))
            number = len(threads)
            client = Client(self, "told", f"10.1.0.{number % 8}", str(number))
            threads.append(kernel.spawn(client.run_once))
        for thread in threads:
            thread.join()
        self.server.is_ending = self.has_ended = True

    def row(self) -> str:
        """Return refusals, waits, and answers within 5 s over the capacity."""
        self.play()
        ended = [one for one in self.requests if one.ended and one.began > 1005.0]
        took = sorted(one.ended - one.began for one in ended if one.status == 200)  # type: ignore[operator]
        refused = sum(one.status == 429 for one in ended) / max(1, len(ended))
        in_time = sum(seconds <= _PATIENCE_S for seconds in took)
        good = in_time / (_SECONDS - 5.0) / _CAPACITY
        p50, p99 = (took[int(len(took) * q)] if took else 0.0 for q in (0.5, 0.99))
        return f"{refused:4.0%} {p50:5.2f} {p99:5.2f} {good:4.2f}"


def main() -> None:
    """Print refused requests, p50 and p99 in s, and goodput of each limit and load."""
    logging.disable(logging.CRITICAL)
    loads = [{"connections": n} for n in CLOSED] + [{"factor": factor} for factor in OPEN]
    print("| limit |", *(f"{next(iter(load.values()))} {next(iter(load))} |" for load in loads))
    for name, values in VALUES.items():
        for value in values:
            with patch.object(admission, name, value):
                cells = [Load(**load).row() for load in loads]  # type: ignore[arg-type]
            print(f"| {name} {value} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
