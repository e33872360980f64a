"""Pre-training on one screen: vocabulary, corpus, model, loop, checkpoint."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from export.train.batches import TextBatch, TextBatches
from export.train.card import write_card
from export.train.corpus import Corpus, prepare_corpus, read_documents
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.masking import Masking
from export.train.objectives import make_pretraining
from export.train.recipe import Phase, Pretraining, PretrainRecipe, Vocabulary
from export.train.save import save_checkpoint
from export.train.vocabulary import CONTINUATION, SPECIAL_TOKENS, save_vocabulary, special_ids, train_tokenizer

CHECKPOINT = "checkpoint"
_EVALUATION_BATCHES = 8


def pretrain(
    files: list[Path],
    recipe: PretrainRecipe,
    folder: Path,
    *,
    vocabulary: Path | None,
    device: torch.device,
    schedule: Schedule,
    say: Callable[[str], None],
) -> Path:
    """Train a model from text; returns the folder of its checkpoint.

    Args:
        files: the text, as `corpus.read_documents`.
        recipe: the run.
        folder: of the run: vocabulary, tokenized text, state, log, curves, checkpoint.
        vocabulary: a folder with a ``tokenizer.json`` to use; one is learnt from the text if not given.
        device: where to compute.
        schedule: how often to log, evaluate and save.
        say: is told what happens, a line each.

    Raises:
        TrainError: see the parts.
    """
    tokenizer = open_tokenizer(vocabulary) if vocabulary else learn_vocabulary(files, recipe.vocabulary, folder, say)
    corpus = prepare_corpus(files, tokenizer, folder / "corpus", held_out=recipe.held_out, say=say)
    module = make_pretraining(recipe.model, tokenizer.get_vocab_size(), recipe.pretraining, recipe.seed)
    say(f"a {recipe.model.family} of {module.model.parameter_count():,} parameters")
    objective = TextObjective(
        module,
        text_batches(corpus.train, recipe.pretraining, recipe.phases, tokenizer, recipe.seed, recipe.optimisation.accumulation),
        held_out_batches(corpus.held_out, recipe.pretraining, recipe.phases, tokenizer, recipe.seed, say),
        device,
    )
    train(objective, recipe, recipe.optimisation, folder, device=device, schedule=schedule, say=say)
    save_checkpoint(module.model, tokenizer, folder / CHECKPOINT)
    write_card(folder / CHECKPOINT, title="A BERT pre-trained on text", source=None, files=files, recipe=recipe, device=device)
    return folder / CHECKPOINT


class TextObjective:
    """Learning from text as the loop wants it.

    Args:
        module: a batch -> the loss and figures.
        batches: to learn from.
        held_out: to measure on.
        device: where the module is.
    """

    def __init__(self, module: nn.Module, batches: TextBatches, held_out: list[TextBatch], device: torch.device) -> None:
        self.module = module
        self.steps = batches.steps
        self._batches, self._held_out, self._device = batches, held_out, device

    def batch(self, step: int, part: int) -> TextBatch:
        """See `loop.Objective`."""
        return self._batches(step, part)

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `loop.Objective`."""
        return self.module(batch)  # type: ignore[no-any-return]

    def evaluate(self) -> Mapping[str, float]:
        """Means over the held-out batches."""
        self.module.eval()
        with torch.inference_mode():
            results = [self.module(batch.to(self._device))[1] for batch in self._held_out]
        return {name: float(torch.stack([result[name] for result in results]).mean()) for name in (results[0] if results else ())}


def text_batches(
    corpus: Corpus, recipe: Pretraining, phases: list[Phase], tokenizer: Tokenizer, seed: int, accumulation: int = 1
) -> TextBatches:
    """The batches of a run with BERT's special tokens."""
    return TextBatches(
        corpus,
        recipe,
        phases,
        make_masking(tokenizer, recipe),
        special=special_ids(tokenizer),
        seed=seed,
        accumulation=accumulation,
    )


def held_out_batches(
    corpus: Corpus, recipe: Pretraining, phases: list[Phase], tokenizer: Tokenizer, seed: int, say: Callable[[str], None]
) -> list[TextBatch]:
    """A few batches of the last phase's shape from held-out documents, always the same."""
    last = phases[-1].model_copy(update={"steps": _EVALUATION_BATCHES})
    try:
        batches = text_batches(corpus, recipe, [last], tokenizer, seed)
    except TrainError as error:
        say(f"no held-out figures: {error}")
        return []
    return [batches(step, 0) for step in range(_EVALUATION_BATCHES)]


def make_masking(tokenizer: Tokenizer, recipe: Pretraining, replace: tuple[float, float] = (0.8, 0.1)) -> Masking:
    """The recipe's masking for a vocabulary; ``replace`` as `Masking` has it."""
    size = tokenizer.get_vocab_size()
    special, continues = np.zeros(size, bool), np.zeros(size, bool)
    for token, number in tokenizer.get_vocab().items():
        special[number] = token in SPECIAL_TOKENS
        continues[number] = token.startswith(CONTINUATION)
    return Masking(recipe.unit, recipe.rate, special_ids(tokenizer).mask, special, continues, replace)


def learn_vocabulary(files: list[Path], recipe: Vocabulary, folder: Path, say: Callable[[str], None]) -> Tokenizer:
    """Learn a vocabulary into the run's folder; one that is there already is used."""
    there = folder / "vocabulary"
    if not (there / "vocab.txt").is_file():
        say(f"learning a vocabulary of {recipe.size:,} tokens")
        tokenizer = train_tokenizer(
            read_documents(files), size=recipe.size, lowercase=recipe.lowercase, min_frequency=recipe.min_frequency
        )
        save_vocabulary(tokenizer, there)
    return open_tokenizer(there)


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder.

    Raises:
        TrainError: there is none, or it lacks a special token.
    """
    try:
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(f"{folder} holds no tokenizer.json") from None
    except Exception as error:  # the library raises nothing narrower
        raise TrainError(f"{folder / 'tokenizer.json'} is damaged: {error}") from error
    special_ids(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
