"""What was found, as values and as JSON. Knows neither how it was measured nor how it is shown."""

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.load import Load

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_PACKAGES = (
    "cloze",
    "onnxruntime",
    "onnxruntime-gpu",
    "tokenizers",
    "uvicorn",
    "fastapi",
    "torch",
    "transformers",
    "infinity-emb",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One subject under one load, once.

    Attributes:
        subject: what was measured.
        load: how: ``engine``, ``closed 32``, ``poisson 0.7``.
        turn: its number, from 0.
        texts_per_s, requests_per_s: answered with 200.
        latency_ms: percentiles of those, by name.
        answered: requests answered with 200.
        failed: answers with another status, by status; "0" is a connection that ended.
        cpu_s: processor time of the subject's processes, in seconds.
        rss_mb: their memory afterwards.
        parts_ms: where a request's time went, on average, as the server says.
    """

    subject: str
    load: str
    turn: int
    texts_per_s: float
    requests_per_s: float = 0.0
    answered: int = 0
    latency_ms: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    rss_mb: float = 0.0
    parts_ms: dict[str, float] = field(default_factory=dict)


def turn_of(
    subject: str,
    load: str,
    turn: int,
    found: Load,
    *,
    cpu_s: float,
    rss_mb: float,
    parts_ms: dict[str, float] | None = None,
) -> Turn:
    """A turn of requests."""
    latency = {f"p{p:g}": found.latencies.get_value_at_percentile(p) / 1000 for p in _PERCENTILES}
    latency |= {
        "max": found.latencies.get_max_value() / 1000,
        "mean": found.latencies.get_mean_value() / 1000,
    }
    return Turn(
        subject,
        load,
        turn,
        texts_per_s=found.texts / found.seconds,
        requests_per_s=found.requests / found.seconds,
        answered=found.requests,
        latency_ms=latency if found.requests else {},
        failed={
            str(status): count for status, count in sorted(found.statuses.items()) if status != 200
        },
        cpu_s=cpu_s,
        rss_mb=rss_mb,
        parts_ms=parts_ms or {},
    )


@dataclass(frozen=True, slots=True)
class Start:
    """A subject's start: seconds until it is ready, and its memory then, in MB."""

    subject: str
    ready_s: float
    rss_mb: float


ONE_LENGTH, COMPARED = "one length", "compared"


@dataclass(frozen=True, slots=True)
class Cell:
    """Batches of one kind on one engine.

    Attributes:
        subject: what ran them.
        group: `ONE_LENGTH`, or `COMPARED` with others on the same batches.
        lengths: tokens of a sequence, or the name of a mix.
        batch_tokens: of a batch, at most.
        tokens_per_s, sequences_per_s: padding not counted.
        of_peak: operations a second of what was not padding, over the device's measured peak.
    """

    subject: str
    group: str
    lengths: str
    batch_tokens: int
    tokens_per_s: float
    sequences_per_s: float
    of_peak: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark.

    Attributes:
        command: that makes it again.
        date: UTC.
        machine, versions: where, and of what, by environment.
        model: name and size of what was served.
        texts: where they came from, how many, their lengths in tokens.
        cells: of engines alone, by length and size of batch.
        notes: what the reader must know.
    """

    command: str
    date: str
    machine: dict[str, str]
    versions: dict[str, dict[str, str]]
    model: str
    texts: dict[str, Any]
    turns: list[Turn]
    starts: list[Start]
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def subjects(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(turn.subject for turn in self.turns))

    def loads(self) -> list[str]:
        """In the order in which they were put."""
        return list(dict.fromkeys(turn.load for turn in self.turns))

    def of(self, subject: str, load: str) -> list[Turn]:
        """All turns of a subject under a load."""
        return [turn for turn in self.turns if (turn.subject, turn.load) == (subject, load)]

    def median(self, subject: str, load: str, figure: str) -> float | None:
        """Of ``texts_per_s``, ``requests_per_s``, ``cpu_s``, ``rss_mb``, or a latency's name; None if there is none."""
        found = [
            value
            for turn in self.of(subject, load)
            if (
                value := turn.latency_ms.get(figure)
                if figure in turn.latency_ms
                else getattr(turn, figure, None)
            )
            is not None
        ]
        return statistics.median(found) if found else None

    def parts(self, subject: str, load: str) -> dict[str, float]:
        """Medians of `Turn.parts_ms`."""
        found = [turn.parts_ms for turn in self.of(subject, load) if turn.parts_ms]
        return {
            name: statistics.median(parts[name] for parts in found)
            for name in (found[0] if found else ())
        }

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, file: Path) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is no result.
            OSError: it cannot be read.
        """
        try:
            body = json.loads(file.read_text())
            turns = [Turn(**turn) for turn in body.pop("turns")]
            starts = [Start(**start) for start in body.pop("starts")]
            cells = [Cell(**cell) for cell in body.pop("cells", ())]
            return cls(**body, turns=turns, starts=starts, cells=cells)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is no result of cloze bench ({error})") from error


def describe_machine(cores: int) -> dict[str, str]:
    """The processor, its cores, the memory and the system."""
    processor, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                processor = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
    return {
        "processor": processor,
        "instructions": " ".join(flag for flag in known if flag in flags),
        "cores": str(cores),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def installed(python: str = sys.executable) -> dict[str, str]:
    """Versions of what is measured, of those packages that an interpreter's environment has."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "names = {(d.metadata['Name'] or '').lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: names[name] for name in sys.argv[1:] if name in names}))"
    )
    said = subprocess.run(
        [python, "-c", program, *_PACKAGES], capture_output=True, text=True, check=True
    ).stdout
    versions: dict[str, str] = json.loads(said)
    return versions
