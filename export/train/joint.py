"""Fine-tuning for several tasks at once: one encoder, and a head or a label set per task.

Source: Liu et al. 2019, "Multi-Task Deep Neural Networks for Natural Language Understanding",
section 3. The share of a task in the batches is in proportion to the square root of the size of
its set, so that small sets are not lost beside large ones.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cloze.export.errors import TrainError
from cloze.export.families import FAMILIES
from cloze.export.heads import SPAN
from cloze.export.load.checkpoint import Checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.label_data import (
    LabelData,
    RowFiles,
    TagData,
    read_rows,
)
from cloze.export.train.label_tasks import (
    BatchPlan,
    RowObjective,
    head_options,
    main_figure,
    row_objective,
)
from cloze.export.train.loop import Objective, Stopping, train
from cloze.export.train.progress import read_log
from cloze.export.train.questions import make_objective
from cloze.export.train.recipe import Optimisation, QuestionsRecipe, QuestionsSettings
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import start_from
from cloze.export.train.task_recipe import LabelsTask, QuestionsTask, TagsTask, TasksRecipe

_QUESTIONS_FIGURE = "f1"
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a joint run.

    Attributes:
        size: number of windows, texts or sentences to learn from.
        figure: the held-out figure that says how good the task is.
    """

    name: str
    objective: Objective
    size: int
    weight: float
    figure: str


@dataclass(frozen=True, slots=True)
class JointBatch:
    """A batch of one of the tasks."""

    member: Member
    batch: Any

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.batch.tokens)

    def to(self, device: torch.device) -> "JointBatch":
        """Return a copy of the batch on a device."""
        return JointBatch(self.member, self.batch.to(device))


def draw_tasks(sizes: Sequence[int], batches: int, seed: int) -> list[int]:
    """Return the number of the task of each batch, in random order.

    The shares are those of the square roots of the sizes. Each task has a batch if there are
    enough of them.
    """
    shares = np.sqrt(np.asarray(sizes, np.float64))
    ends = np.rint(np.cumsum(shares) / shares.sum() * batches).astype(int)
    counts = np.diff(ends, prepend=0)
    for task in np.flatnonzero(counts == 0):
        if counts.max() > 1:
            counts[counts.argmax()] -= 1
            counts[task] = 1
    drawn: list[int] = (
        np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), counts)).tolist()
    )
    return drawn


class JointObjective:
    """Implements `loop.Objective`: each batch is of one task, whose objective has its loss."""

    def __init__(self, members: Sequence[Member], recipe: TasksRecipe) -> None:
        self.module: nn.Module = members[0].objective.module
        self._members, self.steps = members, recipe.steps
        self._accumulation = recipe.optimisation.accumulation
        batches = recipe.steps * self._accumulation
        self._task_of = draw_tasks([each.size for each in members], batches, recipe.seed)
        counts = [0] * len(members)
        self._number_in_task = []
        for task in self._task_of:
            self._number_in_task.append(counts[task])
            counts[task] += 1
        self.batches = dict(zip([each.name for each in members], counts, strict=True))
        """The number of batches of each task."""

    def batch(self, step: int, part: int) -> JointBatch:
        """Return the ``part``-th batch of a step."""
        number = step * self._accumulation + part
        member = self._members[self._task_of[number]]
        return JointBatch(member, member.objective.batch(self._number_in_task[number], 0))

    def loss(self, batch: JointBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted loss of the batch's task."""
        loss, _ = batch.member.objective.loss(batch.batch)
        return batch.member.weight * loss, {}

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of each task, after its name, and the mean of the main ones.

        The mean is the figure by which a run with patience stops.
        """
        figures: dict[str, float] = {}
        main = []
        for member in self._members:
            own = member.objective.evaluate(step)
            figures |= {f"{member.name}_{name}": value for name, value in own.items()}
            main += [own[member.figure]] if member.figure in own else []
        return figures | ({MEAN: float(np.mean(main))} if main else {})


MEAN = "mean"
_Data = LabelData | TagData | None


def finetune_tasks(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: TasksRecipe,
    options: RunOptions,
    *,
    alone: bool = False,
    runs: Mapping[str, Path] | None = None,
) -> Path:
    """Fine-tune a checkpoint for all tasks of a recipe.

    Args:
        folder: folder that the names of the recipe's files are relative to.
        alone: also train each task alone, with the batches that it has in the joint run, and
            report what joint training costs or gains.
        runs: folders of runs of single tasks to compare with instead, by name of the task.

    Returns:
        The folder of the new checkpoint, which has the heads of all tasks.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    files = [folder / file for task in recipe.task for file in task.files]
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of a task": fingerprint(files),
    }
    _check_runs(recipe, runs or {})
    data = [_read(task, folder, recipe, options) for task in recipe.task]
    acquire_run_dir(options.run_dir, recipe, inputs)
    model = _start(checkpoint, recipe.task, data, recipe)
    members = _members(model, checkpoint.tokenizer, folder, data, recipe, options)
    objective = JointObjective(members, recipe)
    for member in members:
        options.report(
            f"{member.name}: {member.size:,} rows, {objective.batches[member.name]:,} batches"
        )
    step = _train(objective, recipe, options, MEAN)
    figures = {}
    for member in members:
        labelled = member.objective
        if not isinstance(labelled, RowObjective):
            continue
        if (calibration := labelled.calibrate()) is not None:
            figures[f"{member.name} calibration"] = str(calibration)
            options.report(f"{member.name}: {calibration}")
    title, source = "An encoder fine-tuned for several tasks", checkpoint.source.location
    run = Run(title, source, [checkpoint], files, recipe, options, step, figures)
    result = finish_run(model, checkpoint.tokenizer, run)
    joint = _figures(options.run_dir, step)
    others = dict(runs or {})
    if alone:
        for index, member in enumerate(members):
            steps = math.ceil(objective.batches[member.name] / recipe.optimisation.accumulation)
            own = recipe.model_copy(update={"task": [recipe.task[index]], "steps": max(1, steps)})
            run_dir = options.run_dir / ALONE / member.name
            _train_alone(checkpoint, folder, data[index], own, replace(options, run_dir=run_dir))
            others[member.name] = run_dir
    _report_gains(members, joint, others, options)
    return result


