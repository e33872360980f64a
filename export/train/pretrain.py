"""Pre-training on one screen: vocabulary, corpus, model, loop, checkpoint."""

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from export.checkpoint import Checkpoint, load_checkpoint
from export.evaluation.scorer import TorchScorer, score_masks
from export.heads import MASKED_LM, NEXT_SENTENCE
from export.models import Model
from export.models.encoder import Encoder
from export.sentence import EmbeddingRecipe, Pooling
from export.train.batches import TextBatch, TextBatches
from export.train.card import write_card
from export.train.corpus import Corpus, fingerprint, is_held_out, prepare_corpus, read_documents
from export.train.embeddings import KeptEmbeddings
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.masking import Masking
from export.train.objectives import MaskedText, ReplacedTokens, make_pretraining
from export.train.pairs import Sentence
from export.train.recipe import (
    CorpusSampling,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    Vocabulary,
)
from export.train.run_folder import VOCABULARY, claim
from export.train.save import save_checkpoint
from export.train.start import start_from
from export.train.vocabulary import (
    CONTINUATION,
    SPECIAL_TOKENS,
    save_vocabulary,
    special_ids,
    train_tokenizer,
)

CHECKPOINT = "checkpoint"
_EVALUATION_BATCHES = 8


def pretrain(
    files: list[Path],
    recipe: PretrainRecipe,
    folder: Path,
    *,
    source: str | None = None,
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
        source: a checkpoint to go on from, with its sizes and its vocabulary; none: random weights.
        vocabulary: a folder with a ``tokenizer.json`` to use; one is learnt from the text if not given.
        device: where to compute.
        schedule: how often to log, evaluate and save.
        say: is told what happens, a line each.

    Raises:
        TrainError: see the parts.
    """
    checkpoint = _open_source(source, recipe, vocabulary) if source else None
    if recipe.pretraining.keep_embeddings and not checkpoint:
        raise TrainError(
            "keep_embeddings = true needs a checkpoint whose embeddings to keep: name one with --from"
        )
    given = (
        hashlib.sha256(open_tokenizer(vocabulary).to_str().encode()).hexdigest()
        if vocabulary
        else None
    )
    began = checkpoint.source.weights_sha256 if checkpoint else None
    claim(folder, recipe, {"text": fingerprint(files), "vocabulary": given, "checkpoint": began})
    module: MaskedText | ReplacedTokens
    if checkpoint:
        tokenizer, module = _continued(checkpoint, recipe, device, say)
    else:
        tokenizer = (
            open_tokenizer(vocabulary)
            if vocabulary
            else learn_vocabulary(files, recipe.vocabulary, folder, recipe.held_out, say)
        )
        module = make_pretraining(
            recipe.model, tokenizer.get_vocab_size(), recipe.pretraining, recipe.seed
        )
    corpus = prepare_corpus(files, tokenizer, folder / "corpus", held_out=recipe.held_out, say=say)
    say(f"a {recipe.model.family} of {module.model.parameter_count():,} parameters")
    batches = text_batches(corpus.train, recipe, tokenizer)
    objective = TextObjective(
        module, batches, held_out_batches(corpus.held_out, recipe, tokenizer, say), device
    )

    def grow(step: int) -> None:
        if (
            not checkpoint
            and not recipe.pretraining.shifted
            and (seen := batches.grows_from(step)) is not None
        ):
            fill_positions(module, seen)

    train(
        objective,
        recipe.seed,
        recipe.optimisation,
        folder,
        device=device,
        schedule=schedule,
        say=say,
        before_step=grow,
    )
    if not checkpoint:  # whose positions are learnt
        fill_positions(module, max(phase.tokens for phase in recipe.phases))
    if recipe.pretraining.sentence is Sentence.SOP:
        module.model.next_sentence = (
            None  # it tells order, which is not what a next-sentence head is asked
        )
    embedding = kept_recipe(checkpoint) if checkpoint else None
    save_checkpoint(module.model, tokenizer, folder / CHECKPOINT, embedding=embedding)
    write_card(
        folder / CHECKPOINT,
        title="A BERT pre-trained on text",
        source=source,
        files=files,
        recipe=recipe,
        device=device,
    )
    for line in guesses(
        module.model.cpu(),
        tokenizer,
        objective.held_out[-1][0] if objective.held_out else batches(0, 0),
    ):
        say(line)
    return folder / CHECKPOINT


def _open_source(source: str, recipe: PretrainRecipe, vocabulary: Path | None) -> Checkpoint:
    """The checkpoint to go on from, if the recipe leaves to it what is its own.

    Raises:
        TrainError: the recipe or the command gives sizes or a vocabulary, or asks for what a checkpoint cannot go on with.
    """
    checkpoint = load_checkpoint(source)
    config = checkpoint.model.config
    theirs = sorted(recipe.model.model_fields_set - {"dropout"})
    longest = max(phase.tokens for phase in recipe.phases)
    if theirs or recipe.vocabulary.model_fields_set:
        what = f"[model] {', '.join(theirs)}" if theirs else "a vocabulary"
        raise TrainError(
            f"{what} is given, but sizes and vocabulary are the checkpoint's; see the recipe pretrain-further"
        )
    if recipe.pretraining.method != "mlm":
        raise TrainError(
            "a checkpoint goes on with masked tokens, not with replaced ones: it has no generator"
        )
    if config.family != "bert":
        raise TrainError(f"the checkpoint is a {config.family}; pre-training goes on from a bert")
    if longest > config.max_positions:
        raise TrainError(
            f"a phase of {longest} tokens exceeds the checkpoint's {config.max_positions} positions"
        )
    if vocabulary:
        _check_vocabulary(open_tokenizer(vocabulary), checkpoint, vocabulary)
    if recipe.pretraining.keep_embeddings and not (pools_by_mean(checkpoint.recipe)):
        raise TrainError(
            "keep_embeddings = true keeps the mean of the hidden states, but the checkpoint's embedding is another "
            f"({checkpoint.recipe.pooling}, {len(checkpoint.recipe.projections)} dense layers)"
        )
    return checkpoint


def _check_vocabulary(given: Tokenizer, checkpoint: Checkpoint, folder: Path) -> None:
    ours, theirs = given.get_vocab(), checkpoint.tokenizer.tokenizer.get_vocab()
    if ours != theirs:
        raise TrainError(
            f"the vocabulary in {folder} ({len(ours):,} tokens) is not the checkpoint's ({len(theirs):,} tokens);"
            " leave --vocab out, or train from nothing"
        )


def pools_by_mean(recipe: EmbeddingRecipe) -> bool:
    """Whether an embedding is the mean of the hidden states, with nothing after it that has weights."""
    return recipe.pooling is Pooling.MEAN and not recipe.projections


def kept_recipe(checkpoint: Checkpoint) -> EmbeddingRecipe | None:
    """Return the embedding recipe of a checkpoint, for what continues it; None if it needs weights that are not kept."""
    return None if checkpoint.recipe.projections else checkpoint.recipe


def _continued(
    checkpoint: Checkpoint, recipe: PretrainRecipe, device: torch.device, say: Callable[[str], None]
) -> tuple[Tokenizer, MaskedText]:
    """Return the checkpoint's tokenizer, and its model with the heads that the recipe trains."""
    heads = (
        [MASKED_LM] if recipe.pretraining.sentence is Sentence.NONE else [MASKED_LM, NEXT_SENTENCE]
    )
    start = start_from(checkpoint, heads, dropout=recipe.model.dropout, seed=recipe.seed)
    if start.created:
        say(
            f"heads that the checkpoint does not have, with random weights: {', '.join(start.created)}"
        )
    if not kept_recipe(checkpoint):
        say("the dense layers after the checkpoint's pooling are not kept")
    kept = None
    if recipe.pretraining.keep_embeddings:
        kept = KeptEmbeddings(
            deepcopy(checkpoint.model).to(device), recipe.pretraining.embedding_tokens
        )
    return start.tokenizer, MaskedText(start.model, recipe.pretraining, kept)


def guesses(model: Model, tokenizer: Tokenizer, batch: TextBatch, count: int = 4) -> list[str]:
    """A few masked places with what stood there and the model's first three guesses: what a run has learnt, at a glance."""
    if model.masked_lm is None:
        return []
    scorer, lines = TorchScorer(model, torch.device("cpu")), []
    words = {number: token for token, number in tokenizer.get_vocab().items()}
    length = batch.input_ids.shape[1]
    for row in range(min(count, len(batch.input_ids))):
        (chosen,) = torch.nonzero(batch.positions // length == row, as_tuple=True)
        if not len(chosen):
            continue
        position, label = (
            int(batch.positions[chosen[len(chosen) // 2]]) % length,
            int(batch.labels[chosen[len(chosen) // 2]]),
        )
        size = int(batch.attention_mask[row].sum())
        ids, types = (
            batch.input_ids[row : row + 1, :size].numpy(),
            batch.token_type_ids[row : row + 1, :size].numpy(),
        )
        at, wanted = np.array([position]), np.array([label])
        best, _ = score_masks(scorer, ids, types, at, wanted, k=3)
        around = [words[int(token)] for token in ids[0, max(1, position - 7) : position + 8]]
        around[min(7, position - 1)] = "____"
        text = " ".join(around).replace(f" {CONTINUATION}", "")
        lines.append(
            f"  {text}\n      was {words[label]!r}, guessed {', '.join(words[int(token)] for token in best[0])}"
        )
    return lines


@torch.no_grad()
def fill_positions(module: nn.Module, seen: int) -> None:
    """Positions from ``seen`` on become copies of 1 to ``seen`` - 1; 0 is always ``[CLS]``'s.

    Where a longer phase begins they would else have to be learnt anew, at a lower learning rate: measured, a model stayed for 300
    steps at two thirds of the accuracy that it had reached on shorter sequences.
    """
    for part in module.modules():
        if isinstance(part, Encoder):
            positions = part.embeddings.position.weight  # [S, H]
            rows = torch.arange(seen, len(positions), device=positions.device)
            positions[rows] = positions[1 + (rows - 1) % (seen - 1)]


class TextObjective:
    """Learning from text as the loop wants it.

    Args:
        module: a batch -> the loss and figures.
        batches: to learn from.
        held_out: to measure on, for each phase; empty if there are none.
        device: where the module is.
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
        """See `loop.Objective`."""
        return self._batches(step, part)

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `loop.Objective`."""
        return self.module(batch)  # type: ignore[no-any-return]

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Means over the held-out batches of the length that is being learnt."""
        self.module.eval()
        held_out = self.held_out[self._batches.phase(step - 1)] if self.held_out else []
        with torch.inference_mode():
            results = [self.module(batch.to(self._device))[1] for batch in held_out]
        return {
            name: float(torch.stack([result[name] for result in results]).mean())
            for name in (results[0] if results else ())
        }


class TextRecipe(Protocol):
    """What a recipe says about reading text."""

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""

    @property
    def corpus(self) -> CorpusSampling:
        """How often each part of the text is read."""

    @property
    def pretraining(self) -> Pretraining:
        """How text is masked and paired."""

    @property
    def phases(self) -> list[Phase]:
        """Lengths and sizes of batches."""

    @property
    def optimisation(self) -> Optimisation:
        """How many batches a step has."""


def text_batches(corpus: Corpus, recipe: TextRecipe, tokenizer: Tokenizer) -> TextBatches:
    """The batches of a run with BERT's special tokens."""
    return TextBatches(
        corpus,
        recipe.pretraining,
        recipe.phases,
        make_masking(tokenizer, recipe.pretraining),
        special=special_ids(tokenizer),
        seed=recipe.seed,
        accumulation=recipe.optimisation.accumulation,
        weights=recipe.corpus.weights,
    )


def held_out_batches(
    corpus: Corpus, recipe: TextRecipe, tokenizer: Tokenizer, say: Callable[[str], None]
) -> list[list[TextBatch]]:
    """A few batches of each phase's shape from held-out documents, always the same; empty if they do not suffice.

    They are masked at the rate that the run ends with.
    """
    pretraining = recipe.pretraining
    masking = make_masking(tokenizer, pretraining).at(1.0)
    weights = {
        name: weight for name, weight in recipe.corpus.weights.items() if _names(corpus, name)
    }
    try:
        batches = [
            TextBatches(
                corpus,
                pretraining,
                [phase.model_copy(update={"steps": _EVALUATION_BATCHES})],
                masking,
                special=special_ids(tokenizer),
                seed=recipe.seed,
                weights=weights,
            )
            for phase in recipe.phases
        ]
    except TrainError as error:
        say(f"no held-out figures: {error}")
        return []
    return [[of_phase(step, 0) for step in range(_EVALUATION_BATCHES)] for of_phase in batches]


def _names(corpus: Corpus, name: str) -> bool:
    """Whether a weight's name is that of a source or a file of the held-out documents: a small source may have none there."""
    return any(name in origin for origin in corpus.origins)


def make_masking(
    tokenizer: Tokenizer, recipe: Pretraining, replace: tuple[float, float] = (0.8, 0.1)
) -> Masking:
    """The recipe's masking for a vocabulary; ``replace`` as `Masking` has it."""
    size = tokenizer.get_vocab_size()
    special, continues = np.zeros(size, bool), np.zeros(size, bool)
    for token, number in tokenizer.get_vocab().items():
        special[number] = token in SPECIAL_TOKENS
        continues[number] = token.startswith(CONTINUATION)
    return Masking(
        recipe.unit,
        recipe.rate,
        special_ids(tokenizer).mask,
        special,
        continues,
        replace,
        recipe.final_rate,
    )


def learn_vocabulary(
    files: list[Path], recipe: Vocabulary, folder: Path, held_out: float, say: Callable[[str], None]
) -> Tokenizer:
    """Learn a vocabulary from what is not held out, into the run's folder; one that is there already is used."""
    there = folder / VOCABULARY
    if not (there / "vocab.txt").is_file():
        say(f"learning a vocabulary of {recipe.size:,} tokens")
        tokenizer = train_tokenizer(
            lambda: (
                document
                for document in read_documents(files)
                if not is_held_out(document.key, held_out)
            ),
            size=recipe.size,
            lowercase=recipe.lowercase,
            min_frequency=recipe.min_frequency,
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
