"""The recipes of fine-tuning for labels, for tags, and for several tasks at once."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cloze.export.train.recipe import (
    AdaptedRecipe,
    Count,
    Optimisation,
    QuestionsSettings,
    Recipe,
    Share,
    Size,
    Table,
    Weight,
)
from cloze.model_store.heads.label_sets import SetName

LongText = Literal["error", "truncate"]


class LabelSettings(Table):
    """How texts with labels, or sentences with tags, are learnt."""

    sequences: Size = 32
    """Texts per batch."""

    tokens: Annotated[int, Field(ge=8)] = 128
    """Maximum tokens per text or pair, special tokens included."""

    long_text: LongText = "error"
    """A text of more tokens is an error, or is cut."""

    held_out: Share = 0.1
    """Share of the texts that are held out if no file of held-out texts is given."""

    class_weights: Literal["none", "balanced"] | dict[str, Weight] = "none"
    """Weights of labels in the loss; a label that the table does not name has weight 1.

    ``balanced``: in inverse proportion to the number of rows with the label (King & Zeng 2001,
    "Logistic Regression in Rare Events Data"), so that rare labels count as much as common ones.
    """


class TagSettings(LabelSettings):
    """How sentences with tags are learnt."""

    subwords: Literal["first", "all"] = "first"
    """Tokens that are labelled in a word of several tokens.

    ``first``: as in Devlin et al. 2019, section 5.3. ``all``: the others continue the entity, so
    that a request without an ``aggregation_strategy`` gets whole words.
    """


class _Run(Recipe):
    """The fields of a run over one or more sets."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    dropout: Share = 0.1
    patience: Annotated[int, Field(ge=0)] = 0
    """Evaluations without a better held-out figure after which the run stops; 0: it does not stop.

    The result has the weights of the best evaluation.
    """

    @model_validator(mode="after")
    def _one_choice_of_weights(self) -> "_Run":
        if self.patience and self.optimisation.average:
            raise ValueError("patience keeps the best weights, average the mean of the last ones")
        return self


class LabelsRecipe(_Run, AdaptedRecipe, LabelSettings):
    """``cloze train finetune-classify``."""

    epochs: Count = 4


class TagsRecipe(_Run, AdaptedRecipe, TagSettings):
    """``cloze train finetune-tokens``."""

    epochs: Count = 4


Names = Annotated[list[str], Field(min_length=1)]


class _Task(Table):
    """The fields of every task."""

    name: SetName
    """Name of the task, and of its label set."""

    weight: Weight = 1.0
    """Factor of the task's loss."""


class QuestionsTask(_Task, QuestionsSettings):
    """A set of questions."""

    kind: Literal["qa"]
    questions: Names
    """Files in SQuAD's format."""

    @property
    def files(self) -> list[str]:
        """All files of the task."""
        return self.questions


class _RowsTask(_Task):
    """A set of texts with labels or tags."""

    learnt: Names
    """Files to learn from."""

    measured: Annotated[list[str], Field(default_factory=list)]
    """Files to measure on; none: the share ``held_out`` of the others."""

    @property
    def files(self) -> list[str]:
        """All files of the task."""
        return [*self.learnt, *self.measured]


class LabelsTask(_RowsTask, LabelSettings):
    """A set of texts with labels."""

    kind: Literal["classify"]


class TagsTask(_RowsTask, TagSettings):
    """A set of sentences with tags."""

    kind: Literal["tokens"]


AnyTask = Annotated[QuestionsTask | LabelsTask | TagsTask, Field(discriminator="kind")]


class TasksRecipe(_Run):
    """``cloze train finetune-tasks``: one encoder, and a head per task."""

    steps: Count
    """Steps of the run, of all tasks together."""

    measured: Count = 500
    """Maximum held-out questions, texts or sentences of a task per evaluation."""

    task: Annotated[list[AnyTask], Field(min_length=1)]
    """The tasks. The first one of a kind has the default label set."""

    @model_validator(mode="after")
    def _tasks_fit_together(self) -> "TasksRecipe":
        names = [task.name for task in self.task]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tasks have the name {twice!r}")
        questions = [task.name for task in self.task if task.kind == "qa"]
        if len(questions) > 1:
            raise ValueError(
                f"{questions[0]} and {questions[1]} are both of kind qa, which has one head: "
                "list the files of both in one task"
            )
        return self
