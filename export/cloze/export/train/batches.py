"""Learning from text: examples as masked, padded batches, and the objective on them."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from cloze.export.errors import Report, TrainError
from cloze.export.measure.corpus import Corpus, PreparedCorpus, prepare_corpus
from cloze.export.measure.examples import EpochExamples, ExampleOptions, TrainingExample
from cloze.export.measure.masking import Ids, make_masking
from cloze.export.train.folder import Folder
from cloze.export.train.loop import batches_per_step
from cloze.export.train.recipe import TextRecipe
from cloze.export.train.run_dir import CORPUS
from cloze.export.train.run_options import RunOptions

_POOL_BATCHES = 16
"""Number of batches whose examples are sorted by length together."""

_LENGTH_STEP = 16

_MAX_EPOCHS = 1_000_000
"""Upper bound on the epochs of a phase, so that two phases never share an epoch number."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences that are padded with zeros to one length.

    Attributes:
        input_ids: int64 [B, S].
        token_type_ids: int64 [B, S].
        attention_mask: bool [B, S], True for real tokens.
    """

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> Self:
        """Return a copy of the batch on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if value is not None}
        return replace(self, **moved)


def padded(
    ids: Sequence[ArrayLike], types: Sequence[ArrayLike], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of a `PaddedBatch` of sequences, each at most ``length`` tokens long."""
    input_ids = np.zeros((len(ids), length), np.int64)
    token_types, mask = np.zeros_like(input_ids), np.zeros(input_ids.shape, bool)
    for row, (tokens, kinds) in enumerate(zip(ids, types, strict=True)):
        real = slice(np.size(tokens))
        input_ids[row, real], token_types[row, real], mask[row, real] = tokens, kinds, True
    return torch.from_numpy(input_ids), torch.from_numpy(token_types), torch.from_numpy(mask)


@dataclass(frozen=True, slots=True)
class TextBatch(PaddedBatch):
    """A batch of masked sequences. Positions count over the flattened [B * S].

    Attributes:
        first_tokens: int64 [B], number of tokens of the first text with its special tokens.
        positions: int64 [M], ascending positions of the chosen tokens.
        labels: int64 [M], original tokens at these positions.
        next_labels: int64 [B], `UNPAIRED` for a single sentence; empty without a sentence
            objective.
    """

    first_tokens: Tensor
    positions: Tensor
    labels: Tensor
    next_labels: Tensor


_Row = tuple[TrainingExample, Ids, Ids]
"""An example, its tokens after masking [S], and the positions of the chosen ones [M]."""


def collate(rows: list[_Row], length: int) -> TextBatch:
    """Join rows to a batch of ``length`` tokens."""
    examples, masked_ids, positions = zip(*rows, strict=True)
    next_labels = [example.label for example in examples if example.label is not None]
    flat = [chosen + row * length for row, chosen in enumerate(positions)]
    labels = [one.input_ids[chosen] for one, chosen in zip(examples, positions, strict=True)]
    return TextBatch(
        *padded(masked_ids, [each.token_type_ids for each in examples], length),
        first_tokens=torch.tensor([example.first_tokens for example in examples]),
        positions=torch.from_numpy(np.concatenate(flat)),
        labels=torch.from_numpy(np.concatenate(labels)),
        next_labels=torch.tensor(next_labels, dtype=torch.int64),
    )


def shuffled_batches(lengths: Sequence[int], size: int, seed: int) -> Callable[[int], list[int]]:
    """Group examples of similar length into batches in random order, epoch by epoch.

    Similar lengths keep the share of padding small.

    Args:
        size: examples per batch. The last batch of an epoch is filled up with other examples of
            the epoch.
        seed: seed of the order.

    Returns:
        A function from the number of a batch to the indices of its examples.
    """
    count = -(-len(lengths) // size)

    @lru_cache(maxsize=2)
    def epoch_batches(epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, epoch])
        order = np.resize(rng.permutation(len(lengths)), count * size)
        pools = np.array_split(order, max(1, count // _POOL_BATCHES))
        ordered = np.concatenate(
            [pool[np.argsort(np.asarray(lengths)[pool], kind="stable")] for pool in pools]
        )
        batches: NDArray[np.int64] = ordered.reshape(count, size)[rng.permutation(count)]
        return batches

    return lambda number: epoch_batches(number // count)[number % count].tolist()


def padded_length(longest: int, limit: int) -> int:
    """Return the padded length of a batch: a multiple of 16 tokens, at most ``limit``.

    The runtime builds and keeps kernels per length, so few distinct lengths are faster.
    """
    return min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, limit)


class TextBatches:
    """The batches of a run over a corpus, with the tokenizer of the folder ``source``.

    Each batch is a function of its step and part.

    Raises:
        TrainError: the corpus is too small for the recipe, or has nothing to mask.
    """

    def __init__(self, corpus: Corpus, recipe: TextRecipe, source: Folder) -> None:
        self._corpus, self._recipe, self._special = corpus, recipe, source.special
        unit = recipe.pretraining.unit
        self._masking = make_masking(source.text, source.special.mask, unit)
        self._phase_ends = list(accumulate(phase.steps for phase in recipe.phases))
        self.steps = self._phase_ends[-1]
        # A batch may hold examples of two epochs.
        self._examples = lru_cache(maxsize=2 * len(recipe.phases))(self._make_examples)
        self.epoch_lengths = [len(self._examples(phase, 0)) for phase in range(len(recipe.phases))]
        """Examples of an epoch of each phase. Epochs differ a little: some lack a few examples of
        their random order, and some repeat a few.
        """
        self._row(0, 0, recipe.pretraining.rate)  # raises if there is nothing to mask

    def phase(self, step: int) -> int:
        """Return the index of the phase of a step."""
        return bisect_right(self._phase_ends, step)

    def __call__(self, step: int, part: int) -> TextBatch:
        """Return the ``part``-th batch of a step."""
        index, masked = self.phase(step), self._recipe.pretraining
        phase = self._recipe.phases[index]
        step_of_phase = step - (self._phase_ends[index] - phase.steps)
        batches = batches_per_step(self._recipe.optimisation)
        number = (step_of_phase * batches + part) * phase.sequences
        change = (masked.final_rate or masked.rate) - masked.rate
        rate = masked.rate + change * step / max(1, self.steps - 1)
        rows = [self._row(index, number + row, rate) for row in range(phase.sequences)]
        return collate(rows, phase.tokens)

    def _row(self, phase: int, number: int, rate: float) -> _Row:
        """Return the first example from ``number`` on that has a token to mask.

        An example of unknown words only has no such token and gives no loss.
        """
        length = self.epoch_lengths[phase]
        for candidate in range(number, number + 2 * length):
            examples = self._examples(phase, candidate // length)
            place = candidate % length % len(examples)
            rng = examples.rng(place)
            example = examples.make(place, rng)
            masked_ids, positions = self._masking(example.input_ids, rate, rng)
            if len(positions):
                return example, masked_ids, positions
        raise TrainError("the vocabulary has no word of the text: there is nothing to mask")

    def _make_examples(self, phase: int, epoch: int) -> EpochExamples:
        recipe = self._recipe
        options = ExampleOptions(
            length=recipe.phases[phase].tokens,
            sentence=recipe.pretraining.sentence,
            special=self._special,
            seed=recipe.seed,
            epoch=phase * _MAX_EPOCHS + (epoch if recipe.pretraining.dynamic else 0),
            short=recipe.pretraining.short,
            single=recipe.phases[phase].single,
        )
        return EpochExamples(self._corpus, options)


# ---- the objective of pre-training and distillation ----------------------------------------------

_EVALUATION_BATCHES = 8
"""Held-out batches per phase."""


class TextObjective:
    """Implements `loop.Objective` for a module that turns a `TextBatch` into a loss.

    Without held-out batches per phase, there is no evaluation.
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
    """Return the objective of a run on text, with the tokenizer of ``source``."""
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
    """Return a few fixed batches per phase, masked at the final rate; empty without enough text."""
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
