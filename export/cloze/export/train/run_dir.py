"""The directory of a run: it belongs to one recipe on one set of inputs, and keeps the run's state.

A second recipe in the same directory would give a model that no recipe describes.
"""

import json
import os
import pickle
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState

from cloze.export.errors import TrainError
from cloze.export.train.device import is_main, processes
from cloze.export.train.recipe import Recipe
from cloze.model_store import system
from cloze.model_store.plain_files import replacing

IDENTITY = "run.json"
STATE = "state.pt"
LOCK = "lock"
OWNER = "owner"
VOCABULARY = "vocabulary"
CORPUS = "corpus"
CHECKPOINT = "checkpoint"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Make the directory, and keep runs of other processes out of it.

    A file beside the lock names the process. Without a lock (see `system.locked`), nothing is kept
    out. A run that fails before its first checkpoint and log leaves no directory behind.

    Raises:
        TrainError: another run is in the directory.
    """
    if not is_main():
        yield  # a process of the run whose main process has the lock
        return
    is_new = not run_dir.exists()
    _make(run_dir)
    owner = run_dir / OWNER

    def refuse() -> None:
        name = owner.read_text().strip() if owner.is_file() else ""
        raise TrainError(
            f"{name or 'another process'} runs in {run_dir}; end it first, or give another folder"
        )

    try:
        with system.locked(run_dir / LOCK, refuse):
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            yield
    finally:
        if is_new and {file.name for file in run_dir.glob("*")} <= {LOCK, OWNER, IDENTITY}:
            shutil.rmtree(run_dir, ignore_errors=True)


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise TrainError(f"{run_dir} is not a folder") from None


def acquire_run_dir(run_dir: Path, recipe: Recipe, inputs: Mapping[str, str | None]) -> None:
    """Assign the directory to this run, or check that the directory belongs to this run.

    A directory without a checkpoint may be assigned to another run.

    Args:
        run_dir: directory of the run, created if missing.
        inputs: hash of each input (text, source checkpoint, ...) by name; None: input not given.

    Raises:
        TrainError: the directory belongs to a run of another recipe or on other inputs, or its
            ``run.json`` is damaged.
    """
    file = run_dir / IDENTITY
    count = str(processes()) if processes() > 1 else None  # a step learns from a batch of each
    inputs = dict(inputs) | {"number of processes": count}
    identity = {"recipe": recipe.model_dump(mode="json"), "inputs": inputs}
    content = f"{json.dumps(identity, indent=2)}\n".encode()
    with PartialState().main_process_first():
        _make(run_dir)
        if (run_dir / STATE).exists():
            if reason := _difference(file, identity):
                raise TrainError(f"{reason}; give another folder, or remove it")
        elif is_main() and not (file.is_file() and file.read_bytes() == content):
            # The vocabulary of an earlier attempt may come from another text.
            shutil.rmtree(run_dir / VOCABULARY, ignore_errors=True)
            with replacing(file) as new_file:
                new_file.write_bytes(content)


def _difference(file: Path, identity: Mapping[str, Any]) -> str | None:
    """Say why the directory of ``file`` belongs to another run; None: it is this one's."""
    try:
        recorded = json.loads(file.read_bytes())
        inputs = recorded["inputs"]
        changed = [name for name, one in identity["inputs"].items() if inputs.get(name) != one]
        is_same = recorded["recipe"] == identity["recipe"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{file} is damaged ({error})"
    if not is_same:
        return f"{file.parent} holds a run of another recipe"
    if changed:
        return f"{file.parent} holds a run with another {' and another '.join(changed)}"
    return None


class Stateful(Protocol):
    """A part of a run that a checkpoint has: a module, an optimiser, or the kept weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore a state from `state_dict`."""


def describe_state(run_dir: Path) -> str:
    """Say in an error message which checkpoint remains."""
    if (run_dir / STATE).is_file():
        return f"the checkpoint in {run_dir} is kept"
    return "there is no checkpoint yet"


def save_state(run_dir: Path, parts: Mapping[str, Stateful], step: int) -> None:
    """Replace the state file atomically, so that a kill or a full disk leaves the previous file.

    Raises:
        TrainError: torch cannot write the file.
        OSError: the file cannot be opened, synchronised or renamed.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    try:
        with replacing(run_dir / STATE) as new_file, new_file.open("wb") as stream:
            torch.save({"step": step} | states, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except RuntimeError as error:  # raised by torch's writer on a full disk
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
        raise TrainError(
            f"the checkpoint of step {step} cannot be written: {reason}; {describe_state(run_dir)}"
        ) from error


def load_state(run_dir: Path, parts: Mapping[str, Stateful], device: torch.device) -> int:
    """Restore each part from the state file; return the number of finished steps, 0 without a file.

    Raises:
        TrainError: the file is damaged, or holds the state of another model.
    """
    file = run_dir / STATE
    if not file.is_file():
        return 0
    try:
        loaded = torch.load(file, map_location=device, weights_only=True)
        step = int(loaded["step"])
        for name, part in parts.items():
            part.load_state_dict(loaded[name])
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
    ) as error:
        raise TrainError(
            f"{file} is damaged or of another model ({type(error).__name__}); "
            "remove it to begin anew"
        ) from error
    return step
