"""Observed values that are written to their histograms later, many at once."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from prometheus_client import Histogram
from prometheus_client.samples import Exemplar

_MAX_UNWRITTEN = 4096
"""Observations that wait until their counters are written."""

_LABEL = "request_id"
_MAX_EXEMPLAR_CHARACTERS = 128
"""Most characters of the names and values of an exemplar's labels.

Source: OpenMetrics 1.0, section Exemplars. A scraper may reject an exposition with a longer one.
"""


class Observations:
    """Observed values that are not yet in their histograms. Any thread may add values.

    `Histogram.observe` costs about 4 us, and a request has four values. To append a value costs
    0.2 us, and `write` adds many values at once.

    Args:
        exemplars: whether the histograms keep the id of a recent request per bucket. An id that
            OpenMetrics does not allow, because it is too long, is not kept.
    """

    def __init__(self, *, exemplars: bool = False) -> None:
        self._exemplars = exemplars
        # The methods of a deque are atomic.
        self._unwritten: deque[tuple[Histogram, float, bytes]] = deque()

    def add(self, series: Histogram, value: float, identity: bytes = b"") -> None:
        """Add an observed value, and the id of its request if it has one."""
        self._unwritten.append((series, value, identity))
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self.write()

    def write(self) -> None:
        """Add all values to their histograms."""
        values_of = defaultdict(list)
        newest: dict[Histogram, tuple[float, bytes]] = {}
        try:
            while True:
                series, value, identity = self._unwritten.popleft()
                values_of[series].append(value)
                if identity and len(_LABEL) + len(identity) <= _MAX_EXEMPLAR_CHARACTERS:
                    newest[series] = value, identity
        except IndexError:
            pass  # empty
        for series, observed in values_of.items():
            observe_all(series, observed)
        if self._exemplars:
            for series, (value, identity) in newest.items():
                _set_exemplar(series, value, identity.decode("ascii"))


def observe_all(series: Histogram, observed: Sequence[float]) -> None:
    """Do what `Histogram.observe` does for each value; the class has no such method."""
    bounds = series._upper_bounds
    counts = np.bincount(np.searchsorted(bounds, observed), minlength=len(bounds))
    series._sum.inc(sum(observed))
    for bucket, count in zip(series._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)


def _set_exemplar(series: Histogram, value: float, identity: str) -> None:
    """Do what `Histogram.observe` does with an exemplar."""
    bucket = int(np.searchsorted(series._upper_bounds, value))
    exemplar = Exemplar({_LABEL: identity}, value, time.time())
    series._buckets[bucket].set_exemplar(exemplar)
