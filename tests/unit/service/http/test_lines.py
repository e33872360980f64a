"""Which requests have a line in the access log."""

import json
import logging
from typing import Any

from cloze.service.core import ServedRequest
from cloze.service.observe.logs import AccessLog, LineWriter, _line


def logged(level: int, share: float = 1.0, times: int = 1) -> list[str]:
    """Return the requests that have a line, out of one of each kind."""
    writer = LineWriter()
    log = AccessLog("json", level, share, frozenset({"/health"}), writer)
    ended: dict[str, Any] = {"ended": 1.5, "identity": b"r1", "seconds": 0.01}
    for route, statuses in (("/embed", (200, 400, 500)), ("/health", (200, 503))):
        for status in statuses * times:
            log.add(ServedRequest(route=route, status=status, **ended))
    lines = [json.loads(_line(*each)) for each in writer.waiting]
    return [f"{line['route']} {line['status']}" for line in lines]


def test_which_requests_are_logged() -> None:
    errors = ["/embed 400", "/embed 500", "/health 503"]
    assert logged(logging.INFO) == ["/embed 200", *errors]
    assert logged(logging.WARNING) == errors
    assert logged(logging.ERROR) == errors[1:]
    assert logged(logging.DEBUG) == ["/embed 200", *errors[:2], "/health 200", "/health 503"]
    assert logged(logging.INFO, share=0.0) == errors
    assert 10 < logged(logging.INFO, share=0.3, times=200).count("/embed 200") < 120
