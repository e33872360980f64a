"""The recipes: what a TOML file may say about a run, checked when it is read. Each field says why its default is what it is."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from export.models import EncoderConfig
from export.train.errors import TrainError
from export.train.masking import Unit
from export.train.pairs import Sentence

RECIPES = Path(__file__).parent / "recipes"
"""Those that come with the package; a bare name on the command line means one of them."""

MAX_SEED = 2**32 - 1
"""The loop multiplies it by a million, and torch takes 64 bits."""

R = TypeVar("R", bound="Recipe")
MIN_VOCABULARY, MAX_VOCABULARY = 32, 1_000_000
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(gt=0, le=1_000_000_000)]
Size = Annotated[int, Field(gt=0, le=65_536, description="of what is held in memory: a slip should not fill it")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Recipe(_Part):
    """What every recipe says."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED, description="of everything that is drawn")] = 1


class Vocabulary(_Part):
    """A WordPiece vocabulary."""

    size: Annotated[int, Field(ge=MIN_VOCABULARY, le=MAX_VOCABULARY)] = 12_000
    lowercase: bool = True
    min_frequency: Count = 2


class VocabularyRecipe(Recipe):
    """``cloze train vocab``."""

    vocabulary: Vocabulary = Vocabulary()


class Sizes(_Part):
    """The encoder. Defaults: the smallest published BERT with more than two layers (Turc et al. 2019, "mini")."""

    family: Literal["bert"] = "bert"
    hidden_size: Size = 256
    layers: Size = 4
    heads: Size = 4
    intermediate_size: Size = 1024
    max_tokens: Annotated[Size, Field(ge=8)] = 512
    activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
    dropout: Share = 0.1

    def config(self, vocab_size: int) -> EncoderConfig:
        """The modules' sizes for a vocabulary."""
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


class Optimisation(_Part):
    """AdamW, linear warm-up and decay (Devlin et al. 2019, appendix A.2)."""

    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, lt=1, description="none on biases and LayerNorm")] = 0.01
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.98
    warmup: Annotated[Share, Field(description="share of the steps")] = 0.06
    clip: Annotated[float, Field(gt=0, description="norm of the gradient at most")] = 1.0
    accumulation: Annotated[Count, Field(description="batches a step")] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(description="of matrix products; auto: bf16 where the processor has it (measured 1.9 times fp32 with avx512_bf16)"),
    ] = "auto"


class Phase(_Part):
    """Steps at one length: short sequences first, then long ones, learn most words in a given time."""

    tokens: Annotated[int, Field(ge=8, description="a sequence, special ones included")]
    sequences: Annotated[Size, Field(description="a batch")]
    steps: Count


class Pretraining(_Part):
    """What is learnt from text."""

    method: Annotated[Literal["mlm", "rtd"], Field(description="masked tokens, or replaced-token detection")] = "mlm"
    unit: Annotated[Unit, Field(strict=False)] = Unit.TOKEN
    rate: Annotated[float, Field(gt=0, lt=1, description="share of tokens that is predicted")] = 0.15
    dynamic: Annotated[bool, Field(description="mask anew at each epoch")] = True
    span_boundary: Annotated[
        bool, Field(description="predict spans from their boundaries too (SpanBERT); needs unit = 'span'")
    ] = False
    sentence: Annotated[Sentence, Field(strict=False)] = Sentence.NSP
    sentence_weight: Annotated[float, Field(gt=0, description="of the sentence objective's loss, beside the masked tokens'")] = (
        1.0
    )
    short: Annotated[Share, Field(description="share of sequences cut to a random length")] = 0.1
    shifted: Annotated[
        Share,
        Field(description="share of sequences that begin at a random position, so that short ones teach all positions"),
    ] = 0.0
    generator: Annotated[float, Field(gt=0, le=1, description="rtd: the generator's width, as a share of the model's")] = 0.25
    generator_weight: Annotated[float, Field(gt=0, description="rtd: the weight of finding replaced tokens")] = 50.0

    @model_validator(mode="after")
    def _fits_together(self) -> "Pretraining":
        if self.span_boundary and (self.unit is not Unit.SPAN or self.method != "mlm"):
            raise ValueError("span_boundary = true needs unit = 'span' and method = 'mlm'")
        if self.method == "rtd" and self.sentence is not Sentence.NONE:
            raise ValueError("method = 'rtd' has no sentence objective; it needs sentence = 'none'")
        return self


