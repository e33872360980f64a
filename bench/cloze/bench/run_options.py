"""The options of ``cloze bench run``, and the measurement that they select."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cloze.bench.errors import BenchError
from cloze.bench.machine import installed_versions
from cloze.bench.peers import PEERS, Peer
from cloze.bench.processes import MeasuredServer
from cloze.bench.result import Result
from cloze.bench.run import Plan, measure
from cloze.bench.subjects import EngineAlone, MeasuredModel, cloze_server
from cloze.bench.texts import MADE_TEXTS, Texts, make_texts, mask_a_word, read_texts, words_of
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.tasks import TASKS


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``cloze bench run`` was asked to measure, as on the command line.

    Attributes:
        texts: sets of texts, measured one after the other: files, or names of `MADE_TEXTS`.
        peers: interpreters by `Peer.option`.
    """

    models: tuple[str, ...]
    model_store: Path
    task: str
    texts: tuple[str, ...]
    plan: Plan
    count: int = 2000
    precisions: tuple[str, ...] = ("auto",)
    device: str = "cpu"
    frontends: tuple[int, ...] = (0,)
    checkpoint: Path | None = None
    backends: tuple[str, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)


def measure_run(options: RunOptions) -> Result:
    """Measure what the options select: each engine alone, our servers and the peers.

    Raises:
        BenchError: a peer does not start, has no checkpoint, or does not serve the task.
        StoreError: a bundle cannot be opened.
        ValueError: a file of texts is unusable.
        OSError: a file cannot be read.
    """
    models = _models(options)
    servers: list[MeasuredServer] = []
    for title, model in models.items():
        servers += (cloze_server(title, model, number) for number in options.frontends)
    versions: dict[str, Mapping[str, str]] = {"Cloze": installed_versions()}
    for peer, python, checkpoint in _peers(options):
        servers += peer.servers(python, checkpoint, options.backends)
        versions[peer.title] = peer.versions(python)
    sets, store = _text_sets(options), Store(options.model_store)
    references = ", ".join(store.manifest(name).reference for name in options.models)
    result = Result(f"{references}, {options.task}", versions)
    for name, texts in sets.items():
        engines = {
            f"{title} engine": partial(EngineAlone, model, texts.texts)
            for title, model in models.items()
        }
        lengths = next(iter(engines.values()))().lengths
        mean = sum(lengths) / len(lengths)
        result.texts[name] = f"({texts.source}; {len(lengths)} of {mean:.1f} tokens on average)"
        plan = replace(options.plan, label=name if len(sets) > 1 else "")
        measure(engines, servers, texts.texts, plan, result)
    return result


def _models(options: RunOptions) -> dict[str, MeasuredModel]:
    """Return each bundle in each precision, by title."""
    models = {}
    for bundle in options.models:
        for name in options.precisions:
            title = bundle if name == "auto" else f"{bundle} {name}"
            models[title] = MeasuredModel(
                bundle,
                options.model_store,
                TASKS[options.task],
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


def _text_sets(options: RunOptions) -> dict[str, Texts]:
    """Return the sets of texts by label; for fill-mask, one word of each text is masked."""
    bundle = Store(options.model_store).open(options.models[0])
    sets = {}
    for name in options.texts:
        if name in MADE_TEXTS:
            texts = make_texts(words_of(bundle), options.count, name)
        else:
            texts = read_texts(Path(name), options.count)
        if options.task == "fill-mask":
            texts = mask_a_word(texts, bundle.manifest.tokenizer.mask_token or "")
        sets[label_of(name)] = texts
    if len(sets) < len(options.texts):
        raise ValueError(f"two sets of texts have the same name: {', '.join(options.texts)}")
    return sets


def label_of(texts: str) -> str:
    """Return the name of a set of texts in a result."""
    return Path(texts).name.split(".")[0]
