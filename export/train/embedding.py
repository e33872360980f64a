"""Fine-tuning for embeddings: contrastive on unlabelled sentences, then on scored pairs.

What is trained is a model of sentence-transformers, so the pooling and the layers after it are
those of the source.

Sources: Gao et al. 2021, "SimCSE", section 3 (the positive of a sentence is the same sentence with
another dropout mask; the other sentences of the batch are negatives); Su 2022, "CoSENT" (pairs are
ranked by their scores).
Shapes: P pairs of sentences of S tokens, D dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    AutoModel,
    PreTrainedModel,
)

from cloze.export.errors import TrainError
from cloze.export.measure.corpus import Corpus
from cloze.export.measure.documents import fingerprint
from cloze.export.measure.examples import SentenceObjective
from cloze.export.measure.labels import EncodedRow
from cloze.export.measure.metrics import spearman
from cloze.export.measure.pairs import read_pairs, tokenize_pairs
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.batches import (
    PaddedBatch,
    TextBatch,
    TextBatches,
    padded,
    padded_length,
    shuffled_batches,
)
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import (
    MODULES,
    Folder,
    max_tokens,
    text_tokenizer,
)
from cloze.export.train.kept_embeddings import open_sentences
from cloze.export.train.loop import Stopping, batches_per_step, train
from cloze.export.train.objectives import MaskedText
from cloze.export.train.recipe import EmbedRecipe, Phase, Pretraining, TextRecipe
from cloze.export.train.rows import model_inputs, outputs_of
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.text_objective import run_corpus
from cloze.model_store.sequences import TEXT_TOKENS, SpecialTokens

_MIN_TOKENS = 3
"""Fewest tokens of a sentence in the contrastive steps, without special tokens."""

_RANK_SCALE = 20.0
"""Scale of the differences of cosines, as in CoSENT."""

_WITH_HEADS: Final = (MODEL_FOR_PRETRAINING_MAPPING, MODEL_FOR_MASKED_LM_MAPPING)
"""Classes with a head for masked tokens, the first ones also with one for pairs of sentences."""

TokenizedPair = tuple[list[int], list[int], float]
"""Token ids of both sentences, and the score of the pair."""


@dataclass(frozen=True, slots=True)
class SentenceBatch(PaddedBatch):
    """Sentences in pairs: of the 2 P rows, ``2 i`` and ``2 i + 1`` form a pair.

    Attributes:
        scores: float32 [P]; empty in contrastive steps.
        text: masked text for the pre-training objective; None: no such objective.
    """

    scores: Tensor
    text: TextBatch | None

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.attention_mask.sum()) + (self.text.tokens if self.text else 0)


def contrastive_loss(embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of finding the other sentence of each pair, and the accuracy.

    Args:
        embeddings: [2 P, D] of length 1, in pairs.
    """
    # The temperature would magnify the rounding errors of bf16.
    with torch.autocast(embeddings.device.type, enabled=False):
        similarities = embeddings[0::2] @ embeddings[1::2].T / temperature
    labels = torch.arange(len(similarities), device=similarities.device)
    accuracy = (similarities.argmax(1) == labels).float().mean()
    return F.cross_entropy(similarities, labels), accuracy


def ranking_loss(embeddings: Tensor, scores: Tensor) -> Tensor:
    """Return log(1 + sum of exp(scaled cosine difference)) over all wrongly ordered pairs.

    Args:
        embeddings: [2 P, D] of length 1, in pairs.
        scores: [P].
    """
    cosines = (embeddings[0::2] * embeddings[1::2]).sum(-1) * _RANK_SCALE
    wrong = (cosines[:, None] - cosines[None, :])[scores[:, None] < scores[None, :]]
    return torch.logsumexp(torch.cat([wrong.new_zeros(1), wrong]), 0)


class SentenceDraws:
    """Draws sentences of a corpus for the contrastive steps.

    Raises:
        TrainError: no sentence is long enough.
    """

    def __init__(self, corpus: Corpus, special: SpecialTokens, recipe: EmbedRecipe) -> None:
        self._corpus, self._special, self._recipe = corpus, special, recipe
        lengths = np.diff(corpus.sentences)
        self._long_enough = np.flatnonzero(lengths >= _MIN_TOKENS)
        if not len(self._long_enough):
            raise TrainError(
                f"contrastive_steps learn from sentences of at least {_MIN_TOKENS} tokens, but the "
                f"longest of the text has {lengths.max()}; give other text, or set them to 0"
            )

    def __call__(self, number: int) -> list[list[int]]:
        """Return the sentences of a batch by its number, as ids with special tokens."""
        recipe, corpus = self._recipe, self._corpus
        rng = np.random.default_rng([recipe.seed, number])
        draws = rng.integers(len(self._long_enough), size=recipe.contrastive_sequences)
        sentences = []
        for index in self._long_enough[draws]:
            start, end = corpus.sentences[index], corpus.sentences[index + 1]
            end = min(end, start + recipe.contrastive_tokens - TEXT_TOKENS)
            sentences.append(self._special.text(corpus.tokens[start:end].tolist()))
        return sentences


