"""Reads from a server's ``/metrics`` how long each part of a request takes."""

import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_TOTAL = "cloze_request_duration_seconds"
_PART = "cloze_request_part_duration_seconds"

REST = "the rest"
"""Time in the server outside the named parts.

This time covers reading, parsing, decoding, writing, and the wait for the event loop.
"""


def scrape(url: str) -> Mapping[str, float]:
    """Return the seconds that answered requests took so far.

    Returns:
        Seconds of whole requests as ``total``, seconds by part, and the number of requests as
        ``count``.

    Raises:
        OSError: no server answers at the URL.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    seconds: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            answered = bool(sample.labels.get("model"))
            if sample.name == f"{_TOTAL}_sum" and answered:
                seconds["total"] += sample.value
            elif sample.name == f"{_TOTAL}_count" and answered:
                seconds["count"] += sample.value
            elif sample.name == f"{_PART}_sum":
                seconds[sample.labels["part"]] += sample.value
    return seconds


def parts_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds per request between two scrapes, by part.

    The result is empty if no request was answered between the scrapes.
    """
    seconds = {name: value - before.get(name, 0.0) for name, value in after.items()}
    count, total = seconds.pop("count", 0.0), seconds.pop("total", 0.0)
    if not count:
        return {}
    seconds[REST] = total - sum(seconds.values())
    return {name: value / count * 1000 for name, value in seconds.items()}
