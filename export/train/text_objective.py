"""Learning from text: the objective of pre-training and distillation, and its batches."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloze.export.errors import Report, TrainError
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.train.batches import BatchPlan, TextBatch, TextBatches
from cloze.export.train.corpus import Corpus, PreparedCorpus, prepare_corpus
from cloze.export.train.masking import Masking
from cloze.export.train.recipe import DistilledText, Pretraining, TextRecipe
from cloze.export.train.run_dir import CORPUS
from cloze.export.train.run_options import RunOptions
from cloze.export.train.sampling import weights_of_part
from cloze.export.train.vocabulary import mask_id

_EVALUATION_BATCHES = 8
"""Held-out batches per phase."""

_COMMON_SHARE = 0.5
"""Share of a text that its common tokens make up: "the", "of", "he" and punctuation."""

_COUNTED_TOKENS = 2_000_000
"""Tokens that suffice to find the common ones."""


class TextObjective:
    """Implements `loop.Objective` for a module that turns a `TextBatch` into a loss.

    Args:
        held_out: held-out batches per phase; empty: no evaluation.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: TextBatches,
        held_out: list[list[TextBatch]],
        device: torch.device,
    ) -> None:
        self.module = module
        self.steps = batches.steps
        self.held_out = held_out
        self._batches, self._device = batches, device

    def batch(self, step: int, part: int) -> TextBatch:
        """Return the ``part``-th batch of a step."""
        return self._batches(step, part)

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and figures of a batch."""
        return self.module(batch)  # type: ignore[no-any-return]

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return mean figures over the held-out batches of the current phase."""
        self.module.eval()
        held_out = self.held_out[self._batches.phase(step - 1)] if self.held_out else []
        with torch.inference_mode():
            results = [self.module(batch.to(self._device))[1] for batch in held_out]
        return {
            name: float(torch.stack([result[name] for result in results]).mean())
            for name in (results[0] if results else ())
        }


def run_corpus(
    files: list[Path], tokenizer: CheckpointTokenizer, held_out: float, options: RunOptions
) -> PreparedCorpus:
    """Return the text of a run, tokenized into the folder of the run; see `prepare_corpus`."""
    folder, report = options.run_dir / CORPUS, options.report
    return prepare_corpus(files, tokenizer.tokenizer, folder, held_out=held_out, report=report)


def text_batches(corpus: Corpus, recipe: TextRecipe, tokenizer: CheckpointTokenizer) -> TextBatches:
    """Return the training batches of a run."""
    plan = BatchPlan(
        recipe.pretraining,
        recipe.phases,
        recipe.seed,
        recipe.optimisation.accumulation,
        recipe.corpus.weights,
        recipe.interleaved,
    )
    masking = make_masking(tokenizer, recipe.pretraining, common=common_tokens(corpus, tokenizer))
    return TextBatches(corpus, plan, masking, tokenizer.special)


def held_out_batches(
    corpus: Corpus, recipe: TextRecipe, tokenizer: CheckpointTokenizer, report: Report
) -> list[list[TextBatch]]:
    """Return a few fixed batches per phase from held-out documents.

    The batches are masked at the final rate of the run.

    Returns:
        One list of batches per phase; empty if the held-out documents do not suffice.
    """
    common = common_tokens(corpus, tokenizer)
    masking = make_masking(tokenizer, recipe.pretraining, common=common).at(1.0)
    weights = weights_of_part(corpus, recipe.corpus.weights)
    held_out = []
    for phase in recipe.phases:
        evaluated = phase.model_copy(update={"steps": _EVALUATION_BATCHES})
        plan = BatchPlan(recipe.pretraining, [evaluated], recipe.seed, weights=weights)
        try:
            batches = TextBatches(corpus, plan, masking, tokenizer.special)
        except TrainError as error:
            report(f"no held-out figures: {error}")
            return []
        held_out.append([batches(step, 0) for step in range(_EVALUATION_BATCHES)])
    return held_out


def common_tokens(corpus: Corpus, tokenizer: CheckpointTokenizer) -> NDArray[np.bool_]:
    """Return bool [V], the most frequent tokens, which make up half of the text."""
    step = max(1, len(corpus.tokens) // _COUNTED_TOKENS)
    counts = np.bincount(corpus.tokens[::step], minlength=tokenizer.size)
    order = np.argsort(-counts, kind="stable")
    more_frequent = np.cumsum(counts[order]) - counts[order]
    common = np.zeros(len(counts), bool)
    common[order[more_frequent < _COMMON_SHARE * counts.sum()]] = True
    return common


def make_masking(
    tokenizer: CheckpointTokenizer,
    recipe: Pretraining | DistilledText,
    replace: tuple[float, float] = (0.8, 0.1),
    common: NDArray[np.bool_] | None = None,
) -> Masking:
    """Return the masking of a recipe for a vocabulary; see `Masking` for the arguments."""
    special = np.ones(tokenizer.size, bool)  # also the ids between those of the vocabulary
    names = frozenset(tokenizer.special_tokens.values())
    for token, number in tokenizer.tokenizer.get_vocab().items():
        special[number] = token in names
    return Masking(
        recipe.unit,
        recipe.rate,
        mask_id(tokenizer),
        special,
        tokenizer.continuations(),
        replace,
        recipe.final_rate,
        recipe.repeats_from,
        common,
    )
