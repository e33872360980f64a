"""Fine-tuning for embeddings: contrastive on unlabelled sentences, then on scored pairs.

Sources: Gao et al. 2021, "SimCSE", section 3 (the positive of a sentence is the same sentence with
another dropout mask; the other sentences of the batch are negatives); Su 2022, "CoSENT" (pairs are
ranked by their scores).
Shapes: P pairs of sentences of S tokens, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.evaluation.pairs import read_pairs, similarity, tokenize_pairs
from cloze.export.heads import MASKED_LM, NEXT_SENTENCE
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model, TorchScorer
from cloze.export.train.batches import (
    BatchPlan,
    PaddedBatch,
    TextBatch,
    TextBatches,
    padded,
    padded_length,
    shuffled_batches,
)
from cloze.export.train.card import Run, finish_run
from cloze.export.train.corpus import Corpus
from cloze.export.train.documents import fingerprint
from cloze.export.train.embeddings import mean_pool
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.loop import train
from cloze.export.train.low_rank import add_low_rank
from cloze.export.train.objectives import MaskedText
from cloze.export.train.recipe import EmbedRecipe, Phase, Pretraining
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import start_from
from cloze.export.train.text_objective import make_masking, run_corpus
from cloze.model_store.sequences import TEXT_TOKENS, SpecialTokens

_MIN_TOKENS = 3
"""Fewest tokens of a sentence in the contrastive steps, without special tokens."""

_RANK_SCALE = 20.0
"""Scale of the differences of cosines, as in CoSENT."""

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


def collate_sentences(
    ids: Sequence[Sequence[int]], scores: Sequence[float], text: TextBatch | None, max_tokens: int
) -> SentenceBatch:
    """Pad sentences to the `padded_length` of the longest, at most ``max_tokens``."""
    length = padded_length(max(map(len, ids)), max_tokens)
    return SentenceBatch(*padded(ids, [0] * len(ids), length), torch.tensor(scores), text)


def contrastive_loss(embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of finding the other sentence of each pair, and the accuracy.

    Args:
        embeddings: [2 P, H], in pairs.
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
        embeddings: [2 P, H], in pairs.
        scores: [P].
    """
    cosines = (embeddings[0::2] * embeddings[1::2]).sum(-1) * _RANK_SCALE
    wrong = (cosines[:, None] - cosines[None, :])[scores[:, None] < scores[None, :]]
    return torch.logsumexp(torch.cat([wrong.new_zeros(1), wrong]), 0)


@dataclass(frozen=True, slots=True)
class EmbeddingData:
    """The training data of `EmbeddingObjective`.

    Attributes:
        sentences: corpus of unlabelled sentences for the contrastive steps; None: no such steps.
        pairs: scored pairs; may be empty.
        text: masked text for the pre-training objective; None: no such objective.
    """

    sentences: Corpus | None
    pairs: list[TokenizedPair]
    text: TextBatches | None
    special: SpecialTokens


def _long_enough(corpus: Corpus | None) -> NDArray[np.int64]:
    """Return the numbers of the sentences that contrastive steps learn from.

    Raises:
        TrainError: there is none.
    """
    lengths = np.diff(corpus.sentences) if corpus is not None else np.zeros(0, np.int64)
    long_enough = np.flatnonzero(lengths >= _MIN_TOKENS)
    if not len(long_enough):
        raise TrainError(
            f"contrastive_steps learn from sentences of at least {_MIN_TOKENS} tokens, but the "
            f"longest of the text has {lengths.max(initial=0)}; give other text, or set them to 0"
        )
    return long_enough


