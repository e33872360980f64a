"""The training loop: steps, accumulation, clipping, checkpoints, and going on after a stop as if there had been none.

Knows neither text nor heads: an objective gives batches and losses. Everything drawn at a step is a function of
(seed, step), so a checkpoint is the step, the weights and the optimiser's moments.
"""

import math
import os
import pickle
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from export.train.errors import TrainError
from export.train.optimisation import (
    Optimizers,
    WeightAverage,
    autocast,
    learning_rate,
    make_optimizer,
    schedule_factor,
)
from export.train.progress import LOG, Progress, draw_curves, read_log
from export.train.recipe import Optimisation
from export.train.run_folder import STATE


class Batch(Protocol):
    """What a step works on."""

    @property
    def tokens(self) -> int:
        """Real tokens in it."""

    def to(self, device: torch.device) -> "Batch":
        """On another device."""


class Objective(Protocol):
    """What a run optimises."""

    @property
    def module(self) -> nn.Module:
        """Everything that is trained."""

    @property
    def steps(self) -> int:
        """How many there are."""

    def batch(self, step: int, part: int) -> Any:
        """The ``part``-th batch of a step, the same whenever it is asked for."""

    def loss(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss, and figures to log (shares and part losses; 0-d tensors)."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Figures on held-out examples after so many steps; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a run logs, evaluates and writes a checkpoint.

    Attributes:
        log: steps.
        evaluate: steps; a run of fewer than ten times as many is evaluated ten times.
        checkpoint: steps.
        checkpoint_seconds: a checkpoint is written after so long even if fewer steps are done.
    """

    log: int = 20
    evaluate: int = 500
    checkpoint: int = 100
    checkpoint_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint of a run holds beside its step."""

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
        """Fill each part with what `parts` returned."""
        self.module.load_state_dict(parts["module"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.average.load_state_dict(parts["average"])


def open_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:N``, or ``auto``: cuda where there is one.

    Raises:
        TrainError: it is no device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise TrainError(f"device {name!r} is unknown; auto, cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        raise TrainError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def train(
    objective: Objective,
    seed: int,
    optimisation: Optimisation,
    folder: Path,
    *,
    device: torch.device,
    schedule: Schedule = Schedule(),
    say: Callable[[str], None],
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Run an objective to its last step, from the run folder's checkpoint if there is one.

    Raises:
        TrainError: the loss is no number any more, the disk is full, or the run
            was interrupted. The last good checkpoint stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module = objective.module.to(device).train()
    optimizer = make_optimizer(module, optimisation)
    average = WeightAverage(module, round((1 - optimisation.average) * objective.steps))
    state = RunState(module, optimizer, average)
    step = _load(folder, state, device)
    if step:
        say(f"going on after step {step} of {objective.steps}")
    progress = Progress(
        folder,
        step,
        objective.steps,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
    )
    evaluate_every = max(1, min(schedule.evaluate, objective.steps // 10))
    saved = time.monotonic()
    sums: dict[str, list[Tensor]] = defaultdict(list)
    try:
        with _interruptible() as interrupted:
            while step < objective.steps:
                before_step(step)
                figures = _step(objective, optimizer, optimisation, step, seed, device, progress)
                average.add(step)
                step += 1
                for name, value in figures.items():
                    sums[name].append(value)
                last = step == objective.steps
                if last or step % schedule.log == 0 or interrupted.is_set():
                    means = {
                        name: float(torch.stack(values).mean()) for name, values in sums.items()
                    }
                    sums.clear()
                    _check_loss(means["loss"], step, folder)
                    if last or step % evaluate_every == 0:
                        means |= _evaluate(objective, step, average if last else None, say)
                    progress.log(
                        step,
                        means
                        | {"learning_rate": learning_rate(step - 1, objective.steps, optimisation)},
                    )
                overdue = time.monotonic() - saved >= schedule.checkpoint_seconds
                if last or step % schedule.checkpoint == 0 or overdue or interrupted.is_set():
                    _check_weights(module, step, folder)
                    _save(folder, state, step)
                    saved = time.monotonic()
                if interrupted.is_set() and not last:
                    raise TrainError(
                        f"interrupted; {_kept(folder)}, the same command goes on from there"
                    )
    except OSError as error:
        raise TrainError(
            f"the run cannot be written: {error.strerror or error}; {_kept(folder)}"
        ) from error
    finally:
        progress.close()
    average.apply()
    module.eval()
    if not read_log(folder):
        raise TrainError(
            f"{folder / LOG} of the finished run is damaged or gone; restore it, or remove {folder} to begin anew"
        )
    draw_curves(folder)


def _step(
    objective: Objective,
    optimizer: Optimizers,
    recipe: Optimisation,
    step: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> dict[str, Tensor]:
    """One update; the figures are means over its batches."""
    torch.manual_seed(seed * 1_000_003 + step)  # dropout, and whatever else torch draws
    sums: dict[str, Tensor] = {}
    tokens = 0
    for part in range(recipe.accumulation):
        batch = objective.batch(step, part)
        tokens += batch.tokens
        with autocast(device, recipe.precision):
            loss, figures = objective.loss(batch.to(device))
        (loss / recipe.accumulation).backward()  # type: ignore[no-untyped-call]
        for name, value in {"loss": loss, **figures}.items():
            sums[name] = (
                sums.get(name, torch.zeros((), device=device))
                + value.detach().float() / recipe.accumulation
            )
    sums["gradient_norm"] = nn.utils.clip_grad_norm_(objective.module.parameters(), recipe.clip)
    optimizer.step(schedule_factor(step, objective.steps, recipe))
    progress.advance(tokens)
    return sums


def _kept(folder: Path) -> str:
    return (
        f"the checkpoint in {folder} is kept"
        if (folder / STATE).is_file()
        else "there is no checkpoint yet"
    )


def _check_loss(loss: float, step: int, folder: Path) -> None:
    if not math.isfinite(loss):
        raise TrainError(
            f"the loss is {loss} at step {step}; {_kept(folder)}; try a lower learning_rate"
        )


def _check_weights(module: nn.Module, step: int, folder: Path) -> None:
    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
        raise TrainError(
            f"a weight is no number any more at step {step}; {_kept(folder)}; try a lower learning_rate"
        )


def _evaluate(
    objective: Objective, step: int, average: WeightAverage | None, say: Callable[[str], None]
) -> dict[str, float]:
    """Return held-out figures: of the averaged weights, where there are any, since those are the result."""
    figures = objective.evaluate(step)
    if average is not None and average.count:
        last = figures
        with average.applied():
            figures = objective.evaluate(step)
        if "loss" in figures:
            say(
                f"the weights of the last {average.count} steps averaged: held-out loss {figures['loss']:.4f};"
                f" those of the last step: {last['loss']:.4f}"
            )
    objective.module.train()
    return {f"held_out_{name}": value for name, value in figures.items()}


def _save(folder: Path, state: RunState, step: int) -> None:
    """Replace the checkpoint in one move, so that a kill or a full disk leaves the last one whole."""
    new = folder / f"{STATE}.new"
    try:
        with new.open("wb") as stream:
            torch.save({"step": step} | state.parts(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(folder / STATE)
    except RuntimeError as error:  # torch's own writer, on a full disk
        new.unlink(missing_ok=True)
        reason = error.__context__
        said = reason.strerror if isinstance(reason, OSError) else str(error).splitlines()[0]
        raise TrainError(
            f"the checkpoint of step {step} cannot be written: {said}; {_kept(folder)}"
        ) from error
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _load(folder: Path, state: RunState, device: torch.device) -> int:
    """Fill the state from the checkpoint; the number of steps done, 0 if there is none."""
    file = folder / STATE
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
            f"{file} is of another model: was the vocabulary or the source another one? Give another folder, or remove it"
        ) from error
    return step


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event: the step is finished and a checkpoint written; a second Ctrl-C ends at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def stop(_: int, __: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