def _steps(recipe: EmbedRecipe, pairs: int) -> int:
    """Return the steps of a run that learns from so many scored pairs."""
    batches = recipe.epochs * -(-pairs // recipe.sequences)
    return recipe.contrastive_steps + -(-batches // batches_per_step(recipe.optimisation))


class EmbeddingObjective:
    """Implements `loop.Objective`: the contrastive steps, then the scored pairs.

    Args:
        draws: sentences of the contrastive steps; None: no such steps.
        kept: the pre-training objective of a model with the same encoder, and its text. It is added
            to each step, so that fill-mask and next sentence keep working. None: no such heads.
    """

    def __init__(
        self,
        sentences: SentenceTransformer,
        recipe: EmbedRecipe,
        pairs: Sequence[TokenizedPair],
        *,
        held_out: Sequence[TokenizedPair],
        draws: SentenceDraws | None,
        kept: tuple[MaskedText, TextBatches] | None,
    ) -> None:
        self.module = nn.ModuleList([sentences, *(kept[:1] if kept else [])])
        self.steps = _steps(recipe, len(pairs))
        self._sentences, self._recipe, self._pairs = sentences, recipe, pairs
        self._held_out, self._draws, self._kept = held_out, draws, kept
        encoder: Any = sentences[0].model
        self._encoder, self._max_tokens = encoder, max_tokens(encoder)
        self._batches_per_step = batches_per_step(recipe.optimisation)
        lengths = [len(first) + len(second) for first, second, _ in pairs]
        self._pair_batches = shuffled_batches(lengths, recipe.sequences, recipe.seed)

    def batch(self, step: int, part: int) -> SentenceBatch:
        """Return the ``part``-th batch of a step."""
        recipe = self._recipe
        number = step * self._batches_per_step + part
        scores: list[float] = []
        if self._draws and step < recipe.contrastive_steps:
            rows = [ids for ids in self._draws(number) for _ in range(2)]
        else:
            number -= recipe.contrastive_steps * self._batches_per_step
            pairs = [self._pairs[index] for index in self._pair_batches(number)]
            rows, scores = _sides(pairs), [score for *_, score in pairs]
        length = padded_length(max(map(len, rows)), self._max_tokens)
        text = self._kept[1](step, part) if self._kept else None
        return SentenceBatch(*padded(rows, [0] * len(rows), length), torch.tensor(scores), text)

    def embed(self, batch: PaddedBatch) -> Tensor:
        """Return the embeddings of a batch, float32 [2 P, D] of length 1."""
        inputs = model_inputs(batch, self._encoder.config)
        return F.normalize(self._sentences(inputs)["sentence_embedding"].float(), dim=-1)

    def loss(self, batch: SentenceBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and figures of a batch."""
        embeddings = self.embed(batch)
        figures: dict[str, Tensor] = {}
        if len(batch.scores):
            loss = figures["ranking_loss"] = ranking_loss(embeddings, batch.scores)
        else:
            loss, accuracy = contrastive_loss(embeddings, self._recipe.temperature)
            figures |= {"contrastive_accuracy": accuracy, "contrastive_loss": loss}
        if self._kept is not None:
            text_loss, text_figures = self._kept[0](batch.text)
            loss = loss + self._recipe.text_weight * text_loss
            figures["masked_accuracy"] = text_figures["accuracy"]
        return loss, figures

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return Spearman's correlation of cosine and score on held-out pairs."""
        if not self._held_out:
            return {}
        sides, size = _sides(self._held_out), self._recipe.sequences
        rows = [EncodedRow(np.array(ids), *np.zeros((2, len(ids)), np.int64)) for ids in sides]
        embeddings = np.stack(
            outputs_of(self._sentences, rows, self.embed, size=size, max_tokens=self._max_tokens)
        )
        cosines = (embeddings[0::2] * embeddings[1::2]).sum(1)
        return {"spearman": spearman(cosines, [score for *_, score in self._held_out])}


def _sides(pairs: Sequence[TokenizedPair]) -> list[list[int]]:
    """Return the sentences of pairs, those of a pair one after the other."""
    return [ids for first, second, _ in pairs for ids in (first, second)]


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The input files of fine-tuning for embeddings.

    Attributes:
        text: unlabelled text for the contrastive steps and the source's heads; may be empty.
    """

    pairs: list[Path] = field(default_factory=list)
    held_out_pairs: list[Path] = field(default_factory=list)
    text: list[Path] = field(default_factory=list)


def finetune_embedding(
    source: Folder, files: EmbeddingFiles, recipe: EmbedRecipe, options: RunOptions
) -> Path:
    """Fine-tune the embeddings of a folder, whatever its pooling.

    Returns:
        The folder of the new model, which sentence-transformers reads. It has the source's heads
        for masked tokens and pairs of sentences, or it is an adapter.

    Raises:
        TrainError: there is nothing to learn from, the recipe does not suit the inputs, or the
            run fails, see `train`.
    """
    _check_recipe(recipe, files)
    paths = (files.pairs if recipe.epochs else [], files.held_out_pairs)
    pairs, held_out = (read_pairs(each) if each else [] for each in paths)
    inputs = {
        "checkpoint": source.weights_sha256,
        "file of pairs": fingerprint(files.pairs),
        "text": fingerprint(files.text),
    }
    sentences = open_sentences(source)
    network: Any = _network(source, recipe)
    longest = max(recipe.tokens, recipe.contrastive_tokens if recipe.contrastive_steps else 0)
    if longest > (limit := max_tokens(network)):
        raise TrainError(f"sentences of {longest} tokens exceed the checkpoint's {limit} positions")
    acquire_run_dir(options.run_dir, recipe, inputs)
    tokenizer = text_tokenizer(sentences.tokenizer)
    learnt, measured = (
        tokenize_pairs(each, tokenizer, recipe.tokens) for each in (pairs, held_out)
    )
    draws, kept = None, None
    if files.text:
        corpus = run_corpus(files.text, tokenizer, recipe.held_out, options).train
        draws = SentenceDraws(corpus, source.special, recipe) if recipe.contrastive_steps else None
        if recipe.text_weight and network.get_output_embeddings() is not None:
            kept = _kept_heads(network, source, corpus, recipe, _steps(recipe, len(pairs)))
    encoder = network.base_model
    if recipe.lora:
        network.requires_grad_(False)
        encoder = add_low_rank(encoder, recipe.lora, source)
    sentences[0].model = encoder
    if not (source.card / MODULES).is_file():  # an export of such a folder normalises, too
        sentences.append(Normalize())
        sentences.max_seq_length = recipe.tokens
    objective = EmbeddingObjective(
        sentences, recipe, learnt, held_out=measured, draws=draws, kept=kept
    )
    options.report(
        f"{recipe.contrastive_steps:,} contrastive steps; {len(pairs):,} scored pairs; "
        f"{objective.steps:,} steps in all"
    )
    stopping = Stopping("spearman", recipe.patience) if recipe.patience else None
    train(objective, options, seed=recipe.seed, optimisation=recipe.rates, stopping=stopping)
    if not recipe.lora:
        sentences[0].model = network  # saved with its heads
    title, read = "An encoder fine-tuned for embeddings", [*files.pairs, *files.text]
    run = Run(title, source.location, [source], read, recipe, options)
    return write_run(sentences, sentences.tokenizer, run, create_model_card=False)


def _check_recipe(recipe: EmbedRecipe, files: EmbeddingFiles) -> None:
    if recipe.contrastive_steps and not recipe.dropout:
        raise TrainError(
            "contrastive_steps compare two dropout masks of one sentence, "
            "so dropout = 0 leaves nothing to learn: raise dropout, or set contrastive_steps to 0"
        )
    if recipe.contrastive_steps and not files.text:
        raise TrainError(
            "the recipe has contrastive_steps, which need text (--corpus); or set them to 0"
        )
    if not recipe.contrastive_steps and not (files.pairs and recipe.epochs):
        raise TrainError(
            "there is nothing to learn from: give scored pairs (--pairs), "
            "or contrastive_steps and text (--corpus)"
        )


def _network(source: Folder, recipe: EmbedRecipe) -> PreTrainedModel:
    """Return the model with those heads of masked tokens and of pairs that the folder has."""
    given: dict[str, Any] = {"seed": recipe.seed, "dropout": recipe.dropout}
    for mapping in _WITH_HEADS:
        kind = mapping.get(type(source.config), None)
        network: Any = source.whole_model(kind, **given) if kind else None
        if network is not None and network.get_output_embeddings() is not None:
            return network  # type: ignore[no-any-return]
    return source.model(AutoModel, **given)


def _kept_heads(
    network: Any, source: Folder, corpus: Corpus, recipe: EmbedRecipe, steps: int
) -> tuple[MaskedText, TextBatches]:
    """Return the objective that keeps the heads of a model accurate, and its text."""
    has_pairs = type(network).__name__.endswith("ForPreTraining")
    pretraining = Pretraining(
        unit=recipe.text_unit,
        sentence=SentenceObjective.NSP if has_pairs else SentenceObjective.NONE,
        sentence_weight=recipe.text_sentence_weight,
    )
    phase = Phase(tokens=recipe.tokens, sequences=recipe.text_sequences, steps=steps)
    plan = TextRecipe(
        pretraining=pretraining, phases=[phase], seed=recipe.seed, optimisation=recipe.optimisation
    )
    return MaskedText(network, pretraining), TextBatches(corpus, plan, source)
