"""Fine-tuning for embeddings: contrastive on unlabelled sentences, then on scored pairs.

What is trained is a model of sentence-transformers, so the pooling and the layers after it are
those of the source.

Sources: Gao et al. 2021, "SimCSE", section 3 (the positive of a sentence is the same sentence with
another dropout mask; the other sentences of the batch are negatives); Su 2022, "CoSENT" (pairs are
ranked by their scores).
Shapes: P pairs of sentences of S tokens, D dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    MultipleNegativesRankingLoss,
)
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
from cloze.export.measure.labelled import EncodedRow
from cloze.export.measure.metrics import spearman
from cloze.export.measure.pairs import read_pairs, tokenize_pairs
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.batches import (
    PaddedBatch,
    TextBatch,
    TextBatches,
    padded,
    padded_length,
    run_corpus,
    shuffled_batches,
)
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import MODULES, Folder, max_tokens
from cloze.export.train.kept_embeddings import open_sentences
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.objectives import MaskedText
from cloze.export.train.recipe import EmbedRecipe, Phase, Pretraining, TextRecipe
from cloze.export.train.rows import model_inputs, outputs_of
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.model_store.sequences import TEXT_TOKENS, SpecialTokens

_MIN_TOKENS = 3
"""Fewest tokens of a sentence in the contrastive steps, without special tokens."""

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


@dataclass(frozen=True, slots=True)
class EmbeddingData:
    """What a run learns from, and what it is measured on.

    Attributes:
        draws: sentences of the contrastive steps; None: no such steps.
        kept: the pre-training objective of a model with the same encoder, and its text. It is added
            to each step, so that fill-mask and next sentence keep working. None: no such heads.
    """

    pairs: list[TokenizedPair]
    held_out: list[TokenizedPair]
    draws: SentenceDraws | None = None
    kept: tuple[MaskedText, TextBatches] | None = None


class EmbeddingObjective:
    """Implements `loop.Objective`: the contrastive steps, then the scored pairs."""

    def __init__(
        self, sentences: SentenceTransformer, recipe: EmbedRecipe, data: EmbeddingData, steps: int
    ) -> None:
        self.module = nn.ModuleList([sentences, *(data.kept[:1] if data.kept else [])])
        self.steps = steps
        self._sentences, self._recipe, self._data = sentences, recipe, data
        self._contrast = MultipleNegativesRankingLoss(sentences, scale=1 / recipe.temperature)
        self._rank = CoSENTLoss(sentences)
        encoder: Any = sentences[0].model
        self._encoder, self._max_tokens = encoder, max_tokens(encoder)
        self._batches_per_step = batches_per_step(recipe.optimisation)
        lengths = [len(first) + len(second) for first, second, _ in data.pairs]
        self._pair_batches = shuffled_batches(lengths, recipe.sequences, recipe.seed)

    def batch(self, step: int, part: int) -> SentenceBatch:
        """Return the ``part``-th batch of a step."""
        recipe, data = self._recipe, self._data
        number = step * self._batches_per_step + part
        scores: list[float] = []
        if data.draws and step < recipe.contrastive_steps:
            rows = [ids for ids in data.draws(number) for _ in range(2)]
        else:
            number -= recipe.contrastive_steps * self._batches_per_step
            pairs = [data.pairs[index] for index in self._pair_batches(number)]
            rows, scores = _sides(pairs), [score for *_, score in pairs]
        length = padded_length(max(map(len, rows)), self._max_tokens)
        text = data.kept[1](step, part) if data.kept else None
        return SentenceBatch(*padded(rows, [0] * len(rows), length), torch.tensor(scores), text)

    def embed(self, batch: PaddedBatch) -> Tensor:
        """Return the embeddings of a batch, float32 [2 P, D] of length 1."""
        inputs = model_inputs(batch, self._encoder.config)
        return F.normalize(self._sentences(inputs)["sentence_embedding"].float(), dim=-1)

    def loss(self, batch: SentenceBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and figures of a batch."""
        embeddings = self.embed(batch)
        sides, figures = [embeddings[0::2], embeddings[1::2]], {}
        # The temperature would magnify the rounding errors of bf16.
        with torch.autocast(embeddings.device.type, enabled=False):
            if len(batch.scores):
                loss = self._rank.compute_loss_from_embeddings(sides, batch.scores)
                figures["ranking_loss"] = loss
            else:
                loss = self._contrast.compute_loss_from_embeddings(sides, batch.scores)
                figures["contrastive_loss"] = loss
        if self._data.kept is not None:
            text_loss, text_figures = self._data.kept[0](batch.text)
            loss = loss + self._recipe.text_weight * text_loss
            figures["masked_accuracy"] = text_figures["accuracy"]
        return loss, figures

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return Spearman's correlation of cosine and score on held-out pairs."""
        held_out = self._data.held_out
        if not held_out:
            return {}
        sides = _sides(held_out)
        rows = [EncodedRow(np.array(ids), *np.zeros((2, len(ids)), np.int64)) for ids in sides]
        size, max_tokens = self._recipe.sequences, self._max_tokens
        embeddings = np.stack(
            outputs_of(self._sentences, rows, self.embed, size=size, max_tokens=max_tokens)
        )
        cosines = (embeddings[0::2] * embeddings[1::2]).sum(1)
        return {"spearman": spearman(cosines, [score for *_, score in held_out])}