class PretrainRecipe(Recipe):
    """``cloze train pretrain``."""

    vocabulary: Vocabulary = Vocabulary()
    model: Sizes = Sizes()
    pretraining: Pretraining = Pretraining()
    optimisation: Optimisation = Optimisation()
    phases: Annotated[list[Phase], Field(min_length=1)]
    held_out: Annotated[Share, Field(description="share of the documents that is never learnt from")] = 0.05

    @model_validator(mode="after")
    def _lengths_fit(self) -> "PretrainRecipe":
        for phase in self.phases:
            if phase.tokens > self.model.max_tokens:
                raise ValueError(f"a phase of {phase.tokens} tokens exceeds the model's max_tokens of {self.model.max_tokens}")
        return self


class QuestionsRecipe(Recipe):
    """``cloze train finetune-qa``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    epochs: Count = 2
    sequences: Annotated[Size, Field(description="a batch")] = 32
    tokens: Annotated[int, Field(ge=16, description="of a window, question included")] = 384
    stride: Annotated[Count, Field(description="tokens that neighbouring windows share")] = 128
    question_tokens: Annotated[Count, Field(description="longer questions are cut")] = 64
    held_out: Annotated[Share, Field(description="share of the articles that is never learnt from")] = 0.05
    dropout: Share = 0.1
    unanswerable: Annotated[bool, Field(description="SQuAD 2.0: learn from questions without an answer")] = True


class EmbedRecipe(Recipe):
    """``cloze train finetune-embed``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    contrastive_steps: Annotated[int, Field(ge=0, description="SimCSE on sentences of unlabelled text; needs dropout")] = 0
    contrastive_sequences: Size = 128
    contrastive_tokens: Annotated[Count, Field(ge=8)] = 64
    temperature: Annotated[float, Field(gt=0)] = 0.05
    text_weight: Annotated[
        float, Field(ge=0, description="of the pre-training objective that keeps the heads, where text is given")
    ] = 0.5
    text_unit: Annotated[Unit, Field(strict=False)] = Unit.WHOLE_WORD
    text_sentence_weight: Annotated[float, Field(gt=0, description="of next sentence, within that objective")] = 1.0
    text_sequences: Annotated[Size, Field(description="of text, a batch")] = 16
    epochs: Annotated[int, Field(ge=0, le=1_000_000, description="over the scored pairs")] = 4
    sequences: Size = 32
    tokens: Annotated[int, Field(ge=8)] = 128
    held_out: Share = 0.05
    dropout: Share = 0.1


class DistillRecipe(Recipe):
    """``cloze train distill``."""

    pretraining: Pretraining = Pretraining(sentence=Sentence.NONE)
    optimisation: Optimisation = Optimisation(learning_rate=5e-4)
    phases: Annotated[list[Phase], Field(min_length=1)]
    temperature: Annotated[float, Field(gt=0)] = 2.0
    soft_weight: Annotated[float, Field(ge=0)] = 5.0
    masked_weight: Annotated[float, Field(ge=0)] = 2.0
    cosine_weight: Annotated[float, Field(ge=0)] = 1.0
    held_out: Share = 0.05
    dropout: Share = 0.1


def load_recipe(name: str, kind: type[R], *, seed: int | None = None) -> R:
    """Read a recipe: a file, or the bare name of one that comes with the package.

    Raises:
        TrainError: there is none, it is not TOML, or it says something that the kind does not know.
    """
    file = Path(name)
    if not file.suffix and not file.exists():
        file = RECIPES / f"{name}.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        recipe = kind.model_validate(data)
    except FileNotFoundError:
        there = ", ".join(sorted(entry.stem for entry in RECIPES.glob("*.toml")))
        raise TrainError(f"there is no recipe {name}; a file, or one of: {there}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise TrainError(f"{file} is not TOML: {error}") from error
    except ValidationError as error:
        raise TrainError(f"{file.name}: {_first(error)}") from error
    return recipe if seed is None else recipe.model_copy(update={"seed": seed})


def _first(error: ValidationError) -> str:
    errors = error.errors()
    wrong = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])  # it explains a missing key
    where = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "extra_forbidden":
        return f"unknown key {where}"
    message = wrong["msg"].removeprefix("Value error, ")  # of our own validators, whose message is complete
    if isinstance(wrong["input"], str | int | float | list):
        return f"{where}: {message}, got {repr(wrong['input'])[:80]}"
    return f"{where}: {message}" if where else message  # a table that lacks a key or does not fit together
