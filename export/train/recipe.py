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
Size = Annotated[
    int, Field(gt=0, le=65_536, description="of what is held in memory: a slip should not fill it")
]


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


Rate = Annotated[float, Field(gt=0, lt=1)]


class Optimisation(_Part):
    """AdamW, linear warm-up and decay (Devlin et al. 2019, appendix A.2), unless the fields say otherwise."""

    # Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025 for the size of its updates.
    optimizer: Annotated[
        Literal["adamw", "muon"],
        Field(description="muon: on the matrices of the encoder's layers, with AdamW elsewhere"),
    ] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    # Jordan et al. 2024: Muon leaves embeddings to AdamW, whose best rate differs.
    embedding_learning_rate: Annotated[
        Rate | None, Field(description="of the embeddings; none: as the rest")
    ] = None
    # Howard & Ruder 2018, "ULMFiT", section 3.2: new layers learn faster than those of the checkpoint.
    head_learning_rate: Annotated[
        Rate | None, Field(description="of the heads; none: as the rest")
    ] = None
    # 0.1: Brown et al. 2020, "GPT-3", appendix B.
    weight_decay: Annotated[
        float, Field(ge=0, lt=1, description="none on biases and LayerNorm")
    ] = 0.01
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.98
    warmup: Annotated[Share, Field(description="share of the steps")] = 0.06
    # Hu et al. 2024, "MiniCPM", section 4.2; Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed
    # Training Durations": a constant rate and a late decay reach what a cosine does, and a run can be stretched or cut.
    decay: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the steps, the last, over which the rate falls to 0; none: all",
        ),
    ] = None
    # Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima"; Kaddour 2022, "Stop Wasting My Time!".
    average: Annotated[
        Share,
        Field(
            description="share of the steps, the last, whose weights are averaged into the result"
        ),
    ] = 0.0
    clip: Annotated[float, Field(gt=0, description="norm of the gradient at most")] = 1.0
    accumulation: Annotated[Count, Field(description="batches a step")] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(
            description="of matrix products; auto: bf16 where the processor has it (measured 1.9 times fp32 with avx512_bf16)"
        ),
    ] = "auto"

    @model_validator(mode="after")
    def _warmup_and_decay_fit(self) -> "Optimisation":
        if self.decay is not None and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup = {self.warmup:g} and decay = {self.decay:g} exceed the run: their sum must be at most 1"
            )
        return self


class Phase(_Part):
    """Steps at one length: short sequences first, then long ones, learn most words in a given time."""

    tokens: Annotated[int, Field(ge=8, description="a sequence, special ones included")]
    sequences: Annotated[Size, Field(description="a batch")]
    steps: Count


class Pretraining(_Part):
    """What is learnt from text."""

    method: Annotated[
        Literal["mlm", "rtd"], Field(description="masked tokens, or replaced-token detection")
    ] = "mlm"
    unit: Annotated[Unit, Field(strict=False)] = Unit.TOKEN
    rate: Annotated[float, Field(gt=0, lt=1, description="share of tokens that is predicted")] = (
        0.15
    )
    # Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining", section 3: from 0.30 down to 0.15.
    final_rate: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="the rate goes linearly to this at the last step; none: it stays",
        ),
    ] = None
    # Chowdhery et al. 2022, "PaLM", section 5: 1e-4 * log(Z)^2 keeps the softmax normaliser Z near 1.
    z_loss: Annotated[
        float, Field(ge=0, lt=1, description="weight of the squared log of the softmax normaliser")
    ] = 0.0
    # Li & Hoiem 2018; Reimers & Gurevych 2020: see `export.train.embeddings`.
    keep_embeddings: Annotated[
        bool,
        Field(
            description="with --from: distil the sentence embeddings of the checkpoint into the result"
        ),
    ] = False
    embedding_weight: Annotated[
        float, Field(gt=0, description="of the cosine distance between both embeddings")
    ] = 20.0
    embedding_tokens: Annotated[
        Count, Field(description="tokens per batch that both embeddings are computed on, at most")
    ] = 1024
    dynamic: Annotated[bool, Field(description="mask anew at each epoch")] = True
    span_boundary: Annotated[
        bool,
        Field(
            description="predict spans from their boundaries too (SpanBERT); needs unit = 'span'"
        ),
    ] = False
    sentence: Annotated[Sentence, Field(strict=False)] = Sentence.NSP
    sentence_weight: Annotated[
        float,
        Field(gt=0, description="of the sentence objective's loss, beside the masked tokens'"),
    ] = 1.0
    short: Annotated[Share, Field(description="share of sequences cut to a random length")] = 0.1
    shifted: Annotated[
        Share,
        Field(
            description="share of sequences that begin at a random position, so that short ones teach all positions"
        ),
    ] = 0.0
    generator: Annotated[
        float,
        Field(gt=0, le=1, description="rtd: the generator's width, as a share of the model's"),
    ] = 0.25
    generator_weight: Annotated[
        float, Field(gt=0, description="rtd: the weight of finding replaced tokens")
    ] = 50.0

    @model_validator(mode="after")
    def _fits_together(self) -> "Pretraining":
        if self.span_boundary and (self.unit is not Unit.SPAN or self.method != "mlm"):
            raise ValueError("span_boundary = true needs unit = 'span' and method = 'mlm'")
        if self.method == "rtd" and self.sentence is not Sentence.NONE:
            raise ValueError("method = 'rtd' has no sentence objective; it needs sentence = 'none'")
        if self.method == "rtd" and (self.keep_embeddings or self.z_loss):
            raise ValueError("keep_embeddings and z_loss need method = 'mlm'")
        return self


