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
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from cloze.export.errors import TrainError
from cloze.export.train.device import open_accelerator, processes
from cloze.export.train.optimisation import KeptWeights, make_optimizer, schedule_factor
from cloze.export.train.progress import LOG, Progress, draw_curves, read_log
from cloze.export.train.recipe import FinetuneRecipe, Optimisation, Recipe
from cloze.export.train.run_dir import Stateful, describe_state, load_state, save_state
from cloze.export.train.run_options import RunOptions
from cloze.model_store.system import return_freed_memory


class Objective(Protocol):
    """The module that a run trains, with its batches and its loss."""

    @property
    def module(self) -> nn.Module:
        """Return the module with all trained parameters."""

    @property
    def steps(self) -> int:
        """Return the number of steps of the run."""

    def batch(self, step: int, part: int) -> Any:
        """Return the ``part``-th of the `batches_per_step`, a function of its arguments.

        A batch has the number of its real ``tokens``, and a method ``to(device)``.
        """

    def loss(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and figures for the log (accuracies and single losses, 0-d tensors)."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return figures on held-out data after ``step`` steps; empty without held-out data."""


def batches_per_step(optimisation: Optimisation) -> int:
    """Return the number of batches of all processes that a step learns from."""
    return optimisation.accumulation * processes()


def train(
    objective: Objective, options: RunOptions, recipe: Recipe, figure: str | None = None
) -> int:
    """Train an objective to its last step, from the checkpoint in the run's directory if present.

    Only the main process writes.

    Args:
        figure: the held-out figure that decides which weights are the best, if the recipe has
            patience.

    Returns:
        The step whose weights the module has: the best one with patience, otherwise the last.

    Raises:
        TrainError: there is nothing to measure for the recipe's patience, the loss or a weight is
            not finite, the disk is full, or the run was interrupted. The last good checkpoint is
            kept.
    """
    run_dir, steps, optimisation = options.run_dir, objective.steps, recipe.rates
    run_dir.mkdir(parents=True, exist_ok=True)
    module = objective.module.to(options.device)
    patience = recipe.patience if isinstance(recipe, FinetuneRecipe) else 0
    kept = KeptWeights(module, round((1 - optimisation.average) * steps), patience)
    adamw = make_optimizer(module, optimisation)
    parts: dict[str, Stateful] = {"module": module, "optimizer": adamw, "kept": kept}
    first_step = load_state(run_dir, parts, options.device)
    if first_step:
        options.report(f"going on after step {first_step} of {steps}")
    elif patience and figure not in objective.evaluate(0):
        raise TrainError(f"patience = {patience} needs held-out data, and none is given")
    module.train()
    accelerator = open_accelerator(options.device, optimisation.precision)
    progress = Progress(run_dir, first_step, steps) if accelerator.is_main_process else None
    loop = _Loop(objective, options, recipe, parts, adamw, kept, figure, accelerator, progress)
    loop.run(first_step)
    kept.swap()
    module.eval()
    if progress:
        if not read_log(run_dir):
            raise TrainError(
                f"{run_dir / LOG} of the finished run is damaged or gone; "
                f"restore it, or remove {run_dir} to begin anew"
            )
        draw_curves(run_dir)
    accelerator.wait_for_everyone()
    return kept.best_step or steps


@dataclass(slots=True)
class _Loop:
    """Runs single steps: update, log, evaluation and checkpoint as the schedule says."""

    objective: Objective
    options: RunOptions
    recipe: Recipe
    parts: Mapping[str, Stateful]
    optimizer: torch.optim.Optimizer
    kept: KeptWeights
    figure: str | None
    accelerator: Accelerator
    progress: Progress | None
    figures: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """The figures of each step since the last log entry."""

    tokens: int = 0
    saved_at: float = field(default_factory=time.monotonic)

    def run(self, first_step: int) -> None:
        """Run all steps from ``first_step`` on."""
        kept, run_dir = self.kept, self.options.run_dir
        try:
            with _interruptible() as interrupted:
                for step in range(first_step, self.objective.steps):
                    if kept.is_over:
                        better = f"step {kept.best_step} was better"
                        self.options.report(f"stopped after step {step}: {better}")
                        break
                    self.step(step, interrupted)
        except OSError as error:
            reason = error.strerror or error
            raise TrainError(
                f"the run cannot be written: {reason}; {describe_state(run_dir)}"
            ) from error
        finally:
            if self.progress:
                self.progress.close()

    def step(self, step: int, interrupted: threading.Event) -> None:
        """Run the 0-based ``step``; see `train` for the errors."""
        stops = self._update(step, interrupted)
        self.kept.add(step)
        finished, schedule, steps = step + 1, self.options.schedule, self.objective.steps
        is_last = finished == steps
        evaluate_every = max(1, min(schedule.evaluate, steps // 10))
        evaluates = is_last or finished % evaluate_every == 0
        if evaluates or stops or finished % schedule.log == 0:
            self._log(finished, is_last, evaluates)
        overdue = time.monotonic() - self.saved_at >= schedule.checkpoint_seconds
        is_last = is_last or self.kept.is_over
        if is_last or stops or overdue or finished % schedule.checkpoint == 0:
            self._save(finished)
        if stops and not is_last:
            raise TrainError(
                f"interrupted; {describe_state(self.options.run_dir)}, "
                "the same command goes on from there"
            )

    def _update(self, step: int, interrupted: threading.Event) -> bool:
        """Update the weights once; return whether a process was interrupted."""
        objective, optimisation = self.objective, self.recipe.rates
        accelerator, device = self.accelerator, self.options.device
        batches = batches_per_step(optimisation)
        means: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        for part in range(accelerator.process_index, batches, accelerator.num_processes):
            draws = np.random.SeedSequence((self.recipe.seed, step, part))
            torch.manual_seed(int(draws.generate_state(1, np.uint64)[0]))  # of dropout and others
            batch = objective.batch(step, part)
            with accelerator.autocast():
                loss, figures = objective.loss(batch.to(device))
            accelerator.backward(loss / batches)
            for name, value in {"loss": loss, **figures}.items():
                means[name] = means[name] + value.detach().float() / batches
            self.tokens += batch.tokens
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        stops = interrupted.is_set()
        if accelerator.num_processes > 1:
            stops = self._sum_gradients(parameters, stops)
        norm = nn.utils.clip_grad_norm_(parameters, optimisation.clip)
        means["gradient_norm"] = norm / accelerator.num_processes
        for group in self.optimizer.param_groups:
            factor = schedule_factor(step, objective.steps, optimisation)
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, value in means.items():
            self.figures[name].append(value)
        if self.progress:
            self.progress.advance()
        return stops

    def _sum_gradients(self, parameters: list[nn.Parameter], interrupted: bool) -> bool:
        """Sum the gradients of all processes; return whether one of them was interrupted.

        A parameter that no process used keeps no gradient, as with one process.
        """
        flags = [interrupted, *(one.grad is not None for one in parameters)]
        flagged = torch.tensor(flags, device=self.options.device).float()
        stops, *used = self.accelerator.reduce(flagged).tolist()
        parameters = [one for one, count in zip(parameters, used, strict=True) if count]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        summed = self.accelerator.reduce(torch.cat([one.flatten() for one in gradients]))
        parts = summed.split([one.numel() for one in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return bool(stops)

    def _log(self, step: int, is_last: bool, evaluates: bool) -> None:
        """Write the figures since the last log entry, and evaluate if an evaluation is due."""
        rows = {name: torch.stack(values).mean() for name, values in self.figures.items()}
        means = {name: float(mean) for name, mean in self.accelerator.reduce(rows).items()}
        tokens = sum(gather_object([self.tokens]))
        self.figures.clear()
        self.tokens = 0
        if not math.isfinite(means["loss"]):
            raise self._diverged(f"the loss is {means['loss']}", step)
        if evaluates:
            means |= self._evaluate(step, is_last)
        if self.figure and f"held_out_{self.figure}" in means:
            self.kept.offer(step, means[f"held_out_{self.figure}"])
        return_freed_memory()
        rates = self.recipe.rates
        factor = schedule_factor(step - 1, self.objective.steps, rates)
        means["learning_rate"] = rates.learning_rate * factor
        if self.progress:
            self.progress.log(step, means, tokens)

    def _evaluate(self, step: int, is_last: bool) -> dict[str, float]:
        """Return held-out figures. At the last step, the averaged weights are evaluated."""
        averaged = is_last and self.kept.averaged
        if averaged:
            self.kept.swap()
        figures = self.objective.evaluate(step)
        if averaged:
            self.kept.swap()
        self.objective.module.train()
        return {f"held_out_{name}": value for name, value in figures.items()}

    def _save(self, step: int) -> None:
        if not self.progress:
            return
        module = self.objective.module
        if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
            raise self._diverged("a weight is no number any more", step)
        save_state(self.options.run_dir, self.parts, step)
        self.saved_at = time.monotonic()

    def _diverged(self, what: str, step: int) -> TrainError:
        kept = describe_state(self.options.run_dir)
        return TrainError(f"{what} at step {step}; {kept}; try a lower learning_rate")


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
