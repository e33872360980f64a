"""Fine-tuning for several tasks at once: one encoder, and a head or a label set per task.

Source: Liu et al. 2019, "Multi-Task Deep Neural Networks for Natural Language Understanding",
section 3. The share of a task in the batches is in proportion to the square root of the size of
its set, so that small sets are not lost beside large ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cloze.export.errors import TrainError
from cloze.export.train.card import Run, write_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.folder import Folder
from cloze.export.train.label_data import LabelData, RowFiles, TagData, read_rows
from cloze.export.train.label_tasks import (
    CLASSES,
    TAGS,
    RowObjective,
    RowPlan,
    label_sets,
    labelled_model,
    main_figure,
    row_objective,
)
from cloze.export.train.loop import Objective, batches_per_step, train
from cloze.export.train.questions import (
    QUESTIONS_FIGURE,
    QuestionData,
    QuestionObjective,
    questions_model,
    read_question_data,
)
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.task_recipe import LabelsTask, QuestionsTask, TagsTask, TasksRecipe
from cloze.model_store.heads import span
from cloze.model_store.heads.label_sets import HEAD_SECTIONS, LabelSets

SPAN: Final = span.HEAD.name
_Task = QuestionsTask | LabelsTask | TagsTask
_Data = LabelData | TagData | QuestionData
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
    tasks = np.repeat(np.arange(len(sizes)), counts)
    return [int(task) for task in np.random.default_rng(seed).permutation(tasks)]


class JointObjective:
    """Implements `loop.Objective`: each batch is of one task, whose objective has its loss."""

    def __init__(self, module: nn.Module, members: Sequence[Member], recipe: TasksRecipe) -> None:
        self.module = module
        self._members, self.steps = members, recipe.steps
        self._batches_per_step = batches_per_step(recipe.optimisation)
        batches = recipe.steps * self._batches_per_step
        self._task_of = draw_tasks([each.size for each in members], batches, recipe.seed)
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
            main += [own[member.figure]] if member.figure in own else []
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
    files = [folder / file for task in recipe.task for file in task.files]
    inputs = {"checkpoint": source.weights_sha256, "file of a task": fingerprint(files)}
    data = [_read(task, source, folder, recipe, options) for task in recipe.task]
    model, sets = _start(source, data, recipe)
    model.head_tensors()  # raises before the run starts if the heads cannot be saved
    acquire_run_dir(options.run_dir, recipe, inputs)
    members = [
        _member(task, rows, model, source, sets, recipe)
        for task, rows in zip(recipe.task, data, strict=True)
    ]
    objective = JointObjective(model, members, recipe)
    for member, batches in zip(members, objective.batches, strict=True):
        options.report(f"{member.name}: {member.size:,} rows, {batches:,} batches")
    step = train(
        objective,
        options,
        seed=recipe.seed,
        optimisation=recipe.optimisation,
        figure=MEAN,
        patience=recipe.patience,
    )
    figures = {}
    for member in members:
        labelled = member.objective
        if isinstance(labelled, RowObjective) and (calibration := labelled.calibrate()):
            sets = {
                head: each.calibrated(member.name, calibration.temperature)
                if labelled.module is model.networks[head]
                else each
                for head, each in sets.items()
            }
            figures[f"{member.name} calibration"] = str(calibration)
            options.report(f"{member.name}: {calibration}")
    sections = {head: each.model_dump(mode="json") for head, each in sets.items()}
    setattr(model.first.config, HEAD_SECTIONS, sections)
    title = "An encoder fine-tuned for several tasks"
    run = Run(title, source, files, recipe, options, step, figures)
    tensors = model.first.state_dict() | model.head_tensors()
    return write_run(model.first, source.tokenizer, run, state_dict=tensors)


def _read(
    task: _Task, source: Folder, folder: Path, recipe: TasksRecipe, options: RunOptions
) -> _Data:
    """Read and check the rows of a task."""
    if isinstance(task, QuestionsTask):
        files = [folder / name for name in task.questions]
        return read_question_data(files, source, task, options.report, measured=recipe.measured)
    row_files = RowFiles(
        *([folder / name for name in names] for names in (task.learnt, task.measured))
    )
    data = read_rows(row_files, task, options.report, task.name)
    spread = slice(None, None, max(1, len(data.held_out) // recipe.measured))
    return replace(data, held_out=data.held_out[spread])  # type: ignore[arg-type]


def _start(
    source: Folder, data: Sequence[_Data], recipe: TasksRecipe
) -> tuple[JointModel, dict[str, LabelSets]]:
    """Return the model with the heads of the tasks, and the label sets by head."""
    sets = label_sets([each for each in data if not isinstance(each, QuestionData)])
    given: dict[str, Any] = {"seed": recipe.seed, "dropout": recipe.dropout}
    networks: dict[str, Any] = {
        head: labelled_model(source, sets[head], **given)
        for head in (CLASSES, TAGS)
        if head in sets
    }
    if any(isinstance(each, QuestionData) for each in data):
        networks[SPAN] = questions_model(source, **given)
    return JointModel(networks), sets


def _member(
    task: _Task,
    data: _Data,
    model: JointModel,
    source: Folder,
    sets: Mapping[str, LabelSets],
    recipe: TasksRecipe,
) -> Member:
    if isinstance(data, QuestionData):
        assert isinstance(task, QuestionsTask)
        questions = QuestionObjective(
            model.networks[SPAN], data, task, steps=recipe.steps, batches=1, seed=recipe.seed
        )
        return Member(task.name, questions, len(data.windows), task.weight, QUESTIONS_FIGURE)
    head = CLASSES if isinstance(data, LabelData) else TAGS
    _, columns = sets[head].choose(task.name)
    plan = RowPlan(recipe.steps, 1, recipe.seed)
    objective = row_objective(model.networks[head], source, data, plan, columns)
    return Member(task.name, objective, len(data.learnt), task.weight, main_figure(data))
