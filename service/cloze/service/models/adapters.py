"""Adapters as served models: bundles that share the engine and the queue of their base."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from cloze.model_store import Bundle
from cloze.model_store.adapter import Adapter, Head, check_head, read_adapter
from cloze.model_store.error_lines import first_line, printable
from cloze.model_store.heads import HEADS, sequence_classification, token_classification
from cloze.model_store.heads.label_sets import LabelSets
from cloze.model_store.limits import MAX_ADAPTER_BYTES
from cloze.model_store.manifest import NAME_PATTERN
from cloze.model_store.peft import AdapterError, is_adapter
from cloze.model_store.plain_files import read_plain
from cloze.model_store.safetensors_file import Tensors, parse_safetensors
from cloze.service.batching.fair_queue import Queue, QueueState, Submission
from cloze.service.core import AdapterRegistry
from cloze.service.errors import ServiceError, StartupError

_MOST_LABELS = 10_000

AnyBundle = TypeVar("AnyBundle", bound=Bundle)


@dataclass(frozen=True, slots=True)
class AdapterBundle(Bundle):
    """An adapter as a bundle: the manifest of its base, with the name and head of the adapter."""

    base: Bundle
    folder: Path
    key: str  # name and digest of the adapter, by which encodings refer to it
    size: int  # the bytes of its numbers
    files: frozenset[tuple[str, int, int, int]]  # what the folder held, see `_files`

    def read(self) -> Adapter:
        """Read the adapter again.

        Raises:
            AdapterError: the folder is not what it was at the start or the last reload.
        """
        adapter = _read(self.folder, self.base)
        if self.key != _key(self.manifest.name, adapter):
            raise AdapterError("it was changed since the last reload")
        return adapter


class AdapterQueue:
    """The queue of a base for one of its adapters: a `Queue` that marks every encoding.

    All adapters wait in one queue, so clients share the engine as if they had one model. A request
    is submitted to that queue when its adapter is loaded, so workers never wait for the disk.
    """

    state: Final = QueueState(0, 0.0)  # the queue of the base counts what waits

    def __init__(self, base: Queue, key: str, adapters: AdapterRegistry) -> None:
        self._base, self._key, self._adapters = base, key, adapters
        self.expected_wait = base.expected_wait

    @property
    def dead_reason(self) -> str | None:
        """Why no engine runs; None while one runs."""
        return self._base.dead_reason

    def submit(self, submission: Submission) -> None:
        """See `Queue`. A refusal is the exception of the submission."""
        for encoding in submission.encodings:
            encoding.adapter = self._key
        held = self._adapters.hold(self._key)
        held.add_done_callback(partial(self._submit, submission))

    def _submit(self, submission: Submission, held: Future[None]) -> None:
        """Submit a request whose adapter is loaded, and release the adapter after its end."""
        if (error := held.exception()) is not None:
            submission.end(error)
            return
        submission.add_done_callback(lambda _: self._adapters.release(self._key))
        try:
            self._base.submit(submission)
        except ServiceError as refusal:
            submission.end(refusal)

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002
        """Free the adapter; requests that wait end with the base."""
        self._adapters.forget(self._key)


class Opened(NamedTuple, Generic[AnyBundle]):
    """What to serve, and why adapters are left out, by folder."""

    bundles: list[AnyBundle]
    refused: dict[str, str]


def open_adapters(
    folders: Iterable[str | Path],
    bundles: Sequence[Bundle],
    most_mb: int,
    running: Iterable[Bundle] = (),
) -> Opened[AdapterBundle]:
    """Read and check adapters, each for the served bundle that takes it.

    What is served already is not read again while its files are the same: a reload that adds one
    of a thousand adapters has to be short. One bad adapter in a folder of adapters is left out,
    since the others are not concerned. If it is served already, it is served as before.

    Args:
        folders: adapters, or folders of adapters.
        bundles: the bundles that are served.
        most_mb: most memory of the adapters of one base, in MiB.
        running: what is served already.

    Raises:
        StartupError: one of `folders` is no adapter or has no good one: it fits no bundle, has the
            name of another model, or needs more memory.
    """
    roots = [Path(folder) for folder in folders]
    if not roots:
        return Opened([], {})
    bases = [bundle for bundle in bundles if bundle.manifest.adapters is not None]
    if not bases:
        names = ", ".join(bundle.manifest.reference for bundle in bundles)
        raise StartupError(
            f"no served bundle takes adapters ({names}); export one with: "
            "cloze export CHECKPOINT --name NAME --adapters all-linear"
        )
    before = {one.folder: one for one in running if isinstance(one, AdapterBundle)}
    taken = {bundle.manifest.name: f"the bundle {bundle.manifest.reference}" for bundle in bundles}
    adapters: list[AdapterBundle] = []
    refused: dict[str, str] = {}
    for root in roots:
        try:
            below = [root] if is_adapter(root) else sorted(filter(is_adapter, root.iterdir()))
        except OSError as error:
            raise StartupError(f"adapter {printable(str(root))}: {error.strerror}") from error
        served, first_error = len(adapters), None
        for folder in below:
            kept = before.get(folder)
            if kept is not None and (
                kept.manifest.name in taken
                or all(base.manifest != kept.base.manifest for base in bases)
            ):
                kept = None
            try:
                if kept is not None and kept.files == _files(folder):
                    adapter = kept
                else:
                    adapter = _open(folder, bases, most_mb, taken)
            except StartupError as error:
                first_error = first_error or error
                refused[printable(str(folder))] = str(error)
                if kept is None:
                    continue
                adapter = kept
            adapters.append(adapter)
            taken[adapter.manifest.name] = f"the adapter {folder}"
        if first_error is not None and (len(adapters) == served or root in below):
            raise first_error
    return Opened(adapters, refused)


def _files(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Return name, size, inode and time of change of each file; empty if they cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:  # to read the folder says why
        return frozenset()
    return frozenset((name, its.st_size, its.st_ino, its.st_ctime_ns) for name, its in found)


def _open(
    folder: Path, bases: Sequence[Bundle], most_mb: int, taken: Mapping[str, str]
) -> AdapterBundle:
    """Return an adapter of the first bundle that takes it."""
    # The name of a link, not of what it leads to; "." and ".." have none of their own.
    name = folder.name if folder.name.strip(".") else folder.resolve().name
    shown = printable(str(folder))
    if not re.fullmatch(NAME_PATTERN, name):
        raise StartupError(
            f"adapter {shown}: its folder must have a name of 1 to 64 letters, digits, '.', '_' "
            "or '-', a letter or digit first"
        )
    if name in taken:
        raise StartupError(f"the adapter {shown} has the name of {taken[name]}")
    problems = []
    files = _files(folder)  # before they are read
    for base in bases:
        try:
            adapter = _read(folder, base)
            if adapter.size > most_mb * 2**20:
                raise AdapterError(
                    f"it needs {adapter.size / 2**20:.1f} MiB; CLOZE_ADAPTER_MEMORY_MB is {most_mb}"
                )
            return _of_base(name, folder, files, base, adapter)
        except AdapterError as error:
            problem = printable(str(error))
            problems.append(problem if len(bases) == 1 else f"{base.manifest.reference}: {problem}")
    raise StartupError(f"adapter {shown}: {'; '.join(problems)}")


def _read(folder: Path, base: Bundle) -> Adapter:
    support = base.manifest.adapters
    assert support is not None
    own: Tensors = {}  # of the base's heads, for adapters without them
    if support.tensors_file is not None:
        try:
            own = _tensors(base.file(support.tensors_file))
        except (OSError, ValueError) as error:
            reference = base.manifest.reference
            raise StartupError(f"bundle {reference}: {support.tensors_file} {error}") from error
    adapter = read_adapter(folder, support, own)
    ours, theirs = base.manifest.source.encoder_sha256, adapter.encoder_sha256
    if None not in (ours, theirs) and ours != theirs:
        raise AdapterError(
            f"it was trained on another encoder ({str(theirs)[:12]!a}) than that of "
            f"{base.manifest.reference} ({str(ours)[:12]})"
        )
    return adapter


@lru_cache(4)  # all adapters of a base have the same; a published file does not change
def _tensors(file: Path) -> Tensors:
    return parse_safetensors(read_plain(file, MAX_ADAPTER_BYTES))[0]


def _of_base(
    name: str,
    folder: Path,
    files: frozenset[tuple[str, int, int, int]],
    base: Bundle,
    adapter: Adapter,
) -> AdapterBundle:
    manifest = base.manifest
    source = manifest.source
    weights = hashlib.sha256(f"{source.weights_sha256} {adapter.digest}".encode()).hexdigest()
    update: dict[str, Any] = {
        "name": name,
        "version": 1,
        "adapters": None,
        "source": source.model_copy(
            update={"kind": "directory", "location": name, "revision": None}
            | {"weights_sha256": weights}
        ),
    }
    if adapter.head is not None:
        task, labels = _labels(adapter.head, manifest.architecture.hidden_size, adapter.settings)
        update |= {"tasks": (task,), "embedding": None, "heads": {adapter.head.name: labels}}
    return AdapterBundle(
        manifest.model_copy(update=update),
        base.path,
        base,
        folder,
        _key(name, adapter),
        adapter.size,
        files,
    )


def _key(name: str, adapter: Adapter) -> str:
    return f"{name}@{adapter.digest[:16]}"


_READ_LABELS: Final[Mapping[str, Callable[[Mapping[str, Any]], LabelSets]]] = {
    sequence_classification.HEAD.name: sequence_classification.read_options,
    token_classification.HEAD.name: token_classification.read_options,
}


def _labels(head: Head, hidden_size: int, settings: Mapping[str, Any]) -> tuple[str, LabelSets]:
    """Return the task of a head, and its section in a manifest.

    Raises:
        AdapterError: the labels are malformed, or not as many as the head's rows.
    """
    count = check_head(head, hidden_size)
    if count > _MOST_LABELS:
        raise AdapterError(f"its head has {count} labels; the limit is {_MOST_LABELS}")
    try:
        options = _READ_LABELS[head.name]({**settings, "num_labels": count})
    except ValueError as error:
        raise AdapterError(f"config.json: {first_line(error)}") from None
    if (named := len(options.labels)) != count:
        raise AdapterError(f"config.json names {named} labels; the head has {count}")
    return HEADS[head.name].task, options
