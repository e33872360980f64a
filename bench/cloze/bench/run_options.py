"""The options of ``cloze bench run``, and the texts, engines and servers that they select."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from cloze.bench.errors import BenchError
from cloze.bench.machine import installed_versions
from cloze.bench.peers import PEERS, Peer
from cloze.bench.run import Plan
from cloze.bench.servers import MeasuredServer
from cloze.bench.subjects import EngineAlone, MeasuredModel, cloze_server
from cloze.bench.texts import MADE_TEXTS, Texts, make_texts, mask_a_word, read_texts, words_of
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.tasks import TASKS, Task


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``cloze bench run`` was asked to measure, as on the command line.

    Attributes:
        texts: sets of texts, measured one after the other: files, or names of `MADE_TEXTS`.
    """

    models: tuple[str, ...]
    model_store: Path
    task: str
    texts: tuple[str, ...]
    count: int
    precisions: tuple[str, ...]
    device: str
    frontends: tuple[int, ...]
    checkpoint: Path | None
    backends: tuple[str, ...]
    peers: Mapping[str, str]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Selection:
    """The texts, engines and servers of a measurement.

    Attributes:
        texts: sets of texts by label; all subjects get each of them.
        engines: by name; each opens one engine for texts.
    """

    texts: dict[str, Texts]
    engines: dict[str, Callable[[Sequence[str]], EngineAlone]]
    servers: list[MeasuredServer]
    versions: dict[str, Mapping[str, str]]

    @classmethod
    def of(cls, options: RunOptions) -> Self:
        """Return what the options select.

        Raises:
            BenchError: a peer does not start, has no checkpoint, or does not serve the task.
            StoreError: a bundle cannot be opened.
            ValueError: a file of texts is unusable.
            OSError: a file cannot be read.
        """
        task = TASKS[options.task]
        models = _models(options, task)
        engines = {
            f"{title} engine": partial(EngineAlone, model) for title, model in models.items()
        }
        servers = [
            cloze_server(title, model, number)
            for title, model in models.items()
            for number in options.frontends
        ]
        versions: dict[str, Mapping[str, str]] = {"Cloze": installed_versions()}
        for peer, python, checkpoint in _peers(options):
            servers += peer.servers(python, checkpoint, options.backends)
            versions[peer.title] = peer.versions(python, options.backends)
        return cls(_text_sets(options, task), dict(engines), servers, versions)


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


def _peers(options: RunOptions) -> Iterator[tuple[Peer, str, Path]]:
    """Yield the peers to measure, with their interpreters and the checkpoint that they serve."""
    for peer in PEERS:
        python = options.peers.get(peer.option)
        if python is None:
            continue
        if options.checkpoint is None:
            raise BenchError("peers need the weights as a checkpoint: give --checkpoint")
        if not (options.checkpoint / "config.json").is_file():
            raise BenchError(f"{options.checkpoint} is no checkpoint: it has no config.json")
        if options.task != "embed":
            raise BenchError(f"{peer.title} does not serve {options.task}")
        yield peer, python, options.checkpoint.resolve()


def _text_sets(options: RunOptions, task: Task) -> dict[str, Texts]:
    """Return the sets of texts by label; for fill-mask, one word of each text is masked."""
    bundle = Store(options.model_store).open(options.models[0])
    sets = {}
    for name in options.texts:
        if name in MADE_TEXTS:
            texts = make_texts(words_of(bundle), options.count, name)
        else:
            texts = read_texts(Path(name), options.count)
        if task.name == "fill-mask":
            texts = mask_a_word(texts, bundle.manifest.tokenizer.mask_token or "")
        sets[label_of(name)] = texts
    if len(sets) < len(options.texts):
        raise ValueError(f"two sets of texts have the same name: {', '.join(options.texts)}")
    return sets


def label_of(texts: str) -> str:
    """Return the name of a set of texts in a result."""
    return Path(texts).name.split(".")[0]
