"""The training loop: steps, gradient accumulation, evaluation, checkpoints, resumption.

An objective supplies batches and losses. Each batch and each random draw is a function of (seed,
step, part), so a run that is stopped and resumed gives the result of a run that is not stopped.
Several processes share the parts of a step: process R of N takes the parts R, R + N, R + 2 N and so
on. All processes sum their gradients, and then take the same step.
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

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from cloze.export.errors import TrainError
from cloze.export.train.device import open_accelerator, processes
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
from cloze.model_store.system import return_freed_memory


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
        """Return the ``part``-th of the `batches_per_step`, a function of its arguments."""

    def loss(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and figures for the log (accuracies and single losses, 0-d tensors)."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return figures on held-out data after ``step`` steps; empty without held-out data."""


def batches_per_step(optimisation: Optimisation) -> int:
    """Return the number of batches of all processes that a step learns from."""
    return optimisation.accumulation * processes()


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

    Only the main process writes.

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
    accelerator = open_accelerator(device, optimisation.precision)
    progress = None
    if accelerator.is_main_process:
        threads = torch.get_num_threads() if device.type == "cpu" else None
        progress = Progress(run_dir, first_step, objective.steps, threads=threads)
    stepper = _Stepper(objective, options, seed, optimisation, state, accelerator, progress)
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
        if progress:
            progress.close()
    average.apply()
    best.apply()
    module.eval()
    if progress:
        _finish_log(run_dir)
    accelerator.wait_for_everyone()
    return best.step or objective.steps


def _finish_log(run_dir: Path) -> None:
    if not read_log(run_dir):
        raise TrainError(
            f"{run_dir / LOG} of the finished run is damaged or gone; "
            f"restore it, or remove {run_dir} to begin anew"
        )
    draw_curves(run_dir)


class _Stepper:
    """Runs single steps: update, log, evaluation and checkpoint as the schedule says."""

    def __init__(
        self,
        objective: Objective,
        options: RunOptions,
        seed: int,
        optimisation: Optimisation,
        state: RunState,
        accelerator: Accelerator,
        progress: Progress | None,
    ) -> None:
        self._objective, self._options = objective, options
        self._seed, self._optimisation = seed, optimisation
        self._state, self._accelerator, self._progress = state, accelerator, progress
        self._parameters = [one for one in state.module.parameters() if one.requires_grad]
        self._evaluate_every = max(1, min(options.schedule.evaluate, objective.steps // 10))
        self._figures: dict[str, list[Tensor]] = defaultdict(list)  # since the last log entry
        self._tokens = 0
        self._saved_at = time.monotonic()
        self.watched: str | None = None
        """The held-out figure that decides which weights are the best."""

    def step(self, step: int, interrupted: threading.Event) -> None:
        """Run the 0-based ``step``.

        Raises:
            TrainError: the loss or a weight is not finite, or the run was interrupted.
        """
        stops = self._update(step, interrupted)
        self._state.average.add(step)
        finished, schedule = step + 1, self._options.schedule
        is_last = finished == self._objective.steps
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

    def _update(self, step: int, interrupted: threading.Event) -> bool:
        """Update the weights once; return whether a process was interrupted."""
        objective, optimisation = self._objective, self._optimisation
        accelerator, device = self._accelerator, self._options.device
        batches = batches_per_step(optimisation)
        means: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        for part in range(accelerator.process_index, batches, accelerator.num_processes):
            _seed_draws(self._seed, step, part)
            batch = objective.batch(step, part)
            with accelerator.autocast():
                loss, figures = objective.loss(batch.to(device))
            accelerator.backward(loss / batches)
            for name, value in {"loss": loss, **figures}.items():
                means[name] = means[name] + value.detach().float() / batches
            self._tokens += batch.tokens
        stops = interrupted.is_set()
        if accelerator.num_processes > 1:
            stops = self._sum_gradients(stops)
        norm = nn.utils.clip_grad_norm_(self._parameters, optimisation.clip)
        means["gradient_norm"] = norm / accelerator.num_processes
        factor = schedule_factor(step, objective.steps, optimisation)
        optimizer_step(self._state.optimizer, factor)
        for name, value in means.items():
            self._figures[name].append(value)
        if self._progress:
            self._progress.advance()
        return stops

    def _sum_gradients(self, interrupted: bool) -> bool:
        """Sum the gradients of all processes; return whether one of them was interrupted.

        A parameter that no process used keeps no gradient, as with one process.
        """
        parameters, device = self._parameters, self._options.device
        flags = [interrupted, *(one.grad is not None for one in parameters)]
        stops, *used = self._accelerator.reduce(torch.tensor(flags, device=device).float()).tolist()
        parameters = [one for one, count in zip(parameters, used, strict=True) if count]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        summed = self._accelerator.reduce(torch.cat([one.flatten() for one in gradients]))
        parts = summed.split([one.numel() for one in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return bool(stops)

    def _log(self, step: int, is_last: bool, evaluates: bool) -> None:
        """Write the figures since the last log entry, and evaluate if an evaluation is due."""
        steps = self._objective.steps
        rows = {name: torch.stack(values).mean() for name, values in self._figures.items()}
        means = {name: float(mean) for name, mean in self._accelerator.reduce(rows).items()}
        tokens = sum(gather_object([self._tokens]))
        self._figures.clear()
        self._tokens = 0
        _check_loss(means["loss"], step, self._options.run_dir)
        if evaluates:
            means |= self._evaluate(step, is_last)
        if self.watched in means:
            self._state.best.offer(step, means[self.watched])
        return_freed_memory()
        means["learning_rate"] = learning_rate(step - 1, steps, self._optimisation)
        if self._progress:
            self._progress.log(step, means, tokens)

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
        if not self._progress:
            return
        _check_weights(self._state.module, step, self._options.run_dir)
        save_state(self._options.run_dir, self._state, step)
        self._saved_at = time.monotonic()


def _seed_draws(seed: int, step: int, part: int) -> None:
    """Seed dropout and the other draws of torch."""
    (state,) = np.random.SeedSequence((seed, step, part)).generate_state(1, np.uint64)
    torch.manual_seed(int(state))


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
