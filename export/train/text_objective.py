"""Learning from text: the objective of pre-training and distillation, and its batches."""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import PartialState
from tokenizers import Tokenizer
from torch import Tensor, nn

from cloze.export.errors import Report, TrainError
from cloze.export.measure.corpus import Corpus, PreparedCorpus, prepare_corpus
from cloze.export.train.batches import TextBatch, TextBatches
from cloze.export.train.folder import Folder
from cloze.export.train.recipe import TextRecipe
from cloze.export.train.run_dir import CORPUS
from cloze.export.train.run_options import RunOptions

_EVALUATION_BATCHES = 8
"""Held-out batches per phase."""


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
        self.module, self.steps, self.batch = module, batches.steps, batches
        self.held_out, self._device = held_out, device

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and figures of a batch."""
        return self.module(batch)  # type: ignore[no-any-return]

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return mean figures over the held-out batches of the current phase."""
        self.module.eval()
        held_out = self.held_out[self.batch.phase(step - 1)] if self.held_out else []
        with torch.inference_mode():
            results = [self.module(batch.to(self._device))[1] for batch in held_out]
        return {
            name: float(torch.stack([result[name] for result in results]).mean())
            for name in (results[0] if results else ())
        }


def text_objective(
    module: nn.Module, files: list[Path], recipe: TextRecipe, source: Folder, options: RunOptions
) -> TextObjective:
    """Return the objective of a run on the text of ``files``.

    Args:
        source: the folder with the tokenizer.
    """
    corpus = run_corpus(files, source.text, recipe.held_out, options)
    batches = TextBatches(corpus.train, recipe, source)
    held_out = held_out_batches(corpus.held_out, recipe, source, options.report)
    return TextObjective(module, batches, held_out, options.device)


def run_corpus(
    files: list[Path], text: Tokenizer, held_out: float, options: RunOptions
) -> PreparedCorpus:
    """Return the text of a run, tokenized into the folder of the run; see `prepare_corpus`."""
    folder, report = options.run_dir / CORPUS, options.report
    with PartialState().main_process_first():
        return prepare_corpus(files, text, folder, held_out=held_out, report=report)


def held_out_batches(
    corpus: Corpus, recipe: TextRecipe, source: Folder, report: Report
) -> list[list[TextBatch]]:
    """Return a few fixed batches per phase from held-out documents.

    The batches are masked at the final rate of the run.

    Returns:
        One list of batches per phase; empty if the held-out documents do not suffice.
    """
    rate = recipe.pretraining.final_rate or recipe.pretraining.rate
    pretraining = recipe.pretraining.model_copy(update={"rate": rate, "final_rate": None})
    count = _EVALUATION_BATCHES
    phases = [phase.model_copy(update={"steps": count}) for phase in recipe.phases]
    plan = TextRecipe(pretraining=pretraining, phases=phases, seed=recipe.seed)
    try:
        batches = TextBatches(corpus, plan, source)
    except TrainError as error:
        report(f"no held-out figures: {error}")
        return []
    return [
        [batches(phase * count + step, 0) for step in range(count)] for phase in range(len(phases))
    ]
