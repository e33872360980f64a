"""Where a request's time goes, from what the server itself counts and shows under ``/metrics``."""

import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_TOTAL = "cloze_request_duration_seconds"
_PART = "cloze_request_part_duration_seconds"

REST = "the rest"
"""Of a request's time in the server: reading, parsing, decoding, writing, and waiting for the event loop's turn."""


def scrape(url: str) -> Mapping[str, float]:
    """Seconds in requests that got a result so far: in all, by part, and their count.

    Raises:
        OSError: nobody answers there.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            answered = sample.labels.get("status") == "200" and sample.labels.get("model")
            if sample.name == f"{_TOTAL}_sum" and answered:
                found["total"] += sample.value
            elif sample.name == f"{_TOTAL}_count" and answered:
                found["count"] += sample.value
            elif sample.name == f"{_PART}_sum":
                found[sample.labels["part"]] += sample.value
    return found


def parts_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds a request between two scrapes, by part; empty if none was answered."""
    spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
    count, total = spent.pop("count", 0.0), spent.pop("total", 0.0)
    if not count:
        return {}
    return {
        name: value / count * 1000
        for name, value in (spent | {REST: total - sum(spent.values())}).items()
    }
