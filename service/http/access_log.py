"""The access log: one line per answered request, never its content.

The event loop only appends a record; a thread formats the records and writes them in batches.
"""

import atexit
import logging
import random
import threading
import time
from collections import deque
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from cloze.service.core import Timings
from cloze.service.logs import WRITER, LineWriter, LogFormat, iso_time

_WRITE_EVERY_S = 0.1


class RequestCost(NamedTuple):
    """The cost of an answered request: texts, tokens, and the parts of its time."""

    texts: int
    tokens: int
    timings: Timings


class AccessRecord(NamedTuple):
    """An answered request.

    Attributes:
        time: seconds since the epoch at its end.
        request_id: its id.
        method, route: its method, and its path if the server has such a route.
        model: the full name of the model; "" if none was chosen.
        status: the HTTP status.
        seconds: seconds from the end of its headers to the end of its answer.
        cost: the cost of a result; None for an error, or a request that runs no model.
        error: the kind of error; "" for a result.
    """

    time: float
    request_id: str
    method: str
    route: str
    model: str
    status: int
    seconds: float
    cost: RequestCost | None
    error: str

    @property
    def level(self) -> int:
        """The level of the line: error for 5xx, warning for 4xx."""
        if self.status >= 500:
            return logging.ERROR
        return logging.WARNING if self.status >= 400 else logging.INFO


class AccessLog:
    """Writes the lines of one process.

    Args:
        form: the format of a line.
        level: the lowest level of a line.
        share: the share of the results to log, in [0, 1]; errors are always logged.
        quiet_routes: routes of probes and scrapes, whose results are logged only at debug.
        writer: writes the lines.
    """

    def __init__(
        self,
        form: LogFormat,
        level: int,
        share: float,
        quiet_routes: frozenset[str],
        writer: LineWriter = WRITER,
    ) -> None:
        self._form, self._level, self._share = form, level, share
        self._quiet = quiet_routes if level > logging.DEBUG else frozenset()
        self._writer = writer
        self._waiting: deque[AccessRecord] = deque()
        self._formatting = threading.Lock()

    def begin(self) -> None:
        """Begin to write what is added, until the process ends."""
        threading.Thread(target=self._write_often, name="access log", daemon=True).start()
        atexit.register(self.flush, _WRITE_EVERY_S)

    def add(self, record: AccessRecord) -> None:
        """Log a request. Call this method on the event loop."""
        if record.level < self._level:
            return
        if record.status < 400 and (
            record.route in self._quiet or (self._share < 1 and random.random() >= self._share)
        ):
            return
        self._waiting.append(record)

    def flush(self, wait_s: float) -> None:
        """Write the lines of all records; see `LineWriter.flush`."""
        with self._formatting:
            while self._waiting:
                self._writer.add(_line(self._form, self._waiting.popleft()))
        self._writer.flush(wait_s)

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self.flush(_WRITE_EVERY_S)


def _line(form: LogFormat, record: AccessRecord) -> str:
    """Return the line of a request, with its line end."""
    level = logging.getLevelName(record.level)
    cost, ms = record.cost, {"total": record.seconds}
    if cost is not None:
        parts = cost.timings
        ms |= {"tokenize": parts.tokenize_s, "queue": parts.queue_s, "inference": parts.inference_s}
    rounded = {name: round(seconds * 1000, 2) for name, seconds in ms.items()}
    fields: dict[str, Any] = {"id": record.request_id}
    if record.model:
        fields["model"] = record.model
    if cost is not None:
        fields |= {"texts": cost.texts, "tokens": cost.tokens}
    if record.error:
        fields["error"] = record.error
    if form == "json":
        values = {
            "time": iso_time(record.time),
            "level": level.lower(),
            "message": "request",
            "method": record.method,
            "route": record.route,
            "status": record.status,
            **fields,
            "ms": rounded,
        }
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE).decode()
    shown = {**fields, **{f"{name}_ms": value for name, value in rounded.items()}}
    pairs = " ".join(f"{name}={value}" for name, value in shown.items())
    at = datetime.fromtimestamp(record.time).strftime("%Y-%m-%d %H:%M:%S")  # as logging
    milliseconds = int(record.time * 1000) % 1000
    begin = f"{at},{milliseconds:03d} {level} {record.method} {record.route} {record.status}"
    return f"{begin} {pairs}\n"
