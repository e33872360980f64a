"""Fine-tuning on rows for one task, or for several at once: labels, tags, or answers to questions.

With several tasks, one encoder has a head or a label set per task (Liu et al. 2019, "Multi-Task
Deep Neural Networks for Natural Language Understanding", section 3). The share of a task in the
batches is in proportion to the square root of the size of its set, so that small sets are not lost
beside large ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from cloze.export.errors import TrainError
from cloze.export.measure.documents import fingerprint
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.card import Run, held_out_line, write_run
from cloze.export.train.folder import Folder
from cloze.export.train.label_tasks import LabelRows, TagRows, WindowRows, read_rows, read_windows
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.objectives import initialise
from cloze.export.train.recipe import (
    AnyTask,
    LabelsRecipe,
    QuestionsRecipe,
    QuestionsTask,
    TagsRecipe,
    TasksRecipe,
)
from cloze.export.train.rows import RowObjective, TaskRows
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.model_store.heads.label_sets import HEAD_SECTIONS, LabelSets
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.heads.token_classification import TokenLabels


def finetune(
    source: Folder,
    files: Sequence[Path],
    held_out_files: Sequence[Path],
    recipe: LabelsRecipe | TagsRecipe | QuestionsRecipe,
    options: RunOptions,
) -> Path:
    """Fine-tune a model for the task of a recipe, and return its folder.

    The model has only the head of this task. Without held-out files, a share of the others is held
    out.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    task: TaskRows
    if isinstance(recipe, QuestionsRecipe):
        task = read_windows(files, recipe, source, options.report)
    else:
        task = read_rows(files, held_out_files, recipe, source.text, options.report)
    inputs = {
        "checkpoint": source.weights_sha256,
        "file of rows": fingerprint(files),
        "file of held-out rows": fingerprint(held_out_files) if held_out_files else None,
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    sets = label_sets([task])
    network: Any = model_of(
        task.head, sets.get(task.head), source, seed=recipe.seed, dropout=recipe.dropout
    )
    if recipe.lora:
        network = add_low_rank(network, recipe.lora, source)
    batches = batches_per_step(recipe.optimisation)
    steps = max(1, recipe.epochs * len(task.rows) // (recipe.sequences * batches))
    objective = RowObjective(network, task, steps=steps, batches=batches, seed=recipe.seed)
    step = train(objective, options, recipe, task.figure)
    figures = {}
    if (calibration := objective.calibrate()) is not None:
        figures["calibration"] = str(calibration)
        options.report(str(calibration))
        calibrated = sets[task.head].calibrated(None, calibration.temperature)
        setattr(network.config, HEAD_SECTIONS, {task.head: calibrated.model_dump(mode="json")})
    read, title = [*files, *held_out_files], "An encoder fine-tuned for one task"
    run = Run(title, source, read, recipe, options, step, figures)
    folder = write_run(network, source.tokenizer, run)
    options.report(held_out_line(run, len(task.held_out_rows), task.figure))
    return folder


def label_sets(tasks: Sequence[TaskRows]) -> dict[str, LabelSets]:
    """Return the label sets of tasks by the name of their head, the default sets first."""
    sets: dict[str, LabelSets] = {}
    if classes := [each.labels for each in tasks if isinstance(each, LabelRows)]:
        sets[LabelRows.head] = SequenceLabels(**dict(classes[0]), further=tuple(classes[1:]))
    if tags := [each.labels for each in tasks if isinstance(each, TagRows)]:
        sets[TagRows.head] = TokenLabels(**dict(tags[0]), further=tuple(tags[1:]))
    return sets


def model_of(
    head: str, sets: LabelSets | None, source: Folder, *, seed: int, dropout: float
) -> PreTrainedModel:
    """Return the model with a head; the logits of all label sets lie side by side.

    A label of one of several sets has the name of its set before it.

    Args:
        sets: the label sets; None: the head chooses start and end of an answer.
    """
    kind: Any = {
        LabelRows.head: AutoModelForSequenceClassification,
        TagRows.head: AutoModelForTokenClassification,
    }.get(head, AutoModelForQuestionAnswering)
    if sets is None:
        return source.load(kind, seed=seed, dropout=dropout, num_labels=2)[0]
    names = [
        f"{each.name}/{label}" if sets.further else label
        for each in sets.sets
        for label in each.labels
    ]
    settings: dict[str, Any] = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    if isinstance(sets, SequenceLabels):
        settings["problem_type"] = sets.problem_type
    network, new = source.load(kind, seed=seed, dropout=dropout, **settings)
    if new:
        _begin_head(network, source)
    return network


def _begin_head(network: PreTrainedModel, source: Folder) -> None:
    """Give a new head random weights as large as our encoders'; see `initialise`.

    A pooler that has never learnt from pairs of texts is a part of the head. docs/decisions/0025
    has the measurements.
    """
    encoder: Any = network.base_model
    heads = [child for child in network.children() if child is not encoder]
    pooler = getattr(encoder, "pooler", None)
    if pooler is not None and not source.has_tensor("seq_relationship"):
        heads.append(pooler)
    for head in heads:
        initialise(head)


# ---- several tasks -------------------------------------------------------------------------------

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
    """Fine-tune a model for all tasks of a recipe, whose files are relative to ``folder``.

    Return the folder of the new model, which has the heads of all tasks.

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
    task: AnyTask, source: Folder, folder: Path, recipe: TasksRecipe, options: RunOptions
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
