"""The recipes: the fields of a run's TOML file, and what is wrong with a file in one line."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloze.export.errors import TrainError
from cloze.export.measure.documents import describe_error
from cloze.export.measure.examples import SentenceObjective
from cloze.export.measure.masking import Unit
from cloze.model_store.heads.label_sets import SetName

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes of the package; a bare name on the command line is one of them."""

Share = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
OptionalWeight = Annotated[float, Field(ge=0)]
Number = Annotated[int, Field(ge=0, le=1_000_000)]
Count = Annotated[int, Field(gt=0, le=1_000_000_000)]
Size = Annotated[int, Field(gt=0, le=65_536)]
"""A size, bounded so that a typing error cannot fill the memory."""

Length = Annotated[Size, Field(ge=8)]
"""Tokens of a sequence."""

MaskedUnit = Annotated[Unit, Field(strict=False)]
Sentence = Annotated[SentenceObjective, Field(strict=False)]


class Table(BaseModel):
    """A table of a TOML file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Vocabulary(Table):
    """A WordPiece vocabulary."""

    size: Annotated[int, Field(ge=32, le=1_000_000)] = 12_000
    lowercase: bool = True


class Sizes(Table):
    """The sizes of the encoder, by default those of the "mini" BERT of Turc et al. 2019."""

    hidden_size: Size = 256
    layers: Size = 4
    heads: Size = 4
    intermediate_size: Size = 1024
    max_tokens: Length = 512
    dropout: Share = 0.1

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden size {self.hidden_size} is not a multiple of the {self.heads} "
                "attention heads"
            )
        return self


class Optimisation(Table):
    """The optimiser and the learning rate schedule.

    The defaults are AdamW with linear warm-up and decay (Devlin et al. 2019, appendix A.2).
    """

    learning_rate: Rate = 1e-3
    embedding_learning_rate: Rate | None = None
    """Rate of the embeddings; none: ``learning_rate``. See docs/decisions/0010."""

    head_learning_rate: Rate | None = None
    """Rate of the heads, which a new head needs higher (ULMFiT, section 3.2); none: the same."""

    weight_decay: Share = 0.01
    """Biases and LayerNorm are not decayed."""

    beta2: Rate = 0.98
    warmup: Share = 0.06
    """Share of the steps at the start."""

    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the steps at the end in which the rate falls to 0 (MiniCPM, section 4.2); none: all.

    A constant rate with a late decay is as good as a cosine, and a run can be made longer.
    """

    average: Share = 0.0
    """Share of the steps at the end whose weights are averaged (Izmailov et al. 2018)."""

    clip: Weight = 1.0
    """Maximum norm of the gradient."""

    accumulation: Count = 1
    """Batches per step."""

    precision: Literal["fp32", "bf16", "auto"] = "auto"
    """Precision of matrix products; ``auto``: bf16 if the processor has instructions for it."""

    @model_validator(mode="after")
    def _warmup_and_decay_fit(self) -> Self:
        if self.decay is not None and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup = {self.warmup:g} and decay = {self.decay:g} exceed the run: "
                "their sum must be at most 1"
            )
        return self


class Recipe(Table):
    """The fields of every recipe."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of all random draws, as numpy and torch accept it."""

    optimisation: Optimisation = Optimisation()

    @property
    def rates(self) -> Optimisation:
        """The optimisation with the learning rate of the weights that are learnt."""
        return self.optimisation


class Phase(Table):
    """Steps with sequences of one length; short sequences first learn most in a given time."""

    tokens: Length
    """Tokens per sequence, special tokens included."""

    sequences: Size
    """Sequences per batch."""

    steps: Count
    single: Share = 0.0
    """Share of examples that are one sentence."""


