"""The figures of a measurement, as values and as JSON."""

import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cloze.bench.load import LoadResult
from cloze.bench.machine import describe_machine
from cloze.tables import report

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class LoadKind(StrEnum):
    """How requests arrive; begins the name of a load."""

    CLOSED = "closed"
    PAUSE = "pause"
    POISSON = "poisson"
    BESIDE_BULK = "single beside bulk"


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        number: clients of a closed loop; milliseconds of a pause; share of the capacity of an open
            loop.
        label: ends the name, where a result has several plans.
    """

    kind: LoadKind
    number: float | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Name in tables: ``closed 32``, ``poisson 0.7 questions``."""
        number = "" if self.number is None else f"{self.number:g}"
        return " ".join(filter(None, (self.kind, number, self.label)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one subject under one load.

    Attributes:
        texts_per_s: texts of requests answered with status 200, per second.
        requests_per_s: requests answered with status 200, per second.
        answered: requests answered with status 200.
        latency_ms: percentiles of the answered requests, by name.
        failed: number of other answers by status; "0" is a connection that closed.
        cpu_s: processor time of the server's processes, in seconds.
        rss_mb: memory of the processes after the load, in MB.
        pss_mb: the same, with each page counted once.
        stolen: share of the machine's processor time that other guests of the host took.
        seconds: duration of the load.
        client_cpu_s: processor time of the load generator, in seconds.
        engine: the engine alone on the same model; "" for a peer.
    """

    subject: str
    load: Load
    turn: int
    texts_per_s: float
    requests_per_s: float = 0.0
    answered: int = 0
    latency_ms: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    rss_mb: float = 0.0
    pss_mb: float = 0.0
    stolen: float = 0.0
    seconds: float = 0.0
    client_cpu_s: float = 0.0
    engine: str = ""

    @classmethod
    def of_load(
        cls, subject: str, engine: str, load: Load, turn: int, measured: LoadResult
    ) -> Self:
        """Return the turn that summarizes the requests of one load."""
        statuses, latencies = measured.statuses, measured.latencies
        latency_ms: dict[str, float] = {}
        if latencies.get_total_count():
            latency_ms = {
                f"p{p:g}": latencies.get_value_at_percentile(p) / 1000 for p in _PERCENTILES
            }
        return cls(
            subject,
            load,
            turn,
            texts_per_s=measured.texts / measured.seconds,
            requests_per_s=measured.requests / measured.seconds,
            answered=measured.requests,
            latency_ms=latency_ms,
            failed={str(s): count for s, count in sorted(statuses.items()) if s != 200},
            seconds=measured.seconds,
            client_cpu_s=measured.client_cpu_s,
            engine=engine,
        )

    @property
    def cpu_ms(self) -> float:
        """Processor time of the server per answered request, in milliseconds."""
        return self.cpu_s * 1000 / self.answered if self.answered else 0.0

    @property
    def client_cpu_ms(self) -> float:
        """Processor time of the load generator per answered request, in milliseconds."""
        return self.client_cpu_s * 1000 / self.answered if self.answered else 0.0

    def figure(self, name: str) -> float | None:
        """Return an attribute or a latency by its name; None if this turn does not have it."""
        value: float | None = self.latency_ms.get(name, getattr(self, name, None))
        return value


@dataclass(frozen=True, slots=True)
class ServerStart:
    """The start of a subject: seconds until it is ready, and its memory at that time, in MB."""

    subject: str
    ready_s: float
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Cell:
    """The speed of one engine on batches of one kind.

    Attributes:
        lengths: tokens per sequence, or the name of a mix of lengths.
        batch_tokens: largest number of tokens per batch.
        tokens_per_s: tokens per second, without padding.
        of_peak: operations per second without padding, over the device's measured peak.
        engine: the engine of the same size, to compare with.
    """

    subject: str
    lengths: str
    batch_tokens: int
    tokens_per_s: float
    sequences_per_s: float
    of_peak: float
    engine: str


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark; measurements add their figures.

    Attributes:
        command: the command line.
        date: the date and the time of day, UTC.
        machine: processor, cores, memory and system.
        texts: source, number and mean length in tokens of each set, by label.
        cells: of engines alone, by sequence length and batch size.
        notes: what a reader must consider, such as what was left out and why.
        failed: the names of parts that failed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    versions: Mapping[str, Mapping[str, str]]
    texts: dict[str, str] = field(default_factory=dict)
    command: str = field(default_factory=lambda: shlex.join(["cloze", *sys.argv[1:]]))
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M}")
    machine: dict[str, str] = field(default_factory=describe_machine)
    turns: list[Turn] = field(default_factory=list)
    starts: list[ServerStart] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Add a note, and print it as progress."""
        self.notes.append(line)
        report(line)

    def subjects(self) -> list[str]:
        """Return the subjects in the order of their measurement."""
        return list(dict.fromkeys(turn.subject for turn in self.turns))

    def engines(self) -> dict[str, str]:
        """Return the engine alone of each subject; "" for a peer."""
        return {turn.subject: turn.engine for turn in self.turns}

    def loads(self) -> list[Load]:
        """Return the loads in the order of their measurement."""
        return list(dict.fromkeys(turn.load for turn in self.turns))

    def of(self, subject: str, load: Load) -> list[Turn]:
        """Return all turns of a subject under a load."""
        return [turn for turn in self.turns if (turn.subject, turn.load) == (subject, load)]

    def median(self, subject: str, load: Load, figure: str) -> float | None:
        """Return the median of a figure over the turns; None if no turn has the figure."""
        values = [turn.figure(figure) for turn in self.of(subject, load)]
        measured = [value for value in values if value is not None]
        return statistics.median(measured) if measured else None

    def to_json(self) -> str:
        """Return the result as JSON text, for `from_json`."""
        return _JSON.dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, file: Path) -> Self:
        """Read a file that holds the text of `to_json`.

        Raises:
            ValueError: the file is not a result.
            OSError: the file cannot be read.
        """
        try:
            return _JSON.validate_json(file.read_bytes())  # type: ignore[return-value]
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"{file} is no result of cloze bench ({reason})") from error


_JSON = TypeAdapter(Result)
