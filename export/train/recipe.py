"""The recipes: the fields of a run's TOML file, validated when the file is read."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloze.export.blocks.config import EncoderConfig
from cloze.export.families import PRETRAINED
from cloze.export.train.errors import TrainError
from cloze.export.train.masking import Unit
from cloze.export.train.pairs import SentenceObjective

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes of the package; a bare name on the command line is one of them."""

MAX_SEED = 2**32 - 1
"""The loop multiplies the seed by a million, and torch accepts 64 bits."""

R = TypeVar("R", bound="Recipe")
MIN_VOCABULARY, MAX_VOCABULARY = 32, 1_000_000
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0, le=1_000_000_000)]
Size = Annotated[
    int,
    Field(gt=0, le=65_536, description="bounded, so that a typing error cannot fill the memory"),
]


class _Table(BaseModel):
    """A table of a TOML file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Recipe(_Table):
    """The fields of every recipe."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED, description="seed of all random draws")] = 1


class Vocabulary(_Table):
    """A WordPiece vocabulary."""

    size: Annotated[int, Field(ge=MIN_VOCABULARY, le=MAX_VOCABULARY)] = 12_000
    lowercase: bool = True
    min_frequency: Count = 2


class VocabularyRecipe(Recipe):
    """``cloze train vocab``."""

    vocabulary: Vocabulary = Vocabulary()


class Sizes(_Table):
    """The sizes of the encoder.

    The defaults are the smallest published BERT with more than two layers (Turc et al. 2019,
    "mini").
    """

    family: Annotated[str, Field(pattern=f"^{PRETRAINED.name}$")] = PRETRAINED.name
    hidden_size: Size = 256
    layers: Size = 4
    heads: Size = 4
    intermediate_size: Size = 1024
    max_tokens: Annotated[Size, Field(ge=8)] = 512
    activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
    dropout: Share = 0.1

    def config(self, vocab_size: int) -> EncoderConfig:
        """Return the encoder's configuration for a vocabulary."""
        return EncoderConfig(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            intermediate_size=self.intermediate_size,
            max_positions=self.max_tokens,
            type_vocab_size=2,
            activation=self.activation,
            dropout=self.dropout,
        )

    @model_validator(mode="after")
    def _heads_divide(self) -> "Sizes":
        self.config(32)
        return self


Rate = Annotated[float, Field(gt=0, lt=1)]


class Optimisation(_Table):
    """The optimiser and the learning rate schedule.

    The defaults are AdamW with linear warm-up and decay (Devlin et al. 2019, appendix A.2).
    """

    # Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025
    # for the size of its updates.
    optimizer: Annotated[
        Literal["adamw", "muon"],
        Field(description="muon updates the matrices of the encoder's layers, AdamW all else"),
    ] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    # Jordan et al. 2024: AdamW updates the embeddings, and its best rate differs from Muon's.
    embedding_learning_rate: Annotated[
        Rate | None, Field(description="rate of the embeddings; none: learning_rate")
    ] = None
    # Howard & Ruder 2018, "ULMFiT", section 3.2: new layers need a higher rate than the layers of
    # the checkpoint.
    head_learning_rate: Annotated[
        Rate | None, Field(description="rate of the heads; none: learning_rate")
    ] = None
    # 0.1: Brown et al. 2020, "GPT-3", appendix B.
    weight_decay: Annotated[
        float, Field(ge=0, lt=1, description="biases and LayerNorm are not decayed")
    ] = 0.01
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.98
    warmup: Annotated[Share, Field(description="share of the steps at the start")] = 0.06
    # Hu et al. 2024, "MiniCPM", section 4.2; Hägele et al. 2024, "Scaling Laws and Compute-Optimal
    # Training Beyond Fixed Training Durations": a constant rate with a late decay is as good as a
    # cosine, and the length of a run can be changed.
    decay: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the steps at the end in which the rate falls to 0; none: all",
        ),
    ] = None
    # Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization";
    # Kaddour 2022, "Stop Wasting My Time!".
    average: Annotated[
        Share,
        Field(description="share of the steps at the end whose weights are averaged"),
    ] = 0.0
    clip: Annotated[float, Field(gt=0, description="maximum norm of the gradient")] = 1.0
    accumulation: Annotated[Count, Field(description="batches per step")] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(
            description="precision of matrix products; auto: bf16 if the processor has "
            "instructions for bf16 (measured: 1.9 times the speed of fp32 with avx512_bf16)"
        ),
    ] = "auto"

    @model_validator(mode="after")
    def _warmup_and_decay_fit(self) -> "Optimisation":
        if self.decay is not None and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup = {self.warmup:g} and decay = {self.decay:g} exceed the run: "
                "their sum must be at most 1"
            )
        return self


