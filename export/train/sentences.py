"""Fine-tuning for embeddings: first, if wanted, contrastive on unlabelled sentences; then pairs with scores.

Sources: Gao et al. 2021, "SimCSE", section 3 (a sentence is its own positive, seen through another dropout; the others of the
batch are negatives); Su 2022, "CoSENT" (pairs need only be ranked by their scores). With text at hand, the pre-training
objective goes along, so that fill-mask and next-sentence keep working on the same encoder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from export.checkpoint import load_checkpoint
from export.evaluation.pairs import read_pairs, similarity, tokenize_pairs
from export.evaluation.scorer import TorchScorer
from export.heads import MASKED_LM, NEXT_SENTENCE
from export.sentence import EmbeddingRecipe
from export.train.batches import TextBatch, TextBatches, padded_length, shuffled_batches
from export.train.card import write_card
from export.train.corpus import Corpus, fingerprint, prepare_corpus
from export.train.embeddings import mean_pool
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.objectives import MaskedText
from export.train.pairs import Sentence
from export.train.pretrain import CHECKPOINT, make_masking
from export.train.recipe import EmbedRecipe, Phase, Pretraining
from export.train.run_folder import claim
from export.train.save import save_checkpoint
from export.train.start import start_from
from export.train.vocabulary import SpecialIds, special_ids

_ALWAYS = 1_000_000_000
"""Steps of text to keep the heads with: as many as the run has."""

_RANK_SCALE = 20.0
"""CoSENT's: differences of cosines times this."""


@dataclass(frozen=True, slots=True)
class SentenceBatch:
    """Sentences in pairs: rows ``2 i`` and ``2 i + 1`` belong together.

    Attributes:
        input_ids: int64 [2 P, S].
        attention_mask: bool [2 P, S].
        scores: float32 [P]; empty for the contrastive part.
        text: what the pre-training objective learns from meanwhile, if it does.
    """

    input_ids: Tensor
    attention_mask: Tensor
    scores: Tensor
    text: TextBatch | None

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.attention_mask.sum()) + (self.text.tokens if self.text else 0)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        text = self.text and self.text.to(device)
        return type(self)(
            self.input_ids.to(device), self.attention_mask.to(device), self.scores.to(device), text
        )


def collate_sentences(
    ids: Sequence[Sequence[int]], scores: Sequence[float], text: TextBatch | None, most: int
) -> SentenceBatch:
    """Pad with zeros to a little more than the longest, ``most`` tokens at most."""
    shape = (len(ids), padded_length(max(map(len, ids)), most))
    input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, tokens in enumerate(ids):
        input_ids[row, : len(tokens)] = torch.as_tensor(tokens)
        mask[row, : len(tokens)] = True
    return SentenceBatch(input_ids, mask, torch.tensor(scores), text)


