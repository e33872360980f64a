"""The recipes: the fields of a run's TOML file, which `recipe_files` reads."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cloze.export.train.examples import SentenceObjective
from cloze.export.train.masking import Unit

MAX_SEED = 2**32 - 1
"""numpy and torch accept it."""

MIN_VOCABULARY, MAX_VOCABULARY = 32, 1_000_000
Share = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
OptionalWeight = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0, le=1_000_000_000)]
Size = Annotated[int, Field(gt=0, le=65_536)]
"""A size, bounded so that a typing error cannot fill the memory."""


class Table(BaseModel):
    """A table of a TOML file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Recipe(Table):
    """The fields of every recipe."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 1
    """Seed of all random draws."""


class Vocabulary(Table):
    """A WordPiece vocabulary."""

    size: Annotated[int, Field(ge=MIN_VOCABULARY, le=MAX_VOCABULARY)] = 12_000
    lowercase: bool = True
    min_frequency: Count = 2


class Sizes(Table):
    """The sizes of the encoder.

    The defaults are the smallest published BERT with more than two layers (Turc et al. 2019,
    "mini").
    """

    family: Literal["bert"] = "bert"
    hidden_size: Size = 256
    layers: Size = 4
    heads: Size = 4
    intermediate_size: Size = 1024
    max_tokens: Annotated[Size, Field(ge=8)] = 512
    activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
    dropout: Share = 0.1

    @model_validator(mode="after")
    def _heads_divide(self) -> "Sizes":
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
    """Rate of the heads; none: ``learning_rate``.

    Howard & Ruder 2018, "ULMFiT", section 3.2: new layers need a higher rate than the layers of the
    checkpoint.
    """

    weight_decay: Share = 0.01
    """Biases and LayerNorm are not decayed. 0.1: Brown et al. 2020, "GPT-3", appendix B."""

    beta2: Rate = 0.98
    warmup: Share = 0.06
    """Share of the steps at the start."""

    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the steps at the end in which the rate falls to 0; none: all.

    Hu et al. 2024, "MiniCPM", section 4.2; Hägele et al. 2024, "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations": a constant rate with a late decay is as good as a
    cosine, and the length of a run can be changed.
    """

    average: Share = 0.0
    """Share of the steps at the end whose weights are averaged.

    Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization";
    Kaddour 2022, "Stop Wasting My Time!".
    """

    clip: Weight = 1.0
    """Maximum norm of the gradient."""

    accumulation: Count = 1
    """Batches per step."""

    precision: Literal["fp32", "bf16", "auto"] = "auto"
    """Precision of matrix products.

    ``auto``: bf16 if the processor has instructions for it (measured: 1.9 times the speed of fp32
    with avx512_bf16).
    """

    @model_validator(mode="after")
    def _warmup_and_decay_fit(self) -> "Optimisation":
        if self.decay is not None and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup = {self.warmup:g} and decay = {self.decay:g} exceed the run: "
                "their sum must be at most 1"
            )
        return self


class Phase(Table):
    """Steps with sequences of one length.

    Short sequences first and long sequences later learn the most words in a given time.
    """

    tokens: Annotated[int, Field(ge=8)]
    """Tokens per sequence, special tokens included."""

    sequences: Size
    """Sequences per batch."""

    steps: Count
    single: Share = 0.0
    """Share of examples that are one sentence."""


class MaskedTokens(Table):
    """Masking, and what is learnt at masked tokens."""

    unit: Annotated[Unit, Field(strict=False)] = Unit.TOKEN
    rate: Rate = 0.15
    """Share of tokens to predict."""

    final_rate: Rate | None = None
    """Rate at the last step, approached linearly; none: constant rate.

    Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining", section 3: from 0.30
    to 0.15.
    """

    keep_embeddings: bool = False
    """With --from, and in distillation: keep the sentence embeddings of the checkpoint.

    Li & Hoiem 2018; Reimers & Gurevych 2020: see `cloze.export.train.kept_embeddings`.
    """

    embedding_weight: Weight = 20.0
    """Weight of the cosine distance between both embeddings."""

    embedding_tokens: Count = 1024
    """Maximum tokens per batch for the comparison of embeddings."""

    dynamic: bool = True
    """New masks in each epoch."""

    short: Share = 0.1
    """Share of sequences cut to a random length."""


class Pretraining(MaskedTokens):
    """The pre-training objective, its masking, and its pairs of texts."""

    method: Literal["mlm", "rtd"] = "mlm"
    """Masked tokens, or replaced-token detection."""

    span_boundary: bool = False
    """Also predict spans from their boundaries (SpanBERT); needs ``unit = "span"``."""

    sentence: Annotated[SentenceObjective, Field(strict=False)] = SentenceObjective.NSP
    sentence_weight: Weight = 1.0
    """Weight of the sentence objective's loss; masked tokens have weight 1."""

    generator: Annotated[float, Field(gt=0, le=1)] = 0.25
    """rtd: width of the generator, as a share of the model's width."""

    generator_weight: Weight = 50.0
    """rtd: weight of the detection of replaced tokens."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Pretraining":
        if self.span_boundary and (self.unit is not Unit.SPAN or self.method != "mlm"):
            raise ValueError("span_boundary = true needs unit = 'span' and method = 'mlm'")
        if self.method == "rtd" and self.sentence is not SentenceObjective.NONE:
            raise ValueError("method = 'rtd' has no sentence objective; it needs sentence = 'none'")
        if self.method == "rtd" and self.keep_embeddings:
            raise ValueError("keep_embeddings needs method = 'mlm'")
        return self


class DistilledText(MaskedTokens):
    """Distillation's use of text: single texts with masked tokens."""

    method: Literal["mlm", "rtd"] = "mlm"
    sentence: Annotated[SentenceObjective, Field(strict=False)] = SentenceObjective.NONE

    @model_validator(mode="after")
    def _is_honoured(self) -> "DistilledText":
        if self.sentence is not SentenceObjective.NONE or self.method != "mlm":
            raise ValueError(
                "distillation learns from single texts with masked tokens: "
                'set method = "mlm" and sentence = "none"'
            )
        return self


class TextRecipe(Recipe):
    """The part of a recipe that describes learning from text."""

    pretraining: Pretraining | DistilledText
    optimisation: Optimisation = Optimisation()
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
    """Rate of the low-rank matrices. The heads have that of ``[optimisation]``.

    Schulman et al. 2025, "LoRA Without Regret": ten times the best rate of all weights.
    """


class AdaptedRecipe(Recipe):
    """The fields of a run that may learn low-rank matrices instead of all weights."""

    optimisation: Optimisation = Optimisation(learning_rate=1e-4)
    dropout: Share = 0.1
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
        """The optimisation with the learning rate of the weights that are learnt."""
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

    tokens: Annotated[int, Field(ge=16)] = 384
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

    contrastive_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of SimCSE on unlabelled text; need dropout."""

    contrastive_sequences: Size = 128
    contrastive_tokens: Annotated[Count, Field(ge=8)] = 64
    temperature: Weight = 0.05
    epochs: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    """Epochs over the scored pairs."""

    sequences: Size = 32
    tokens: Annotated[int, Field(ge=8)] = 128
    held_out: Share = 0.05