def _sides(pairs: Sequence[TokenizedPair]) -> list[list[int]]:
    """Return the sentences of pairs, those of a pair one after the other."""
    return [ids for first, second, _ in pairs for ids in (first, second)]


def finetune_embedding(
    source: Folder,
    recipe: EmbedRecipe,
    options: RunOptions,
    *,
    pairs: Sequence[Path],
    held_out_pairs: Sequence[Path],
    text: Sequence[Path],
) -> Path:
    """Fine-tune the embeddings of a folder, whatever its pooling.

    Args:
        pairs: files of scored pairs.
        held_out_pairs: files of scored pairs to measure on.
        text: files of unlabelled text, for the contrastive steps and the source's heads.

    Returns:
        The folder of the new model, which sentence-transformers reads. It has the source's heads
        for masked tokens and pairs of sentences, or it is an adapter.

    Raises:
        TrainError: there is nothing to learn from, the recipe does not suit the inputs, or the
            run fails, see `train`.
    """
    _check_recipe(recipe, has_pairs=bool(pairs), has_text=bool(text))
    paths = (pairs if recipe.epochs else [], held_out_pairs)
    learnt, measured = (read_pairs(list(each)) if each else [] for each in paths)
    network: Any = _network(source, recipe)
    sentences = _sentences(source, network, recipe)
    longest = max(recipe.tokens, recipe.contrastive_tokens if recipe.contrastive_steps else 0)
    if longest > (limit := max_tokens(network)):
        raise TrainError(f"sentences of {longest} tokens exceed the checkpoint's {limit} positions")
    inputs = {
        "checkpoint": source.weights_sha256,
        "file of pairs": fingerprint(pairs),
        "file of held-out pairs": fingerprint(held_out_pairs) if held_out_pairs else None,
        "text": fingerprint(text),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    batches = recipe.epochs * -(-len(learnt) // recipe.sequences)
    steps = recipe.contrastive_steps + -(-batches // batches_per_step(recipe.optimisation))
    options.report(
        f"{recipe.contrastive_steps:,} contrastive steps; {len(learnt):,} scored pairs; "
        f"{steps:,} steps in all"
    )
    data = EmbeddingData(
        tokenize_pairs(learnt, source.text, recipe.tokens),
        tokenize_pairs(measured, source.text, recipe.tokens),
    )
    if text:
        corpus = run_corpus(list(text), source.text, recipe.held_out, options).train
        data = _with_text(data, network, source, corpus, recipe, steps)
    objective = EmbeddingObjective(sentences, recipe, data, steps)
    step = train(objective, options, recipe, "spearman")
    if not recipe.lora:
        sentences[0].model = network  # saved with its heads
    title = "An encoder fine-tuned for embeddings"
    run = Run(title, source, [*pairs, *text], recipe, options, step)
    return write_run(sentences, sentences.tokenizer, run)


def _check_recipe(recipe: EmbedRecipe, *, has_pairs: bool, has_text: bool) -> None:
    if recipe.contrastive_steps and not recipe.dropout:
        raise TrainError(
            "contrastive_steps compare two dropout masks of one sentence, "
            "so dropout = 0 leaves nothing to learn: raise dropout, or set contrastive_steps to 0"
        )
    if recipe.contrastive_steps and not has_text:
        raise TrainError(
            "the recipe has contrastive_steps, which need text (--corpus); or set them to 0"
        )
    if not recipe.contrastive_steps and not (has_pairs and recipe.epochs):
        raise TrainError(
            "there is nothing to learn from: give scored pairs (--pairs), "
            "or contrastive_steps and text (--corpus)"
        )


def _network(source: Folder, recipe: EmbedRecipe) -> PreTrainedModel:
    """Return the model with those heads of masked tokens and of pairs that the folder has."""
    given: dict[str, Any] = {"seed": recipe.seed, "dropout": recipe.dropout}
    for mapping in _WITH_HEADS:
        kind = mapping.get(type(source.config), None)
        network: Any
        network, new = source.load(kind or AutoModel, **given)
        if not new and network.get_output_embeddings() is not None:
            return network  # type: ignore[no-any-return]
    return source.load(AutoModel, **given)[0]


def _sentences(source: Folder, network: Any, recipe: EmbedRecipe) -> SentenceTransformer:
    """Return the folder's model of sentence-transformers with the encoder of ``network``."""
    sentences, encoder = open_sentences(source), network.base_model
    if recipe.lora:
        network.requires_grad_(False)
        encoder = add_low_rank(encoder, recipe.lora, source)
    sentences[0].model = encoder
    if not (source.card / MODULES).is_file():  # an export of such a folder normalises, too
        sentences.append(Normalize())
        sentences.max_seq_length = recipe.tokens
    return sentences


def _with_text(
    data: EmbeddingData,
    network: Any,
    source: Folder,
    corpus: Corpus,
    recipe: EmbedRecipe,
    steps: int,
) -> EmbeddingData:
    """Add what is learnt from text: the contrastive steps, and what keeps the heads accurate."""
    if recipe.contrastive_steps:
        data = replace(data, draws=SentenceDraws(corpus, source.special, recipe))
    if not recipe.text_weight or network.get_output_embeddings() is None:
        return data
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
    batches = TextBatches(corpus, plan, source)
    return replace(data, kept=(MaskedText(network, pretraining), batches))