class Pretraining(Table):
    """The pre-training objective, its masking, and its pairs of texts."""

    method: Literal["mlm", "rtd"] = "mlm"
    """Masked tokens, or replaced-token detection."""

    unit: MaskedUnit = Unit.TOKEN
    rate: Rate = 0.15
    """Share of tokens to predict."""

    final_rate: Rate | None = None
    """Rate at the last step, approached linearly (Ankner et al. 2024); none: constant rate."""

    keep_embeddings: bool = False
    """With --from, and in distillation: keep the checkpoint's embeddings, see `KeptEmbeddings`."""

    embedding_weight: Weight = 20.0
    """Weight of the cosine distance between both embeddings."""

    embedding_tokens: Count = 1024
    """Maximum tokens per batch for the comparison of embeddings."""

    dynamic: bool = True
    """New masks in each epoch."""

    short: Share = 0.1
    """Share of sequences cut to a random length."""

    span_boundary: bool = False
    """Also predict spans from their boundaries (SpanBERT); needs ``unit = "span"``."""

    sentence: Sentence = SentenceObjective.NSP
    sentence_weight: Weight = 1.0
    """Weight of the sentence objective's loss; masked tokens have weight 1."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.span_boundary and (self.unit is not Unit.SPAN or self.method != "mlm"):
            raise ValueError("span_boundary = true needs unit = 'span' and method = 'mlm'")
        if self.method == "rtd" and self.sentence is not SentenceObjective.NONE:
            raise ValueError("method = 'rtd' has no sentence objective; it needs sentence = 'none'")
        if self.method == "rtd" and self.keep_embeddings:
            raise ValueError("keep_embeddings needs method = 'mlm'")
        return self


class DistilledText(Pretraining):
    """Distillation's use of text: single texts with masked tokens."""

    sentence: Sentence = SentenceObjective.NONE

    @model_validator(mode="after")
    def _is_honoured(self) -> Self:
        if self.sentence != "none" or self.method != "mlm":
            raise ValueError(
                "distillation learns from single texts with masked tokens: "
                'set method = "mlm" and sentence = "none"'
            )
        pairs = {"span_boundary", "sentence_weight", "generator", "generator_weight"}
        if unused := sorted(pairs & self.model_fields_set):
            raise ValueError(f"distillation does not use {', '.join(unused)}")
        return self


class TextRecipe(Recipe):
    """The part of a recipe that describes learning from text."""

    pretraining: Pretraining
    phases: Annotated[list[Phase], Field(min_length=1)]
    held_out: Share = 0.05
    """Share of the documents that are held out."""


class PretrainRecipe(TextRecipe):
    """``cloze train pretrain``."""

    vocabulary: Vocabulary = Vocabulary()
    model: Sizes = Sizes()
    pretraining: Pretraining = Pretraining()


class DistillRecipe(TextRecipe):
    """``cloze train distill``."""

    pretraining: DistilledText = DistilledText()
    optimisation: Optimisation = Optimisation(learning_rate=5e-4)
    temperature: Weight = 2.0
    soft_weight: OptionalWeight = 5.0
    masked_weight: OptionalWeight = 2.0
    cosine_weight: OptionalWeight = 1.0
    dropout: Share = 0.1


Target = Literal["query", "key", "value", "attention-output", "feed-forward-in", "feed-forward-out"]
"""The linear layers of an encoder's layer, whatever a family calls them."""


class LowRank(Table):
    """Low-rank matrices beside frozen weights: ``W + (alpha / rank) B A``.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    rank: Annotated[int, Field(gt=0, le=1024)] = 8
    alpha: Weight = 16.0
    targets: Annotated[list[Target], Field(min_length=1)] = ["query", "value"]
    """Layers with low-rank matrices."""

    learning_rate: Rate = 1e-3
    """Rate of the low-rank matrices: ten times the best rate of all weights (Schulman et al. 2025).

    The heads have the rate of ``[optimisation]``.
    """


class FinetuneRecipe(Recipe):
    """The fields of every run from a checkpoint on data with labels."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    dropout: Share = 0.1
    patience: Number = 0
    """Evaluations without a better held-out figure after which the run stops; 0: it does not stop.

    The result has the weights of the best evaluation.
    """

    @model_validator(mode="after")
    def _one_choice_of_weights(self) -> Self:
        if self.patience and self.optimisation.average:
            raise ValueError("patience keeps the best weights, average the mean of the last ones")
        return self


class AdaptedRecipe(FinetuneRecipe):
    """The fields of a run that may learn low-rank matrices instead of all weights."""

    lora: LowRank | None = None
    """Low-rank matrices; none: all weights are learnt."""

    def with_rank(self, rank: int | None) -> Self:
        """Return the recipe with low-rank matrices of a rank; None: the recipe as it is."""
        if rank is None:
            return self
        lora = (self.lora or LowRank()).model_copy(update={"rank": rank})
        return self.model_copy(update={"lora": lora})

    @property
    def rates(self) -> Optimisation:
        """The optimisation, if there are low-rank matrices with their learning rate."""
        own = self.optimisation
        if self.lora is None:
            return own
        changes = {
            "learning_rate": self.lora.learning_rate,
            "head_learning_rate": own.head_learning_rate or own.learning_rate,
        }
        return own.model_copy(update=changes)


