"""Checks and counts the answers of a soak, per 5 s."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cloze.bench.http_client import Request
from cloze.bench.load import Answer

BUCKET_S = 5.0

_TOLERANCE = 1e-4
"""Largest difference of a number from the reference; batches and threads change the last digits."""

_MOST_EXAMPLES = 20


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


_REFUSALS = (429, 503)


@dataclass(slots=True)
class Bucket:
    """The answers to requests that were due within `BUCKET_S`.

    Attributes:
        latencies: seconds of the right answers, by task.
        statuses: number of answers by status; 0 stands for a connection that closed.
    """

    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Example:
    """An answer that is not right, for the report."""

    at_s: float
    outcome: Outcome
    text: str


class Answers:
    """All answers of a soak.

    Attributes:
        outcomes: number of answers by outcome.
        lost_at: seconds from the start at which connections ended before an answer.
        refused_at: seconds from the start at which requests were refused.
    """

    def __init__(self, requests: Sequence[Request], statuses: Sequence[int]) -> None:
        self._requests, self._statuses = requests, statuses
        self._references: dict[int, bytes] = {}
        self.outcomes: Counter[Outcome] = Counter()
        self.buckets: dict[int, Bucket] = defaultdict(Bucket)
        self.lost_at: list[float] = []
        self.refused_at: list[float] = []
        self.examples: list[Example] = []

    @property
    def total(self) -> int:
        """Number of requests that have ended."""
        return self.outcomes.total()

    @property
    def references(self) -> int:
        """Number of requests that have a reference answer."""
        return len(self._references)

    def add(self, answer: Answer) -> None:
        """Check and count an answer. The first right answer to a request is its reference."""
        group = self._requests[answer.number].group
        bucket = self.buckets[int(answer.due_s // BUCKET_S)]
        bucket.statuses[answer.response.status if answer.response else 0] += 1
        outcome = self._outcome(answer)
        self.outcomes[outcome] += 1
        ended_s = answer.due_s + answer.seconds
        if outcome is Outcome.RIGHT:
            bucket.latencies[group].append(answer.seconds)
        elif outcome is Outcome.LOST:
            self.lost_at.append(ended_s)
        elif outcome is Outcome.REFUSED:
            self.refused_at.append(ended_s)
        elif len(self.examples) < _MOST_EXAMPLES and answer.response:
            expected = self._references.get(answer.number, b"").decode()[:200]
            text = f"expected {self._statuses[answer.number]} {expected}, received "
            text += f"{answer.response.status} {answer.response.body.decode()[:200]}"
            self.examples.append(Example(ended_s, outcome, text))

    def _outcome(self, answer: Answer) -> Outcome:
        response = answer.response
        if response is None:
            return Outcome.LOST
        if response.status in _REFUSALS:
            return Outcome.REFUSED
        if response.status != self._statuses[answer.number]:
            return Outcome.UNEXPECTED
        reference = self._references.setdefault(answer.number, response.body)
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
