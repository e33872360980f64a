"""Computes how many pods serve a mix of requests, from the processor time of each kind."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloze.bench.result import LoadKind, Result
from cloze.bench.run_options import label_of
from cloze.bench.texts import MADE_TEXTS

LOAD_OF_A_POD = 0.7
"""Share of its cores at which a pod runs: the target of the components `autoscaling` and `keda`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: its share of the mix, and its mean processor time."""

    texts: str
    share: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of some cores for a rate of requests per second."""

    kinds: list[Kind]
    rate: float
    pod_cores: float

    @property
    def cpu_ms(self) -> float:
        """The mean processor time of a request of the mix."""
        return sum(kind.share * kind.cpu_ms for kind in self.kinds)

    @property
    def cores(self) -> float:
        """The cores that the requests keep busy."""
        return self.rate * self.cpu_ms / 1000

    @property
    def pods(self) -> int:
        """The least number of pods that run at most at `LOAD_OF_A_POD`, and one more."""
        return math.ceil(self.cores / (self.pod_cores * LOAD_OF_A_POD)) + 1

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f} x {self.cpu_ms:.2f} ms = {self.cores:.1f} cores; pods of "
            f"{self.pod_cores:g} cores at {LOAD_OF_A_POD:.0%}: {self.pods - 1}, and one more: "
            f"{self.pods}"
        )


def read_mix(file: Path) -> dict[str, float]:
    """Return the share of each kind of request, whose sum is 1, by its texts.

    Texts are a file, found from the folder of the mix, or the name of random texts. Shares may be
    numbers of any unit, such as requests of a day.

    Raises:
        ValueError: the file is not CSV with the columns ``texts`` and ``share``, it has no row, or
            a share is not a number above 0.
        OSError: the file cannot be read.
    """
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        if not {"texts", "share"} <= set(reader.fieldnames or ()):
            raise ValueError(f"{file} is not CSV with the columns 'texts' and 'share'")
        rows = [(row["texts"] or "", row["share"] or "") for row in reader]
    mix: dict[str, float] = {}
    for texts, written in rows:
        try:
            share = float(written)
        except ValueError:
            share = 0.0
        if not (texts and 0 < share < math.inf):
            raise ValueError(f"{file}: the share of {texts!r} is {written!r}, no number above 0")
        mix[texts if texts in MADE_TEXTS else str(file.parent / texts)] = share
    if not mix or len(mix) < len(rows):
        raise ValueError(f"{file} has no kind of request, or one kind twice")
    return {texts: share / sum(mix.values()) for texts, share in mix.items()}


def count_pods(result: Result, mix: Mapping[str, float], rate: float, pod_cores: float) -> Pods:
    """Return the pods for a rate of requests, from the closed loop with the most clients.

    Raises:
        ValueError: the result has not one server of ours, or lacks a kind of the mix.
    """
    engines = result.engines().items()
    servers = [subject for subject, engine in engines if engine not in ("", subject)]
    if len(servers) != 1:
        raise ValueError(f"the result has {len(servers)} servers ({', '.join(servers)}), not one")
    closed = [load for load in result.loads() if load.kind is LoadKind.CLOSED]
    kinds = []
    for texts, share in mix.items():
        name = label_of(texts)
        label = name if len(result.texts) > 1 else ""
        loads = [load for load in closed if load.label == label and name in result.texts]
        most = max(loads, key=lambda load: load.number or 0, default=None)
        cpu_ms = most and result.median(servers[0], most, "cpu_ms")
        if not cpu_ms:
            measured = ", ".join(result.texts)
            raise ValueError(f"no request with {name!r} was answered in time (texts: {measured})")
        kinds.append(Kind(name, share, cpu_ms))
    return Pods(kinds, rate, pod_cores)
