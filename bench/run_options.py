"""The options of ``cloze bench run``, and the texts, engines and servers that they select."""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cloze.bench.errors import BenchError
from cloze.bench.run import Plan
from cloze.bench.subjects import (
    EngineAlone,
    MeasuredModel,
    MeasuredServer,
    cloze_server,
    infinity_server,
    pipeline_server,
)
from cloze.bench.texts import Texts, make_texts, mask_a_word, read_texts, words_of
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.tasks import TASKS, Task

_INFINITY_ENGINES = ("torch", "optimum")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``cloze bench run`` was asked to measure, as on the command line.

    Attributes:
        models: bundles to compare.
        model_store: folder of the bundles.
        task: name of the task.
        texts: file with the texts; None: random words.
        count: largest number of texts.
        clients: see `Plan`.
        shares: see `Plan`.
        arrivals: CSV file of recorded arrival times.
        bulk: see `Plan`.
        each: texts per request.
        seconds: of each load.
        turns: number of repetitions.
        precisions: of engines and servers, to compare.
        device: of engines and servers.
        frontends: of the servers, to compare.
        infinity: interpreter of an environment with infinity-emb.
        pipeline: interpreter of an environment with transformers and FastAPI.
        checkpoint: the weights for the peers.
    """

    models: tuple[str, ...]
    model_store: Path
    task: str
    texts: Path | None
    count: int
    clients: tuple[int, ...]
    shares: tuple[float, ...]
    arrivals: Path | None
    bulk: bool
    each: int
    seconds: float
    turns: int
    precisions: tuple[str, ...]
    device: str
    frontends: tuple[int, ...]
    infinity: str | None
    pipeline: str | None
    checkpoint: Path | None

    def plan(self) -> Plan:
        """Return the loads.

        Raises:
            ValueError: the file of arrival times is unusable.
            OSError: the file cannot be read.
        """
        return Plan(
            clients=self.clients,
            shares=self.shares,
            arrivals=_read_arrivals(self.arrivals) if self.arrivals else None,
            texts_per_request=self.each,
            bulk=self.bulk,
            seconds=self.seconds,
            turns=self.turns,
        )

    @property
    def interpreters(self) -> dict[str, str]:
        """The interpreter of each environment of the measurement."""
        peers = {"infinity-emb": self.infinity, "pipeline": self.pipeline}
        chosen = {name: python for name, python in peers.items() if python}
        return {"Cloze": sys.executable, **chosen}


@dataclass(frozen=True, slots=True)
class Selection:
    """The texts, engines and servers of a measurement.

    Attributes:
        texts: sent to every subject.
        engines: by name; each opens one engine.
        servers: ours, then the peers.
    """

    texts: Texts
    engines: dict[str, Callable[[], EngineAlone]]
    servers: list[MeasuredServer]

    @classmethod
    def of(cls, options: RunOptions) -> Self:
        """Return what the options select.

        Raises:
            BenchError: a peer lacks its checkpoint.
            StoreError: a bundle cannot be opened.
            ValueError: the file of texts is unusable.
            OSError: a file cannot be read.
        """
        if (options.infinity or options.pipeline) and options.checkpoint is None:
            raise BenchError("peers need the weights as a checkpoint: give --checkpoint")
        task = TASKS[options.task]
        texts = _texts(options, task)
        models = _models(options, task)
        engines = {
            f"{title} engine": partial(EngineAlone, model, texts.texts)
            for title, model in models.items()
        }
        servers = [
            cloze_server(title, model, number)
            for title, model in models.items()
            for number in options.frontends
        ]
        return cls(texts, dict(engines), [*servers, *_peers(options, task)])


def _models(options: RunOptions, task: Task) -> dict[str, MeasuredModel]:
    """Return each bundle in each precision, by title."""
    models = {}
    for bundle in options.models:
        for name in options.precisions:
            title = bundle if name == "auto" else f"{bundle} {name}"
            models[title] = MeasuredModel(
                bundle,
                options.model_store,
                task,
                "auto" if name == "auto" else Precision(name),
                Device(options.device),
            )
    return models


def _peers(options: RunOptions, task: Task) -> list[MeasuredServer]:
    checkpoint, peers = options.checkpoint, []
    if checkpoint and options.infinity:
        peers += [infinity_server(options.infinity, checkpoint, e) for e in _INFINITY_ENGINES]
    if checkpoint and options.pipeline:
        peers.append(pipeline_server(options.pipeline, checkpoint, task))
    return peers


def _texts(options: RunOptions, task: Task) -> Texts:
    """Return the texts; for fill-mask, one word of each is masked."""
    bundle = Store(options.model_store).open(options.models[0])
    if options.texts:
        texts = read_texts(options.texts, options.count)
    else:
        texts = make_texts(words_of(bundle), options.count)
    if task.name != "fill-mask":
        return texts
    return mask_a_word(texts, bundle.manifest.tokenizer.mask_token or "")


def _read_arrivals(file: Path) -> NDArray[np.float64]:
    """Read arrival times from the column ``timestamp`` of a CSV file.

    Returns:
        float64 [n] seconds since the first arrival, ascending.
    """
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        if "timestamp" not in (reader.fieldnames or ()):
            raise ValueError(f"{file} has no column 'timestamp'")
        # Recorded times may have more digits than the six of a microsecond.
        times = [datetime.fromisoformat(row["timestamp"][:26]).timestamp() for row in reader]
    if len(times) < 2 or times[0] == times[-1]:
        raise ValueError(f"{file} has fewer than two arrival times")
    return np.sort(np.asarray(times)) - min(times)