def contrastive_loss(embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``embeddings`` [2 P, H], rows in pairs -> cross-entropy of finding the other of the pair, and its accuracy."""
    with torch.autocast(
        embeddings.device.type, enabled=False
    ):  # the temperature would magnify bf16's rounding
        similarity = embeddings[0::2] @ embeddings[1::2].T / temperature
    labels = torch.arange(len(similarity), device=similarity.device)
    return F.cross_entropy(similarity, labels), (similarity.argmax(1) == labels).float().mean()


def ranking_loss(embeddings: Tensor, scores: Tensor) -> Tensor:
    """``embeddings`` [2 P, H], ``scores`` [P]: log(1 + sum of exp of every wrongly ordered difference)."""
    cosines = (embeddings[0::2] * embeddings[1::2]).sum(-1) * _RANK_SCALE
    wrong = (cosines[:, None] - cosines[None, :])[scores[:, None] < scores[None, :]]
    return torch.logsumexp(torch.cat([wrong.new_zeros(1), wrong]), 0)


class SentenceObjective:
    """The contrastive steps, then the scored pairs."""

    def __init__(
        self,
        module: MaskedText,
        recipe: EmbedRecipe,
        *,
        sentences: Corpus | None,
        pairs: list[tuple[list[int], list[int], float]],
        text: TextBatches | None,
        special: SpecialIds,
        evaluate: Callable[[], Mapping[str, float]],
    ) -> None:
        self.module = module
        self._recipe, self._sentences, self._pairs, self._text, self._evaluate = (
            recipe,
            sentences,
            pairs,
            text,
            evaluate,
        )
        self._special = special
        per_epoch = -(-len(pairs) // recipe.sequences)
        self.steps = recipe.contrastive_steps + -(
            -recipe.epochs * per_epoch // recipe.optimisation.accumulation
        )
        self._batches = (
            shuffled_batches([len(a) + len(b) for a, b, _ in pairs], recipe.sequences, recipe.seed)
            if pairs
            else None
        )

    def batch(self, step: int, part: int) -> SentenceBatch:
        """See `loop.Objective`."""
        number = step * self._recipe.optimisation.accumulation + part
        text = self._text(step, part) if self._text else None
        if step < self._recipe.contrastive_steps:
            sentences = self._draw(np.random.default_rng([self._recipe.seed, number]))
            return collate_sentences(
                [ids for ids in sentences for _ in range(2)],
                [],
                text,
                self._recipe.contrastive_tokens,
            )
        assert self._batches is not None
        chosen = [
            self._pairs[index]
            for index in self._batches(
                number - self._recipe.contrastive_steps * self._recipe.optimisation.accumulation
            )
        ]
        return collate_sentences(
            [ids for a, b, _ in chosen for ids in (a, b)],
            [score for *_, score in chosen],
            text,
            self._recipe.tokens,
        )

    def _draw(self, rng: np.random.Generator) -> list[list[int]]:
        """Random sentences of more than two tokens, each with its special tokens."""
        assert self._sentences is not None
        starts = self._sentences.sentences
        long_enough = np.flatnonzero(np.diff(starts) > 2)
        chosen = long_enough[
            rng.integers(len(long_enough), size=self._recipe.contrastive_sequences)
        ]
        room = self._recipe.contrastive_tokens - 2
        return [
            [
                self._special.cls,
                *self._sentences.tokens[starts[i] : min(starts[i + 1], starts[i] + room)].tolist(),
                self._special.sep,
            ]
            for i in chosen
        ]

    def loss(self, batch: SentenceBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `loop.Objective`."""
        hidden = self.module.model(batch.input_ids, None, batch.attention_mask)
        embeddings = mean_pool(hidden, batch.attention_mask)
        figures: dict[str, Tensor] = {}
        if len(batch.scores):
            loss = figures["ranking_loss"] = ranking_loss(embeddings, batch.scores)
        else:
            loss, figures["contrastive_accuracy"] = contrastive_loss(
                embeddings, self._recipe.temperature
            )
            figures["contrastive_loss"] = loss
        if batch.text is not None:
            text_loss, text_figures = self.module(batch.text)
            loss = loss + self._recipe.text_weight * text_loss
            figures |= {"masked_accuracy": text_figures["accuracy"]}
        return loss, figures

    def evaluate(self, _: int) -> Mapping[str, float]:
        """See `loop.Objective`."""
        return self._evaluate()


def finetune_sentences(
    source: str,
    recipe: EmbedRecipe,
    folder: Path,
    *,
    pairs: list[Path],
    held_out_pairs: list[Path],
    text: list[Path],
    device: torch.device,
    schedule: Schedule,
    say: Callable[[str], None],
) -> Path:
    """Tune a checkpoint's mean-pooled embeddings; returns the folder of the new one, a sentence-transformer.

    Args:
        source: the checkpoint; the heads it has are kept.
        recipe: the run.
        folder: of the run.
        pairs: scored pairs to learn from; may be empty.
        held_out_pairs: scored pairs to measure on.
        text: unlabelled text, for the contrastive part and to keep the heads; may be empty.
        device: where to compute.
        schedule: how often to log, evaluate and save.
        say: is told what happens, a line each.

    Raises:
        TrainError: there is nothing to learn from, or see the parts.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of pairs": fingerprint(pairs),
        "text": fingerprint(text),
    }
    claim(folder, recipe, inputs)
    heads = [
        head for head in (MASKED_LM, NEXT_SENTENCE) if getattr(checkpoint.model, head) is not None
    ]
    start = start_from(checkpoint, heads, dropout=recipe.dropout, seed=recipe.seed)
    longest = max(recipe.tokens, recipe.contrastive_tokens if recipe.contrastive_steps else 0)
    if longest > (positions := checkpoint.model.config.max_positions):
        raise TrainError(
            f"sentences of {longest} tokens exceed the checkpoint's {positions} positions"
        )
    if recipe.contrastive_steps and not recipe.dropout:
        raise TrainError(
            "contrastive_steps tell two dropouts of a sentence from other sentences: with dropout = 0 there is nothing to learn"
        )
    if recipe.contrastive_steps and not text:
        raise TrainError(
            "the recipe has contrastive_steps, which need text (--corpus); or set them to 0"
        )
    scored = (
        tokenize_pairs(read_pairs(pairs), start.tokenizer, recipe.tokens)
        if pairs and recipe.epochs
        else []
    )
    if not scored and not recipe.contrastive_steps:
        raise TrainError(
            "there is nothing to learn from: give scored pairs (--pairs), or contrastive_steps and text (--corpus)"
        )
    corpus = (
        prepare_corpus(
            text, start.tokenizer, folder / "corpus", held_out=recipe.held_out, say=say
        ).train
        if text
        else None
    )
    unseen = read_pairs(held_out_pairs) if held_out_pairs else []
    scorer = TorchScorer(start.model, device)

    objective = SentenceObjective(
        MaskedText(start.model, Pretraining(sentence_weight=recipe.text_sentence_weight)),
        recipe,
        sentences=corpus,
        pairs=scored,
        text=_text_batches(corpus, heads, recipe, start.tokenizer)
        if corpus and heads and recipe.text_weight
        else None,
        special=special_ids(start.tokenizer),
        evaluate=lambda: (
            {"spearman": similarity(unseen, start.tokenizer, scorer, recipe.tokens)}
            if unseen
            else {}
        ),
    )
    say(
        f"{recipe.contrastive_steps:,} contrastive steps; {len(scored):,} scored pairs; {objective.steps:,} steps in all"
    )
    train(
        objective,
        recipe.seed,
        recipe.optimisation,
        folder,
        device=device,
        schedule=schedule,
        say=say,
    )
    save_checkpoint(
        start.model,
        start.tokenizer,
        folder / CHECKPOINT,
        embedding=EmbeddingRecipe(max_tokens=recipe.tokens),
    )
    title = "An encoder fine-tuned for embeddings"
    write_card(
        folder / CHECKPOINT,
        title=title,
        source=source,
        files=[*pairs, *text],
        recipe=recipe,
        device=device,
    )
    return folder / CHECKPOINT


def _text_batches(
    corpus: Corpus, heads: list[str], recipe: EmbedRecipe, tokenizer: Tokenizer
) -> TextBatches:
    sentence = Sentence.NSP if NEXT_SENTENCE in heads else Sentence.NONE
    pretraining = Pretraining(unit=recipe.text_unit, sentence=sentence)
    phase = Phase(tokens=recipe.tokens, sequences=recipe.text_sequences, steps=_ALWAYS)
    return TextBatches(
        corpus,
        pretraining,
        [phase],
        make_masking(tokenizer, pretraining),
        special=special_ids(tokenizer),
        seed=recipe.seed,
        accumulation=recipe.optimisation.accumulation,
    )


def _truncated(ids: list[int], tokens: int) -> list[int]:
    return ids if len(ids) <= tokens else [*ids[: tokens - 1], ids[-1]]
