"""The work that was accepted, by the time at which it is due.

All of it can end in time if, for each time, the tokens that are due until then run until then: the
earliest deadline first is an order that does it (Liu and Layland 1973).
"""

import math

_STEP_S = 0.1
"""Dues are rounded down to such steps."""


class Demand:
    """The waiting tokens, by due time.

    The class is not safe for threads: the lock of the scheduler guards every call.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # step of the due time -> tokens
        self._total = 0
        self._first: float = math.inf  # the first step, or an earlier one

    def add(self, due: float, tokens: int) -> None:
        """Add tokens that are due at a `time.monotonic` time; negative: subtract them."""
        if due == math.inf:
            return
        step = math.floor(due / _STEP_S)
        self._total += tokens
        left = self._tokens.get(step, 0) + tokens
        if left:
            self._tokens[step] = left
            self._first = min(self._first, step)
        else:
            self._tokens.pop(step, None)
            if step == self._first:
                self._first = min(self._tokens, default=math.inf)

    def slack_s(self, now: float, rate: float, due: float = math.inf, tokens: int = 0) -> float:
        """Return how long the queue may do other work, and all that waits still ends in time.

        Args:
            now: `time.monotonic` time.
            rate: tokens per second.
            due: when further tokens would be due; dues before it do not depend on them.
            tokens: number of these tokens.

        Returns:
            Seconds, or a lower bound above zero; below zero: something ends too late.
        """
        if due == math.inf:
            tokens = 0
        added = math.floor(due / _STEP_S) if tokens else math.inf
        bound = min(self._first, added) * _STEP_S - now - (self._total + tokens) / rate
        if bound > 0:
            return bound
        sums, slack = tokens, math.inf
        before = 0
        for step in sorted(self._tokens):
            if step < added:
                before += self._tokens[step]
                if not tokens:
                    slack = min(slack, step * _STEP_S - now - before / rate)
                continue
            sums += self._tokens[step]
            slack = min(slack, step * _STEP_S - now - (before + sums) / rate)
        return min(slack, added * _STEP_S - now - (before + tokens) / rate)
