"""Fine-tuning for one task on rows: labels of texts, tags of words, or answers to questions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from cloze.export.measure.documents import fingerprint
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import Folder
from cloze.export.train.label_tasks import LabelRows, TagRows, read_rows
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.objectives import initialise
from cloze.export.train.questions import read_windows
from cloze.export.train.recipe import LabelsRecipe, QuestionsRecipe, TagsRecipe
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
    """Fine-tune a model for the task of a recipe.

    Args:
        held_out_files: files to measure on; empty: a share of the others.

    Returns:
        The folder of the new model, which has only the head of this task.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    task: TaskRows
    if isinstance(recipe, QuestionsRecipe):
        task = read_windows(files, recipe, source, options.report)
    else:
        task = read_rows(files, held_out_files, recipe, source.text, options.report)
    read = [*files, *held_out_files]
    inputs = {"checkpoint": source.weights_sha256, "file of rows": fingerprint(read)}
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
    run = Run("An encoder fine-tuned for one task", source, read, recipe, options, step, figures)
    return write_run(network, source.tokenizer, run)


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
