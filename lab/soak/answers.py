"""Checks the answers of a soak."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from cloze.bench.http_client import Request
from cloze.bench.load import Answer

_TOLERANCE = 1e-4
"""Largest difference of a number from the reference; batches and threads change the last digits."""

_MOST_EXAMPLES = 20

_REFUSALS = (429, 503)


class Outcome(StrEnum):
    """What an answer was."""

    RIGHT = "right"
    REFUSED = "refused"
    """Status 429 or 503."""
    LOST = "lost"
    """The connection ended before the answer."""
    UNEXPECTED = "unexpected"
    """Any other status than the right one."""
    WRONG = "wrong"
    """The right status, and another answer than the first one to the same request."""


class Settled(NamedTuple):
    """A request that has ended.

    Attributes:
        group: of the request.
        seconds: from the time at which the request was due until its end.
        at_s: seconds from the start of the load until its end.
    """

    group: str
    outcome: Outcome
    seconds: float
    at_s: float


class Answers:
    """All answers of a soak.

    Attributes:
        settled: the requests that have ended, in the order of their ends.
        references: the first right answer to each request, by number.
        examples: some answers that are not right.
    """

    def __init__(self, requests: Sequence[Request], statuses: Sequence[int]) -> None:
        self._requests, self._statuses = requests, statuses
        self.references: dict[int, bytes] = {}
        self.settled: list[Settled] = []
        self.examples: list[str] = []

    def counts(self) -> Counter[Outcome]:
        """Return the number of answers by outcome."""
        return Counter(each.outcome for each in self.settled)

    def times(self, outcome: Outcome) -> list[float]:
        """Return the times of an outcome, in seconds from the start of the load."""
        return [each.at_s for each in self.settled if each.outcome is outcome]

    def add(self, answer: Answer) -> None:
        """Check and count an answer. The first right answer to a request is its reference."""
        outcome, at_s = self._outcome(answer), answer.due_s + answer.seconds
        group = self._requests[answer.number].group
        self.settled.append(Settled(group, outcome, answer.seconds, at_s))
        is_bad = outcome in (Outcome.UNEXPECTED, Outcome.WRONG)
        if is_bad and answer.response and len(self.examples) < _MOST_EXAMPLES:
            expected = self.references.get(answer.number, b"").decode()[:200]
            text = f"{at_s:.1f} s: expected {self._statuses[answer.number]} {expected}, received "
            text += f"{answer.response.status} {answer.response.body.decode()[:200]}"
            self.examples.append(text)

    def _outcome(self, answer: Answer) -> Outcome:
        response = answer.response
        if response is None:
            return Outcome.LOST
        if response.status in _REFUSALS:
            return Outcome.REFUSED
        if response.status != self._statuses[answer.number]:
            return Outcome.UNEXPECTED
        reference = self.references.setdefault(answer.number, response.body)
        same = reference == response.body or _same(json.loads(reference), json.loads(response.body))
        return Outcome.RIGHT if same else Outcome.WRONG


def _same(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal, numbers within the tolerance."""
    if isinstance(first, float) and isinstance(second, float | int):
        return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