class Phase(_Table):
    """Steps with sequences of one length.

    Short sequences first and long sequences later learn the most words in a given time.
    """

    tokens: Annotated[int, Field(ge=8, description="tokens per sequence, special tokens included")]
    sequences: Annotated[Size, Field(description="sequences per batch")]
    steps: Count
    single: Annotated[Share, Field(description="share of examples that are one sentence")] = 0.0


class Pretraining(_Table):
    """The pre-training objective, its masking, and its pairs of texts."""

    method: Annotated[
        Literal["mlm", "rtd"], Field(description="masked tokens, or replaced-token detection")
    ] = "mlm"
    unit: Annotated[Unit, Field(strict=False)] = Unit.TOKEN
    rate: Annotated[float, Field(gt=0, lt=1, description="share of tokens to predict")] = 0.15
    # Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining", section 3: from
    # 0.30 to 0.15.
    final_rate: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="rate at the last step, approached linearly; none: constant rate",
        ),
    ] = None
    # Our own: see bench/results/from-minilm-cpu.md.
    repeats_from: Annotated[
        int,
        Field(
            ge=0,
            description="in sequences of fewer tokens, words that occur more than once "
            "are not predicted, except common words; 0: they are",
        ),
    ] = 0
    # Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training", equation 4.
    unlikelihood: Annotated[
        float,
        Field(
            ge=0,
            description="weight of the loss of predicting again a word of a sequence "
            "shorter than repeats_from",
        ),
    ] = 0.0
    # Chowdhery et al. 2022, "PaLM", section 5: 1e-4 * log(Z)^2 keeps the softmax
    # normaliser Z near 1.
    z_loss: Annotated[
        float, Field(ge=0, lt=1, description="weight of log(Z)^2, Z the softmax normaliser")
    ] = 0.0
    # Li & Hoiem 2018; Reimers & Gurevych 2020: see `cloze.export.train.embeddings`.
    keep_embeddings: Annotated[
        bool,
        Field(
            description="with --from, and in distillation: "
            "keep the sentence embeddings of the checkpoint"
        ),
    ] = False
    embedding_weight: Annotated[
        float, Field(gt=0, description="weight of the cosine distance between both embeddings")
    ] = 20.0
    embedding_tokens: Annotated[
        Count, Field(description="maximum tokens per batch for the comparison of embeddings")
    ] = 1024
    dynamic: Annotated[bool, Field(description="new masks in each epoch")] = True
    span_boundary: Annotated[
        bool,
        Field(
            description="also predict spans from their boundaries (SpanBERT); needs unit = 'span'"
        ),
    ] = False
    sentence: Annotated[SentenceObjective, Field(strict=False)] = SentenceObjective.NSP
    sentence_weight: Annotated[
        float,
        Field(
            gt=0, description="weight of the sentence objective's loss; masked tokens have weight 1"
        ),
    ] = 1.0
    same_source: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="nsp: share of the second texts of other documents "
            "that come from the source of the first text",
        ),
    ] = 0.0
    short: Annotated[Share, Field(description="share of sequences cut to a random length")] = 0.1
    shifted: Annotated[
        Share,
        Field(
            description="share of sequences that start at a random position, "
            "so that short sequences train all position embeddings"
        ),
    ] = 0.0
    generator: Annotated[
        float,
        Field(
            gt=0, le=1, description="rtd: width of the generator, as a share of the model's width"
        ),
    ] = 0.25
    generator_weight: Annotated[
        float, Field(gt=0, description="rtd: weight of the detection of replaced tokens")
    ] = 50.0

    @model_validator(mode="after")
    def _fits_together(self) -> "Pretraining":
        if self.span_boundary and (self.unit is not Unit.SPAN or self.method != "mlm"):
            raise ValueError("span_boundary = true needs unit = 'span' and method = 'mlm'")
        if self.repeats_from and self.unit is Unit.SPAN:
            raise ValueError("repeats_from needs unit = 'token' or 'whole-word'")
        if self.unlikelihood and not (self.repeats_from and self.method == "mlm"):
            raise ValueError("unlikelihood needs repeats_from and method = 'mlm'")
        if self.method == "rtd" and self.sentence is not SentenceObjective.NONE:
            raise ValueError("method = 'rtd' has no sentence objective; it needs sentence = 'none'")
        if self.method == "rtd" and (self.keep_embeddings or self.z_loss):
            raise ValueError("keep_embeddings and z_loss need method = 'mlm'")
        return self


class CorpusSampling(_Table):
    """How often each part of the text is sampled."""

    weights: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=1)]],
        Field(
            description="share of the sampled sequences by source or by file name; "
            "all other text is sampled in proportion to its size"
        ),
    ] = {}