def _steps(recipe: EmbedRecipe, pairs: int) -> int:
    """Return the steps of a run that learns from so many scored pairs."""
    batches = recipe.epochs * -(-pairs // recipe.sequences)
    return recipe.contrastive_steps + -(-batches // recipe.optimisation.accumulation)


class EmbeddingObjective:
    """Implements `loop.Objective`: the contrastive steps, then the scored pairs.

    With masked text, the pre-training objective is added to each step, so that fill-mask and next
    sentence keep working on the same encoder.

    Raises:
        TrainError: the contrastive steps have no sentence to learn from.
    """

    def __init__(
        self,
        module: MaskedText,
        recipe: EmbedRecipe,
        data: EmbeddingData,
        held_out_figures: Callable[[], Mapping[str, float]],
    ) -> None:
        self.module = module
        self._recipe, self._data, self._held_out_figures = recipe, data, held_out_figures
        self._accumulation = recipe.optimisation.accumulation
        self.steps = _steps(recipe, len(data.pairs))
        self._long_enough = _long_enough(data.sentences) if recipe.contrastive_steps else None
        self._pair_batches = None
        if data.pairs:
            lengths = [len(first) + len(second) for first, second, _ in data.pairs]
            self._pair_batches = shuffled_batches(lengths, recipe.sequences, recipe.seed)

    def batch(self, step: int, part: int) -> SentenceBatch:
        """Return the ``part``-th batch of a step."""
        recipe, data = self._recipe, self._data
        number = step * self._accumulation + part
        text = data.text(step, part) if data.text else None
        if step < recipe.contrastive_steps:
            sentences = self._draw_sentences(np.random.default_rng([recipe.seed, number]))
            rows = [ids for ids in sentences for _ in range(2)]
            return collate_sentences(rows, [], text, recipe.contrastive_tokens)
        assert self._pair_batches is not None
        first_number = recipe.contrastive_steps * self._accumulation
        pairs = [data.pairs[index] for index in self._pair_batches(number - first_number)]
        rows = [ids for first, second, _ in pairs for ids in (first, second)]
        return collate_sentences(rows, [score for *_, score in pairs], text, recipe.tokens)

    def _draw_sentences(self, rng: np.random.Generator) -> list[list[int]]:
        """Draw sentences that are long enough; return their ids with special tokens."""
        corpus, special = self._data.sentences, self._data.special
        assert corpus is not None
        assert self._long_enough is not None
        count = self._recipe.contrastive_sequences
        drawn = self._long_enough[rng.integers(len(self._long_enough), size=count)]
        max_tokens = self._recipe.contrastive_tokens - TEXT_TOKENS
        sentences = []
        for index in drawn:
            start, end = corpus.sentences[index], corpus.sentences[index + 1]
            ids = corpus.tokens[start : min(end, start + max_tokens)].tolist()
            sentences.append(special.text(ids))
        return sentences

    def loss(self, batch: SentenceBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and figures of a batch."""
        hidden = self.module.model(batch.input_ids, None, batch.attention_mask)
        embeddings = mean_pool(hidden, batch.attention_mask)
        figures: dict[str, Tensor] = {}
        if len(batch.scores):
            loss = figures["ranking_loss"] = ranking_loss(embeddings, batch.scores)
        else:
            loss, accuracy = contrastive_loss(embeddings, self._recipe.temperature)
            figures |= {"contrastive_accuracy": accuracy, "contrastive_loss": loss}
        if batch.text is not None:
            text_loss, text_figures = self.module(batch.text)
            loss = loss + self._recipe.text_weight * text_loss
            figures["masked_accuracy"] = text_figures["accuracy"]
        return loss, figures

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return Spearman's correlation on held-out pairs."""
        return self._held_out_figures()


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The input files of fine-tuning for embeddings.

    Attributes:
        text: unlabelled text for the contrastive steps and the checkpoint's heads; may be empty.
    """

    pairs: list[Path] = field(default_factory=list)
    held_out_pairs: list[Path] = field(default_factory=list)
    text: list[Path] = field(default_factory=list)


def finetune_embedding(
    source: str, files: EmbeddingFiles, recipe: EmbedRecipe, options: RunOptions
) -> Path:
    """Fine-tune a checkpoint's mean-pooled embeddings.

    Returns:
        The folder of the new checkpoint, a sentence-transformer.

    Raises:
        TrainError: there is nothing to learn from, the recipe does not suit the inputs, or the
            run fails, see `train`.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of pairs": fingerprint(files.pairs),
        "text": fingerprint(files.text),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    heads = [
        head for head in (MASKED_LM, NEXT_SENTENCE) if getattr(checkpoint.model, head) is not None
    ]
    model = start_from(checkpoint, heads, dropout=recipe.dropout, seed=recipe.seed)
    if recipe.lora:
        add_low_rank(model, recipe.lora, [])
    _check_recipe(recipe, checkpoint, files)
    objective = _make_objective(model, checkpoint.tokenizer, files, recipe, options)
    train(objective, options, seed=recipe.seed, optimisation=recipe.rates)
    title, data = "An encoder fine-tuned for embeddings", [*files.pairs, *files.text]
    run = Run(title, source, [checkpoint], data, recipe, options)
    return finish_run(model, checkpoint.tokenizer, run, EmbeddingRecipe(max_tokens=recipe.tokens))


def _check_recipe(recipe: EmbedRecipe, checkpoint: Checkpoint, files: EmbeddingFiles) -> None:
    longest = max(recipe.tokens, recipe.contrastive_tokens if recipe.contrastive_steps else 0)
    max_positions = checkpoint.model.config.max_positions
    if longest > max_positions:
        raise TrainError(
            f"sentences of {longest} tokens exceed the checkpoint's {max_positions} positions"
        )
    if recipe.contrastive_steps and not recipe.dropout:
        raise TrainError(
            "contrastive_steps compare two dropout masks of one sentence, "
            "so dropout = 0 leaves nothing to learn: raise dropout, or set contrastive_steps to 0"
        )
    if recipe.contrastive_steps and not files.text:
        raise TrainError(
            "the recipe has contrastive_steps, which need text (--corpus); or set them to 0"
        )


def _make_objective(
    model: Model,
    tokenizer: CheckpointTokenizer,
    files: EmbeddingFiles,
    recipe: EmbedRecipe,
    options: RunOptions,
) -> EmbeddingObjective:
    """Read and tokenize the pairs and the text."""
    pairs = []
    if files.pairs and recipe.epochs:
        pairs = tokenize_pairs(read_pairs(files.pairs), tokenizer.tokenizer, recipe.tokens)
    if not pairs and not recipe.contrastive_steps:
        raise TrainError(
            "there is nothing to learn from: give scored pairs (--pairs), "
            "or contrastive_steps and text (--corpus)"
        )
    sentences, text = None, None
    if files.text:
        sentences = run_corpus(files.text, tokenizer, recipe.held_out, options).train
        if recipe.text_weight and model.masked_lm is not None:
            steps = _steps(recipe, len(pairs))
            text = _text_batches(sentences, model, tokenizer, recipe, steps)
    held_out_pairs = read_pairs(files.held_out_pairs) if files.held_out_pairs else []
    scorer = TorchScorer(model, options.device)

    def held_out_figures() -> dict[str, float]:
        if not held_out_pairs:
            return {}
        return {"spearman": similarity(held_out_pairs, tokenizer.tokenizer, scorer, recipe.tokens)}

    objective = EmbeddingObjective(
        MaskedText(model, Pretraining(sentence_weight=recipe.text_sentence_weight)),
        recipe,
        EmbeddingData(sentences, pairs, text, tokenizer.special),
        held_out_figures,
    )
    options.report(
        f"{recipe.contrastive_steps:,} contrastive steps; {len(pairs):,} scored pairs; "
        f"{objective.steps:,} steps in all"
    )
    return objective


def _text_batches(
    corpus: Corpus, model: Model, tokenizer: CheckpointTokenizer, recipe: EmbedRecipe, steps: int
) -> TextBatches:
    """Return batches of masked text that keep the checkpoint's heads accurate."""
    sentence = SentenceObjective.NSP if model.next_sentence else SentenceObjective.NONE
    pretraining = Pretraining(unit=recipe.text_unit, sentence=sentence)
    phase = Phase(tokens=recipe.tokens, sequences=recipe.text_sequences, steps=steps)
    plan = BatchPlan(pretraining, [phase], recipe.seed, recipe.optimisation.accumulation)
    masking = make_masking(tokenizer, pretraining)
    return TextBatches(corpus, plan, masking, tokenizer.special)