class CorpusSampling(_Part):
    """How often each part of the text is read."""

    weights: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=1)]],
        Field(
            description="share of the sampled sequences, by source or by file name; other text shares the rest by size"
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
    held_out: Annotated[
        Share, Field(description="share of the documents that is never learnt from")
    ] = 0.05

    @model_validator(mode="after")
    def _lengths_fit(self) -> "PretrainRecipe":
        for phase in self.phases:
            if phase.tokens > self.model.max_tokens:
                raise ValueError(
                    f"a phase of {phase.tokens} tokens exceeds the model's max_tokens of {self.model.max_tokens}"
                )
        return self


class QuestionsRecipe(Recipe):
    """``cloze train finetune-qa``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    epochs: Count = 2
    sequences: Annotated[Size, Field(description="a batch")] = 32
    tokens: Annotated[int, Field(ge=16, description="of a window, question included")] = 384
    stride: Annotated[Count, Field(description="tokens that neighbouring windows share")] = 128
    question_tokens: Annotated[Count, Field(description="longer questions are cut")] = 64
    held_out: Annotated[
        Share, Field(description="share of the articles that is never learnt from")
    ] = 0.05
    dropout: Share = 0.1
    unanswerable: Annotated[
        bool, Field(description="SQuAD 2.0: learn from questions without an answer")
    ] = True


class EmbedRecipe(Recipe):
    """``cloze train finetune-embed``."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    contrastive_steps: Annotated[
        int, Field(ge=0, description="SimCSE on sentences of unlabelled text; needs dropout")
    ] = 0
    contrastive_sequences: Size = 128
    contrastive_tokens: Annotated[Count, Field(ge=8)] = 64
    temperature: Annotated[float, Field(gt=0)] = 0.05
    text_weight: Annotated[
        float,
        Field(
            ge=0,
            description="of the pre-training objective that keeps the heads, where text is given",
        ),
    ] = 0.5
    text_unit: Annotated[Unit, Field(strict=False)] = Unit.WHOLE_WORD
    text_sentence_weight: Annotated[
        float, Field(gt=0, description="of next sentence, within that objective")
    ] = 1.0
    text_sequences: Annotated[Size, Field(description="of text, a batch")] = 16
    epochs: Annotated[int, Field(ge=0, le=1_000_000, description="over the scored pairs")] = 4
    sequences: Size = 32
    tokens: Annotated[int, Field(ge=8)] = 128
    held_out: Share = 0.05
    dropout: Share = 0.1


class DistillRecipe(Recipe):
    """``cloze train distill``."""

    corpus: CorpusSampling = CorpusSampling()
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
    wrong = next(
        (found for found in errors if found["type"] == "extra_forbidden"), errors[0]
    )  # it explains a missing key
    where = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "extra_forbidden":
        return f"unknown key {where}"
    message = wrong["msg"].removeprefix(
        "Value error, "
    )  # of our own validators, whose message is complete
    if isinstance(wrong["input"], str | int | float | list):
        return f"{where}: {message}, got {repr(wrong['input'])[:80]}"
    return (
        f"{where}: {message}" if where else message
    )  # a table that lacks a key or does not fit together
