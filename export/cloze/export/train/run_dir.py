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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from torch import nn

from cloze.export.errors import TrainError
from cloze.export.train.device import is_main
from cloze.export.train.optimisation import BestWeights, WeightAverage
from cloze.export.train.recipe import Recipe
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

    The system releases the lock of a process that ends. A file beside the lock names the process.
    On a file system without locks, nothing is kept out.

    Raises:
        TrainError: another run is in the directory.
    """
    if not is_main():
        yield  # a process of the run whose main process has the lock
        return
    _make(run_dir)
    lock, owner = FileLock(run_dir / LOCK), run_dir / OWNER
    try:
        lock.acquire(blocking=False)
    except Timeout:
        name = owner.read_text().strip() if owner.is_file() else ""
        raise TrainError(
            f"{name or 'another process'} runs in {run_dir}; end it first, or give another folder"
        ) from None
    except OSError:
        pass
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        lock.release()


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
    identity_file = run_dir / IDENTITY
    identity: dict[str, dict[str, Any]] = {
        "recipe": recipe.model_dump(mode="json"),
        "inputs": dict(inputs),
    }
    with PartialState().main_process_first():
        _make(run_dir)
        if (run_dir / STATE).exists():
            _check_identity(identity_file, identity)
        elif is_main():
            _describe_run(identity_file, identity)


def _describe_run(identity_file: Path, identity: Mapping[str, Mapping[str, Any]]) -> None:
    content = f"{json.dumps(identity, indent=2)}\n".encode()
    if not identity_file.is_file() or identity_file.read_bytes() != content:
        # The vocabulary of an earlier attempt may come from another text.
        shutil.rmtree(identity_file.parent / VOCABULARY, ignore_errors=True)
        with replacing(identity_file) as new_file:
            new_file.write_bytes(content)


def _check_identity(identity_file: Path, identity: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        recorded = json.loads(identity_file.read_bytes())
        changed_inputs = [
            name
            for name, value in identity["inputs"].items()
            if recorded["inputs"].get(name) != value
        ]
        same_recipe = recorded["recipe"] == identity["recipe"]
    except FileNotFoundError:
        raise TrainError(
            f"{identity_file} is gone; give another folder, or remove this one"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainError(
            f"{identity_file} is damaged ({error}); give another folder, or remove it"
        ) from error
    run_dir = identity_file.parent
    if not same_recipe:
        raise TrainError(
            f"{run_dir} holds a run of another recipe; give another folder, or remove it"
        )
    if changed_inputs:
        raise TrainError(
            f"{run_dir} holds a run with another {' and another '.join(changed_inputs)}; "
            "give another folder, or remove it"
        )


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, apart from its step."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    best: BestWeights

    def parts(self) -> dict[str, Any]:
        """Return the state of each part by name."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best.state_dict(),
        }

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Restore each part from the result of `parts`."""
        self.module.load_state_dict(parts["module"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.average.load_state_dict(parts["average"])
        self.best.load_state_dict(parts["best"])


def describe_state(run_dir: Path) -> str:
    """Say in an error message which checkpoint remains."""
    if (run_dir / STATE).is_file():
        return f"the checkpoint in {run_dir} is kept"
    return "there is no checkpoint yet"


def save_state(run_dir: Path, state: RunState, step: int) -> None:
    """Replace the state file atomically, so that a kill or a full disk leaves the previous file.

    Raises:
        TrainError: torch cannot write the file.
        OSError: the file cannot be opened, synchronised or renamed.
    """
    try:
        with replacing(run_dir / STATE) as new_file, new_file.open("wb") as stream:
            torch.save({"step": step} | state.parts(), stream)
            stream.flush()
            os.fsync(stream.fileno())
    except RuntimeError as error:  # raised by torch's writer on a full disk
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
        raise TrainError(
            f"the checkpoint of step {step} cannot be written: {reason}; {describe_state(run_dir)}"
        ) from error


def load_state(run_dir: Path, state: RunState, device: torch.device) -> int:
    """Restore the state from the state file, if there is one.

    Returns:
        The number of finished steps; 0 without a state file.

    Raises:
        TrainError: the file is damaged, or holds the state of another model.
    """
    file = run_dir / STATE
    if not file.is_file():
        return 0
    try:
        loaded = torch.load(file, map_location=device, weights_only=True)
        step = int(loaded["step"])
        parts = {name: loaded[name] for name in ("module", "optimizer", "average")}
        parts["best"] = loaded.get("best", {})  # earlier releases had none
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
            f"{file} is damaged ({type(error).__name__}); remove it to begin anew"
        ) from error
    try:
        state.restore(parts)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise TrainError(
            f"{file} is of another model: was the vocabulary or the source another one? "
            "Give another folder, or remove it"
        ) from error
    return step