class QuestionsSettings(Table):
    """How questions become windows, and which are learnt."""

    sequences: Size = 32
    """Windows per batch."""

    tokens: Annotated[Size, Field(ge=16)] = 384
    """Tokens per window, question included."""

    stride: Count = 128
    """Tokens that neighbouring windows share."""

    question_tokens: Count = 64
    """Maximum tokens per question; longer questions are cut."""

    held_out: Share = 0.05
    """Share of the articles that are held out."""

    unanswerable: bool = True
    """SQuAD 2.0: also learn from unanswerable questions."""


class QuestionsRecipe(AdaptedRecipe, QuestionsSettings):
    """``cloze train finetune-qa``."""

    epochs: Count = 2


class EmbedRecipe(AdaptedRecipe):
    """``cloze train finetune-embed``."""

    contrastive_steps: Number = 0
    """Steps of SimCSE on unlabelled text; need dropout."""

    contrastive_sequences: Size = 128
    contrastive_tokens: Length = 64
    temperature: Weight = 0.05
    text_weight: OptionalWeight = 0.5
    """Weight of the pre-training objective, which keeps the heads; needs text."""

    text_unit: MaskedUnit = Unit.WHOLE_WORD
    text_sentence_weight: Weight = 1.0
    """Weight of next sentence within the pre-training objective."""

    text_sequences: Size = 16
    """Sequences of text per batch."""

    epochs: Number = 4
    """Epochs over the scored pairs."""

    sequences: Size = 32
    tokens: Length = 128
    held_out: Share = 0.05


class LabelSettings(Table):
    """How texts with labels, or sentences with tags, are learnt."""

    sequences: Size = 32
    """Texts per batch."""

    tokens: Length = 128
    """Maximum tokens per text or pair, special tokens included."""

    long_text: Literal["error", "truncate"] = "error"
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


class LabelsRecipe(AdaptedRecipe, LabelSettings):
    """``cloze train finetune-classify``."""

    epochs: Count = 4


class TagsRecipe(AdaptedRecipe, TagSettings):
    """``cloze train finetune-tokens``."""

    epochs: Count = 4


class _Task(Table):
    """The fields of every task."""

    name: SetName
    """Name of the task, and of its label set."""

    weight: Weight = 1.0
    """Factor of the task's loss."""


class QuestionsTask(_Task, QuestionsSettings):
    """A set of questions."""

    kind: Literal["qa"]
    questions: Annotated[list[str], Field(min_length=1)]
    """Files in SQuAD's format."""


class _RowsTask(_Task):
    """A set of texts with labels or tags."""

    learnt: Annotated[list[str], Field(min_length=1)]
    """Files to learn from."""

    measured: list[str] = []
    """Files to measure on; none: the share ``held_out`` of the others."""


class LabelsTask(_RowsTask, LabelSettings):
    """A set of texts with labels."""

    kind: Literal["classify"]


class TagsTask(_RowsTask, TagSettings):
    """A set of sentences with tags."""

    kind: Literal["tokens"]


AnyTask = Annotated[QuestionsTask | LabelsTask | TagsTask, Field(discriminator="kind")]


class TasksRecipe(FinetuneRecipe):
    """``cloze train finetune-tasks``: one encoder, and a head per task."""

    steps: Count
    """Steps of the run, of all tasks together."""

    measured: Count = 500
    """Maximum held-out questions, texts or sentences of a task per evaluation."""

    task: Annotated[list[AnyTask], Field(min_length=1)]
    """The tasks. The first one of a kind has the default label set."""

    @model_validator(mode="after")
    def _tasks_fit_together(self) -> Self:
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


R = TypeVar("R", bound=Recipe)


def load_recipe(name: str, kind: type[R], *, seed: int | None = None) -> R:
    """Read a recipe; a ``seed`` replaces that of the file.

    Raises:
        TrainError: the file is missing or is not TOML, or a field is unknown or invalid.
    """
    file = Path(name)
    if not file.suffix and not file.exists():
        file = RECIPES / f"{name}.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        recipe = kind.model_validate(data)
    except FileNotFoundError:
        names = ", ".join(sorted(entry.stem for entry in RECIPES.glob("*.toml")))
        raise TrainError(f"there is no recipe {name}; a file, or one of: {names}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise TrainError(f"{file} is not TOML: {error}") from error
    except ValidationError as error:
        raise TrainError(f"{file.name}: {describe_error(error)}") from error
    return recipe if seed is None else recipe.model_copy(update={"seed": seed})
