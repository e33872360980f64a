"""Saves and loads the state of an unfinished run: step, weights, optimiser and average."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cloze.export.errors import TrainError
from cloze.export.train.optimisation import Optimizers, WeightAverage
from cloze.export.train.run_dir import STATE


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, apart from its step."""

    module: nn.Module
    optimizer: Optimizers
    average: WeightAverage

    def parts(self) -> dict[str, Any]:
        """Return the state of each part by name."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
        }

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Restore each part from the result of `parts`."""
        self.module.load_state_dict(parts["module"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.average.load_state_dict(parts["average"])


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
    new_file = run_dir / f"{STATE}.new"
    try:
        with new_file.open("wb") as stream:
            torch.save({"step": step} | state.parts(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        new_file.replace(run_dir / STATE)
    except RuntimeError as error:  # raised by torch's writer on a full disk
        new_file.unlink(missing_ok=True)
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
        raise TrainError(
            f"the checkpoint of step {step} cannot be written: {reason}; {describe_state(run_dir)}"
        ) from error
    except OSError:
        new_file.unlink(missing_ok=True)
        raise


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
