"""The training loop: steps, gradient accumulation, evaluation, checkpoints, resumption.

An objective supplies batches and losses. Each random draw of a step is a function of (seed, step),
so a run that is stopped and resumed gives the same result as a run that is not stopped.
"""

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cloze.export.errors import TrainError
from cloze.export.train.device import autocast, return_freed_memory
from cloze.export.train.optimisation import (
    BestWeights,
    WeightAverage,
    learning_rate,
    make_optimizer,
    optimizer_step,
    schedule_factor,
)
from cloze.export.train.progress import LOG, Progress, draw_curves, read_log
from cloze.export.train.recipe import Optimisation
from cloze.export.train.run_dir import RunState, describe_state, load_state, save_state
from cloze.export.train.run_options import RunOptions


class Batch(Protocol):
    """The input of one forward pass."""

    @property
    def tokens(self) -> int:
        """Return the number of real tokens."""

    def to(self, device: torch.device) -> "Batch":
        """Return a copy of the batch on a device."""


class Objective(Protocol):
    """The module that a run trains, with its batches and its loss."""

    @property
    def module(self) -> nn.Module:
        """Return the module with all trained parameters."""

    @property
    def steps(self) -> int:
        """Return the number of steps of the run."""

    def batch(self, step: int, part: int) -> Any:
        """Return the ``part``-th `Batch` of a step, a function of its arguments."""

    def loss(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and figures for the log (accuracies and single losses, 0-d tensors)."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return figures on held-out data after ``step`` steps; empty without held-out data."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a run stops before its last step.

    Attributes:
        figure: the held-out figure that should rise.
        patience: evaluations without a higher figure after which the run stops.
    """

    figure: str
    patience: int


def train(
    objective: Objective,
    options: RunOptions,
    *,
    seed: int,
    optimisation: Optimisation,
    stopping: Stopping | None = None,
) -> int:
    """Train an objective to its last step, from the checkpoint in the run's directory if present.

    Args:
        stopping: when the run stops early; None: it does not.

    Returns:
        The number of steps after which the module had the weights that it has now.

    Raises:
        TrainError: the loss or a weight is not finite, the disk is full, or the run was
            interrupted. The last good checkpoint is kept.
    """
    run_dir, device = options.run_dir, options.device
    run_dir.mkdir(parents=True, exist_ok=True)
    module = objective.module.to(device).train()
    average = WeightAverage(module, round((1 - optimisation.average) * objective.steps))
    best = BestWeights(module, stopping.patience if stopping else 0)
    state = RunState(module, make_optimizer(module, optimisation), average, best)
    first_step = load_state(run_dir, state, device)
    if first_step:
        options.report(f"going on after step {first_step} of {objective.steps}")
    threads = torch.get_num_threads() if device.type == "cpu" else None
    progress = Progress(run_dir, first_step, objective.steps, threads=threads)
    stepper = _Stepper(objective, options, seed, optimisation, state, progress)
    stepper.watched = f"held_out_{stopping.figure}" if stopping else None
    try:
        with _interruptible() as interrupted:
            for step in range(first_step, objective.steps):
                if best.is_over:
                    options.report(f"stopped after step {step}: step {best.step} was better")
                    break
                stepper.step(step, interrupted)
    except OSError as error:
        reason = error.strerror or error
        raise TrainError(
            f"the run cannot be written: {reason}; {describe_state(run_dir)}"
        ) from error
    finally:
        progress.close()
    average.apply()
    best.apply()
    module.eval()
    if not read_log(run_dir):
        raise TrainError(
            f"{run_dir / LOG} of the finished run is damaged or gone; "
            f"restore it, or remove {run_dir} to begin anew"
        )
    draw_curves(run_dir)
    return best.step or objective.steps


class _Stepper:
    """Runs single steps: update, log, evaluation and checkpoint as the schedule says."""

    def __init__(
        self,
        objective: Objective,
        options: RunOptions,
        seed: int,
        optimisation: Optimisation,
        state: RunState,
        progress: Progress,
    ) -> None:
        self._objective, self._options = objective, options
        self._seed, self._optimisation = seed, optimisation
        self._state, self._progress = state, progress
        self._evaluate_every = max(1, min(options.schedule.evaluate, objective.steps // 10))
        self._figures: dict[str, list[Tensor]] = defaultdict(list)  # since the last log entry
        self._saved_at = time.monotonic()
        self.watched: str | None = None
        """The held-out figure that decides which weights are the best."""

    def step(self, step: int, interrupted: threading.Event) -> None:
        """Run the 0-based ``step``.

        Raises:
            TrainError: the loss or a weight is not finite, or the run was interrupted.
        """
        for name, value in self._update(step).items():
            self._figures[name].append(value)
        self._state.average.add(step)
        finished, schedule = step + 1, self._options.schedule
        is_last, stops = finished == self._objective.steps, interrupted.is_set()
        evaluates = is_last or finished % self._evaluate_every == 0
        if evaluates or stops or finished % schedule.log == 0:
            self._log(finished, is_last, evaluates)
        overdue = time.monotonic() - self._saved_at >= schedule.checkpoint_seconds
        is_last = is_last or self._state.best.is_over
        if is_last or stops or overdue or finished % schedule.checkpoint == 0:
            self._save(finished)
        if stops and not is_last:
            raise TrainError(
                f"interrupted; {describe_state(self._options.run_dir)}, "
                "the same command goes on from there"
            )

    def _update(self, step: int) -> dict[str, Tensor]:
        """Update the weights once; return the means of the figures over the step's batches."""
        objective, optimisation = self._objective, self._optimisation
        device = self._options.device
        torch.manual_seed(self._seed * 1_000_003 + step)  # dropout and other draws of torch
        means: dict[str, Tensor] = {}
        tokens = 0
        for part in range(optimisation.accumulation):
            batch = objective.batch(step, part)
            tokens += batch.tokens
            with autocast(device, optimisation.precision):
                loss, figures = objective.loss(batch.to(device))
            (loss / optimisation.accumulation).backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": loss, **figures}.items():
                share = value.detach().float() / optimisation.accumulation
                means[name] = means.get(name, torch.zeros((), device=device)) + share
        parameters = objective.module.parameters()
        means["gradient_norm"] = nn.utils.clip_grad_norm_(parameters, optimisation.clip)
        factor = schedule_factor(step, objective.steps, optimisation)
        optimizer_step(self._state.optimizer, factor)
        self._progress.advance(tokens)
        return means

    def _log(self, step: int, is_last: bool, evaluates: bool) -> None:
        """Write the figures since the last log entry, and evaluate if an evaluation is due."""
        steps = self._objective.steps
        means = {name: float(torch.stack(values).mean()) for name, values in self._figures.items()}
        self._figures.clear()
        _check_loss(means["loss"], step, self._options.run_dir)
        if evaluates:
            means |= self._evaluate(step, is_last)
        if self.watched in means:
            self._state.best.offer(step, means[self.watched])
        return_freed_memory()
        means["learning_rate"] = learning_rate(step - 1, steps, self._optimisation)
        self._progress.log(step, means)

    def _evaluate(self, step: int, is_last: bool) -> dict[str, float]:
        """Return held-out figures. At the last step, the averaged weights are evaluated."""
        objective, average = self._objective, self._state.average
        figures = objective.evaluate(step)
        if is_last and average.count:
            last_figures = figures
            with average.applied():
                figures = objective.evaluate(step)
            if "loss" in figures:
                self._options.report(
                    f"the weights of the last {average.count} steps averaged: "
                    f"held-out loss {figures['loss']:.4f}; "
                    f"those of the last step: {last_figures['loss']:.4f}"
                )
        objective.module.train()
        return {f"held_out_{name}": value for name, value in figures.items()}

    def _save(self, step: int) -> None:
        _check_weights(self._state.module, step, self._options.run_dir)
        save_state(self._options.run_dir, self._state, step)
        self._saved_at = time.monotonic()


def _check_loss(loss: float, step: int, run_dir: Path) -> None:
    if not math.isfinite(loss):
        raise TrainError(
            f"the loss is {loss} at step {step}; {describe_state(run_dir)}; "
            "try a lower learning_rate"
        )


def _check_weights(module: nn.Module, step: int, run_dir: Path) -> None:
    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
        raise TrainError(
            f"a weight is no number any more at step {step}; {describe_state(run_dir)}; "
            "try a lower learning_rate"
        )


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C or SIGTERM, so that the step ends and a checkpoint is written.

    A second signal raises KeyboardInterrupt at once. Signals reach the main thread only, so in any
    other thread the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def stop(_: int, __: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