class PretrainRecipe(Recipe):
    """``cloze train pretrain``."""

    corpus: CorpusSampling = CorpusSampling()
    vocabulary: Vocabulary = Vocabulary()
    model: Sizes = Sizes()
    pretraining: Pretraining = Pretraining()
    optimisation: Optimisation = Optimisation()
    phases: Annotated[list[Phase], Field(min_length=1)]
    interleaved: Annotated[
        bool, Field(description="the steps of the phases alternate, in proportion to their numbers")
    ] = False
    held_out: Annotated[Share, Field(description="share of the documents that are held out")] = 0.05

    @model_validator(mode="after")
    def _lengths_fit(self) -> "PretrainRecipe":
        for phase in self.phases:
            if phase.tokens > self.model.max_tokens:
                raise ValueError(
                    f"a phase of {phase.tokens} tokens exceeds the model's max_tokens of "
                    f"{self.model.max_tokens}"
                )
        return self


class QuestionsRecipe(Recipe):
    """``cloze train finetune-qa``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    epochs: Count = 2
    sequences: Annotated[Size, Field(description="windows per batch")] = 32
    tokens: Annotated[int, Field(ge=16, description="tokens per window, question included")] = 384
    stride: Annotated[Count, Field(description="tokens that neighbouring windows share")] = 128
    question_tokens: Annotated[
        Count, Field(description="maximum tokens per question; longer questions are cut")
    ] = 64
    held_out: Annotated[Share, Field(description="share of the articles that are held out")] = 0.05
    dropout: Share = 0.1
    unanswerable: Annotated[
        bool, Field(description="SQuAD 2.0: also learn from unanswerable questions")
    ] = True


class EmbedRecipe(Recipe):
    """``cloze train finetune-embed``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    contrastive_steps: Annotated[
        int, Field(ge=0, description="steps of SimCSE on unlabelled text; need dropout")
    ] = 0
    contrastive_sequences: Size = 128
    contrastive_tokens: Annotated[Count, Field(ge=8)] = 64
    temperature: Annotated[float, Field(gt=0)] = 0.05
    text_weight: Annotated[
        float,
        Field(
            ge=0,
            description="weight of the pre-training objective, which keeps the heads; needs text",
        ),
    ] = 0.5
    text_unit: Annotated[Unit, Field(strict=False)] = Unit.WHOLE_WORD
    text_sentence_weight: Annotated[
        float, Field(gt=0, description="weight of next sentence within the pre-training objective")
    ] = 1.0
    text_sequences: Annotated[Size, Field(description="sequences of text per batch")] = 16
    epochs: Annotated[
        int, Field(ge=0, le=1_000_000, description="epochs over the scored pairs")
    ] = 4
    sequences: Size = 32
    tokens: Annotated[int, Field(ge=8)] = 128
    held_out: Share = 0.05
    dropout: Share = 0.1


_NOT_DISTILLED = frozenset(
    {
        "span_boundary",
        "z_loss",
        "sentence_weight",
        "same_source",
        "shifted",
        "generator",
        "generator_weight",
    }
)
"""Fields of `Pretraining` that distillation has no use for."""


class DistillRecipe(Recipe):
    """``cloze train distill``."""

    corpus: CorpusSampling = CorpusSampling()
    pretraining: Pretraining = Pretraining(sentence=SentenceObjective.NONE)
    optimisation: Optimisation = Optimisation(learning_rate=5e-4)
    phases: Annotated[list[Phase], Field(min_length=1)]
    interleaved: Annotated[
        bool, Field(description="the steps of the phases alternate, in proportion to their numbers")
    ] = False
    temperature: Annotated[float, Field(gt=0)] = 2.0
    soft_weight: Annotated[float, Field(ge=0)] = 5.0
    masked_weight: Annotated[float, Field(ge=0)] = 2.0
    cosine_weight: Annotated[float, Field(ge=0)] = 1.0
    held_out: Share = 0.05
    dropout: Share = 0.1

    @model_validator(mode="after")
    def _is_honoured(self) -> "DistillRecipe":
        pretraining = self.pretraining
        if pretraining.sentence is not SentenceObjective.NONE or pretraining.method != "mlm":
            raise ValueError(
                "distillation learns from single texts with masked tokens: "
                'set method = "mlm" and sentence = "none"'
            )
        if unused := sorted(pretraining.model_fields_set & _NOT_DISTILLED):
            raise ValueError(f"distillation does not use {', '.join(unused)}: leave this out")
        return self


def load_recipe(name: str, kind: type[R], *, seed: int | None = None) -> R:
    """Read a recipe.

    Args:
        seed: replaces the seed of the recipe; None: the seed of the recipe.

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
        raise TrainError(f"{file.name}: {_describe_error(error)}") from error
    return recipe if seed is None else recipe.model_copy(update={"seed": seed})


def _describe_error(error: ValidationError) -> str:
    """Describe the first error of a validation, or an unknown key if there is one.

    A misspelt key causes two errors, and the unknown key explains the missing key.
    """
    details = error.errors()
    detail = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    location = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}"
    # The messages of our own validators are complete.
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], str | int | float | list):
        return f"{location}: {message}, got {repr(detail['input'])[:80]}"
    # The input is a table: a key is missing, or the keys do not fit together.
    return f"{location}: {message}" if location else message
