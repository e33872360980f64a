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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from export.train.errors import TrainError
from export.train.optimisation import autocast, learning_rate, make_optimizer
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
    """How often, in steps, a run logs, evaluates and writes a checkpoint."""

    log: int = 20
    evaluate: int = 500
    checkpoint: int = 100


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
    step = _load(folder, module, optimizer, device)
    if step:
        say(f"going on after step {step} of {objective.steps}")
    progress = Progress(folder, step, objective.steps)
    sums: dict[str, list[Tensor]] = defaultdict(list)
    try:
        with _interruptible() as interrupted:
            while step < objective.steps:
                before_step(step)
                figures = _step(objective, optimizer, optimisation, step, seed, device, progress)
                step += 1
                for name, value in figures.items():
                    sums[name].append(value)
                last = step == objective.steps
                if last or step % schedule.log == 0 or interrupted.is_set():
                    means = {name: float(torch.stack(values).mean()) for name, values in sums.items()}
                    sums.clear()
                    if not math.isfinite(means["loss"]):
                        raise TrainError(
                            f"the loss is {means['loss']} at step {step}; {_kept(folder)}; try a lower learning_rate"
                        )
                    if last or step % schedule.evaluate == 0:
                        means |= {f"held_out_{name}": value for name, value in objective.evaluate(step).items()}
                        module.train()
                    progress.log(step, means | {"learning_rate": learning_rate(step - 1, objective.steps, optimisation)})
                if last or step % schedule.checkpoint == 0 or interrupted.is_set():
                    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
                        raise TrainError(
                            f"a weight is no number any more at step {step}; {_kept(folder)}; try a lower learning_rate"
                        )
                    _save(folder, module, optimizer, step)
                if interrupted.is_set() and not last:
                    raise TrainError(f"interrupted; {_kept(folder)}, the same command goes on from there")
    except OSError as error:
        raise TrainError(f"the run cannot be written: {error.strerror or error}; {_kept(folder)}") from error
    finally:
        progress.close()
    module.eval()
    if not read_log(folder):
        raise TrainError(f"{folder / LOG} of the finished run is damaged or gone; restore it, or remove {folder} to begin anew")
    draw_curves(folder)


def _step(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
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
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.detach().float() / recipe.accumulation
    sums["gradient_norm"] = nn.utils.clip_grad_norm_(objective.module.parameters(), recipe.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, objective.steps, recipe)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    progress.advance(tokens)
    return sums


def _kept(folder: Path) -> str:
    return f"the checkpoint in {folder} is kept" if (folder / STATE).is_file() else "there is no checkpoint yet"


def _save(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint in one move, so that a kill or a full disk leaves the last one whole."""
    new = folder / f"{STATE}.new"
    try:
        with new.open("wb") as stream:
            torch.save({"step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(folder / STATE)
    except RuntimeError as error:  # torch's own writer, on a full disk
        new.unlink(missing_ok=True)
        reason = error.__context__
        said = reason.strerror if isinstance(reason, OSError) else str(error).splitlines()[0]
        raise TrainError(f"the checkpoint of step {step} cannot be written: {said}; {_kept(folder)}") from error
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Fill module and optimiser from the checkpoint; the number of steps done, 0 if there is none."""
    file = folder / STATE
    if not file.is_file():
        return 0
    try:
        state = torch.load(file, map_location=device, weights_only=True)
        step = int(state["step"])
        parts = state["module"], state["optimizer"]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise TrainError(f"{file} is damaged ({type(error).__name__}); remove it to begin anew") from error
    try:
        module.load_state_dict(parts[0])
        optimizer.load_state_dict(parts[1])
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
