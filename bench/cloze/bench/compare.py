"""Lists the figures that differ between two results by more than the turns of one result do."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cloze.bench.result import Load, Result

_FIGURES = {"texts_per_s": 1, "p50": -1, "p99": -1, "rss_mb": -1}
"""The compared figures: 1 if a larger value is better, else -1."""

_MIN_CHANGE = 0.03
"""Smallest relative change that counts, however steady the turns were."""


class Verdict(StrEnum):
    """What a change of a figure means."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure in two results.

    Attributes:
        change: (after - before) / before; for the share of failed requests, after - before.
        noise: half the spread of the turns over their median, the larger of the two results.
    """

    subject: str
    load: str
    figure: str
    before: float
    after: float
    change: float
    noise: float
    verdict: Verdict


def compare(before: Result, after: Result) -> list[Difference]:
    """Compare every figure that both results have, in the order of the second result."""
    differences: list[Difference] = []
    for load in after.loads():
        for subject in after.subjects():
            differences += _figure_differences(before, after, subject, load)
            differences += _failure_difference(before, after, subject, load)
    return differences


def _figure_differences(
    before: Result, after: Result, subject: str, load: Load
) -> Iterator[Difference]:
    for figure, sign in _FIGURES.items():
        old, new = before.median(subject, load, figure), after.median(subject, load, figure)
        if not old or new is None:
            continue
        change = (new - old) / old
        noise = max(_noise(result, subject, load, figure) for result in (before, after))
        verdict = Verdict.SAME
        if abs(change) > max(noise, _MIN_CHANGE):
            verdict = Verdict.BETTER if change * sign > 0 else Verdict.WORSE
        yield Difference(subject, load.name, figure, old, new, change, noise, verdict)


def _failure_difference(
    before: Result, after: Result, subject: str, load: Load
) -> Iterator[Difference]:
    old, new = _failed_share(before, subject, load), _failed_share(after, subject, load)
    if old is None or new is None or old == new:
        return
    verdict = Verdict.WORSE if new > old else Verdict.BETTER
    yield Difference(subject, load.name, "failed", old, new, new - old, 0.0, verdict)


def _failed_share(result: Result, subject: str, load: Load) -> float | None:
    """Return the share of requests without status 200, or None if the load was not measured."""
    turns = result.of(subject, load)
    if not turns:
        return None
    failed = sum(sum(turn.failed.values()) for turn in turns)
    return failed / (failed + sum(turn.answered for turn in turns) or 1)


def _noise(result: Result, subject: str, load: Load, figure: str) -> float:
    values = [value for turn in result.of(subject, load) if (value := turn.figure(figure))]
    median = result.median(subject, load, figure)
    return (max(values) - min(values)) / 2 / median if values and median else 0.0