def _check_runs(recipe: TasksRecipe, runs: Mapping[str, Path]) -> None:
    names = [task.name for task in recipe.task]
    for name, run in runs.items():
        if name not in names:
            raise TrainError(f"the recipe has no task {name!r} to compare {run} with")
        if not read_log(run):
            raise TrainError(f"{run} is not the folder of a run: it has no log")


def _read(
    task: QuestionsTask | LabelsTask | TagsTask,
    folder: Path,
    recipe: TasksRecipe,
    options: RunOptions,
) -> _Data:
    """Read and check the rows of a task; questions are read with their windows."""
    if isinstance(task, QuestionsTask):
        return None
    files = RowFiles(*([folder / name for name in names] for names in (task.learnt, task.measured)))
    data = read_rows(files, task, options.report, task.name)
    spread = slice(None, None, max(1, len(data.held_out) // recipe.measured))
    return replace(data, held_out=data.held_out[spread])  # type: ignore[arg-type]


def _start(
    checkpoint: Checkpoint,
    tasks: Sequence[QuestionsTask | LabelsTask | TagsTask],
    data: Sequence[_Data],
    recipe: TasksRecipe,
) -> Model:
    """Return the model with the heads of the tasks."""
    labels = head_options([each for each in data if each is not None])
    heads = [SPAN] if any(isinstance(task, QuestionsTask) for task in tasks) else []
    heads += labels
    family = FAMILIES[checkpoint.model.config.family]
    alone = next((name for name in heads if family.heads[name].needs_class), None)
    if alone and len(heads) > 1:
        raise TrainError(
            f"a {family.name} checkpoint says only by its class that it has a {alone} head, so it "
            "cannot have another one; train that task alone"
        )
    return start_from(checkpoint, heads, dropout=recipe.dropout, seed=recipe.seed, options=labels)


def _members(
    model: Model,
    tokenizer: CheckpointTokenizer,
    folder: Path,
    data: Sequence[_Data],
    recipe: TasksRecipe,
    options: RunOptions,
) -> list[Member]:
    members = []
    for task, rows in zip(recipe.task, data, strict=True):
        plan = BatchPlan(recipe.steps, 1, recipe.seed)
        if isinstance(task, QuestionsTask):
            settings = task.model_dump(include=set(QuestionsSettings.model_fields))
            own = QuestionsRecipe(seed=recipe.seed, optimisation=Optimisation(), **settings)
            files = [folder / name for name in task.questions]
            questions = make_objective(
                model, tokenizer, files, own, options, measured=recipe.measured
            )
            size, figure = questions.windows, _QUESTIONS_FIGURE
            members.append(Member(task.name, questions, size, task.weight, figure))
            continue
        assert rows is not None
        objective = row_objective(model, tokenizer, rows, plan)
        size, figure = len(rows.learnt), main_figure(rows)
        members.append(Member(task.name, objective, size, task.weight, figure))
    return members


def _train(objective: Objective, recipe: TasksRecipe, options: RunOptions, figure: str) -> int:
    stopping = Stopping(figure, recipe.patience) if recipe.patience else None
    return train(
        objective, options, seed=recipe.seed, optimisation=recipe.optimisation, stopping=stopping
    )


def _train_alone(
    checkpoint: Checkpoint, folder: Path, data: _Data, recipe: TasksRecipe, options: RunOptions
) -> None:
    """Train one task as in the joint run, without the others."""
    options.report(f"{recipe.task[0].name} alone, {recipe.steps:,} steps")
    acquire_run_dir(options.run_dir, recipe, {"checkpoint": checkpoint.source.weights_sha256})
    model = _start(checkpoint, recipe.task, [data], recipe)
    members = _members(model, checkpoint.tokenizer, folder, [data], recipe, options)
    _train(JointObjective(members, recipe), recipe, options, MEAN)


def _figures(run_dir: Path, step: int | None = None) -> Mapping[str, float]:
    """Return the held-out figures of a run at a step, or at its end."""
    entries = [each for each in read_log(run_dir) if step is None or each["step"] <= step]
    return {
        name.removeprefix("held_out_"): value
        for name, value in entries[-1].items()
        if name.startswith("held_out_")
    }


def _report_gains(
    members: Sequence[Member],
    joint: Mapping[str, float],
    runs: Mapping[str, Path],
    options: RunOptions,
) -> None:
    """Report each task's main figure, and what it gains over the run of the task alone."""
    rows: list[dict[str, Any]] = []
    for member in members:
        name = f"{member.name}_{member.figure}"
        if name not in joint:
            continue
        row: dict[str, Any] = {"task": member.name, "figure": member.figure, "joint": joint[name]}
        if member.name in runs:
            single = _figures(runs[member.name])
            value = single.get(name, single.get(member.figure))
            if value is not None:
                row |= {"alone": value, "gain": joint[name] - value}
        rows.append(row)
        gain = f", alone {row['alone']:.3f}, gain {row['gain']:+.3f}" if "gain" in row else ""
        options.report(f"{member.name}: {member.figure} {row['joint']:.3f}{gain}")
    (options.run_dir / "tasks.json").write_text(json.dumps(rows, indent=2) + "\n")
