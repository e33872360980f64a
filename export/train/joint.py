"""Fine-tuning for several tasks at once: one encoder, and a head or a label set per task.

Source: Liu et al. 2019, "Multi-Task Deep Neural Networks for Natural Language Understanding",
section 3. The share of a task in the batches is in proportion to the square root of the size of
its set, so that small sets are not lost beside large ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cloze.export.errors import TrainError
from cloze.export.measure.documents import fingerprint
from cloze.export.train.card import Run, write_run
from cloze.export.train.finetune import label_sets, model_of
from cloze.export.train.folder import Folder
from cloze.export.train.label_tasks import LabelRows, TagRows, read_rows
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.questions import WindowRows, read_windows
from cloze.export.train.recipe import AnyTask, QuestionsTask, TasksRecipe
from cloze.export.train.rows import RowObjective, TaskRows
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.model_store.heads.label_sets import HEAD_SECTIONS

MEAN: Final = "mean"


class JointModel(nn.Module):
    """One encoder with several heads: models of transformers that have their encoder in common.

    Attributes:
        networks: by name of the head.
    """

    def __init__(self, networks: Mapping[str, PreTrainedModel]) -> None:
        super().__init__()
        first, *others = networks.values()
        for other in others:
            setattr(other, other.base_model_prefix, first.base_model)
        self.networks: Mapping[str, Any] = nn.ModuleDict(dict(networks))  # type: ignore[assignment]

    @property
    def first(self) -> Any:
        """The model under whose class the folder is saved."""
        return next(iter(self.networks.values()))

    def head_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all heads by the names that an export reads.

        A classifier of texts and one of tokens have one name in transformers. The second one has
        the name of the head before it.

        Raises:
            TrainError: the heads have a layer in common.
        """
        tensors: dict[str, Tensor] = {}
        for head, network in self.networks.items():
            encoder = f"{network.base_model_prefix}."
            for name, tensor in network.state_dict().items():
                if name.startswith(encoder):
                    continue
                if name in tensors and not name.startswith("classifier."):
                    raise TrainError(
                        f"the heads of a {network.config.model_type} for {head} and another task "
                        f"have the same name in a folder ({name}); train each task alone"
                    )
                tensors[f"{head}.{name}" if name in tensors else name] = tensor
        return tensors


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a joint run."""

    name: str
    objective: RowObjective
    weight: float


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
    tasks = np.repeat(np.arange(len(sizes)), counts)
    return [int(task) for task in np.random.default_rng(seed).permutation(tasks)]


class JointObjective:
    """Implements `loop.Objective`: each batch is of one task, whose objective has its loss."""

    def __init__(self, module: nn.Module, members: Sequence[Member], recipe: TasksRecipe) -> None:
        self.module = module
        self._members, self.steps = members, recipe.steps
        self._batches_per_step = batches_per_step(recipe.optimisation)
        batches = recipe.steps * self._batches_per_step
        sizes = [len(each.objective.task.rows) for each in members]
        self._task_of = draw_tasks(sizes, batches, recipe.seed)
        seen: Counter[int] = Counter()
        self._number_in_task = []
        for task in self._task_of:
            self._number_in_task.append(seen[task])
            seen[task] += 1
        self.batches = [seen[task] for task in range(len(members))]
        """The number of batches of each task."""

    def batch(self, step: int, part: int) -> JointBatch:
        """Return the ``part``-th batch of a step."""
        number = step * self._batches_per_step + part
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
            figure = member.objective.task.figure
            main += [own[figure]] if figure in own else []
        return figures | ({MEAN: float(np.mean(main))} if main else {})


def finetune_tasks(source: Folder, folder: Path, recipe: TasksRecipe, options: RunOptions) -> Path:
    """Fine-tune a model for all tasks of a recipe.

    Args:
        folder: folder that the names of the recipe's files are relative to.

    Returns:
        The folder of the new model, which has the heads of all tasks.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    files = [file for task in recipe.task for part in _files(task, folder) for file in part]
    inputs = {"checkpoint": source.weights_sha256, "file of a task": fingerprint(files)}
    tasks = [_read(task, source, folder, recipe, options) for task in recipe.task]
    sets = label_sets(tasks)
    networks = {
        head: model_of(head, sets.get(head), source, seed=recipe.seed, dropout=recipe.dropout)
        for head in (LabelRows.head, TagRows.head, WindowRows.head)
        if any(task.head == head for task in tasks)
    }
    model = JointModel(networks)
    model.head_tensors()  # raises before the run starts if the heads cannot be saved
    acquire_run_dir(options.run_dir, recipe, inputs)
    members = []
    for settings, task in zip(recipe.task, tasks, strict=True):
        one_of_task = RowObjective(
            model.networks[task.head],
            task,
            steps=recipe.steps,
            batches=1,
            seed=recipe.seed,
            columns=sets[task.head].choose(settings.name)[1] if task.head in sets else slice(None),
        )
        members.append(Member(settings.name, one_of_task, settings.weight))
    objective = JointObjective(model, members, recipe)
    for member, batches in zip(members, objective.batches, strict=True):
        rows = len(member.objective.task.rows)
        options.report(f"{member.name}: {rows:,} rows, {batches:,} batches")
    step = train(objective, options, recipe, MEAN)
    figures = {}
    for member in members:
        if calibration := member.objective.calibrate():
            head = member.objective.task.head
            sets[head] = sets[head].calibrated(member.name, calibration.temperature)
            figures[f"{member.name} calibration"] = str(calibration)
            options.report(f"{member.name}: {calibration}")
    sections = {head: each.model_dump(mode="json") for head, each in sets.items()}
    setattr(model.first.config, HEAD_SECTIONS, sections)
    run = Run(
        "An encoder fine-tuned for several tasks", source, files, recipe, options, step, figures
    )
    tensors = model.first.state_dict() | model.head_tensors()
    return write_run(model.first, source.tokenizer, run, state_dict=tensors)


def _read(
    task: AnyTask,
    source: Folder,
    folder: Path,
    recipe: TasksRecipe,
    options: RunOptions,
) -> TaskRows:
    """Read and check the rows of a task."""
    report, measured = options.report, recipe.measured
    files, held_out = _files(task, folder)
    if isinstance(task, QuestionsTask):
        return read_windows(files, task, source, report, measured=measured)
    return read_rows(files, held_out, task, source.text, report, name=task.name, measured=measured)


def _files(task: AnyTask, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to learn from, and the files to measure on."""
    if isinstance(task, QuestionsTask):
        return [folder / name for name in task.questions], []
    return [folder / name for name in task.learnt], [folder / name for name in task.measured]
