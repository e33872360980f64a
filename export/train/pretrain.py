"""Pre-training: vocabulary, corpus, model, training loop, checkpoint, and guesses at the end."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from cloze.export.blocks.encoder import Encoder
from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import Checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.measure.scorer import MaskedRow, score_masks
from cloze.export.model import Model, TorchScorer
from cloze.export.train.batches import TextBatch, TextBatches
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint, is_held_out, read_documents
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.loop import train
from cloze.export.train.objectives import MaskedText, ReplacedTokens, make_pretraining
from cloze.export.train.recipe import PretrainRecipe
from cloze.export.train.run_dir import VOCABULARY, acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import (
    continue_from,
    kept_recipe,
    open_original,
    open_source,
    repeated_positions,
)
from cloze.export.train.text_objective import (
    TextObjective,
    held_out_batches,
    run_corpus,
)
from cloze.export.train.vocabulary import open_tokenizer, save_vocabulary, train_tokenizer


def pretrain(
    files: list[Path],
    recipe: PretrainRecipe,
    options: RunOptions,
    *,
    source: str | None = None,
    embeddings_from: str | None = None,
    vocabulary: Path | None = None,
) -> Path:
    """Train a model from text.

    Args:
        source: checkpoint to continue, with its sizes and vocabulary; None: random weights.
        embeddings_from: checkpoint whose embeddings the run keeps; None: the source.
        vocabulary: folder with a ``tokenizer.json``; None: the vocabulary is learnt from the text.

    Returns:
        The folder of the new checkpoint.

    Raises:
        TrainError: an input is missing or unsuitable, or the run fails, see `train`.
        ExportError: a checkpoint cannot be loaded.
    """
    checkpoint = open_source(source, recipe, vocabulary) if source else None
    if recipe.pretraining.keep_embeddings and not checkpoint:
        raise TrainError(
            "keep_embeddings = true needs a checkpoint whose embeddings to keep: "
            "name one with --from"
        )
    if embeddings_from and not checkpoint:
        raise TrainError("--embeddings-from needs --from")
    original = checkpoint
    if embeddings_from and checkpoint:
        original = open_original(embeddings_from, recipe, checkpoint)
    _acquire(files, recipe, options, checkpoint, original, vocabulary)
    module: MaskedText | ReplacedTokens
    if checkpoint and original:
        tokenizer, module = continue_from(checkpoint, original, recipe, options)
    else:
        tokenizer = (
            open_tokenizer(vocabulary) if vocabulary else _learn_vocabulary(files, recipe, options)
        )
        vocab_size = tokenizer.tokenizer.get_vocab_size()
        module = make_pretraining(recipe.model, vocab_size, recipe.pretraining, recipe.seed)
    sample = _train(module, tokenizer, files, recipe, options)
    if not checkpoint:
        fill_positions(module, max(phase.tokens for phase in recipe.phases))
    if recipe.pretraining.sentence is SentenceObjective.SOP:
        # A next-sentence head answers another question than sentence order.
        module.model.next_sentence = None
    embedding = kept_recipe(checkpoint) if checkpoint else None
    origins = [checkpoint] if checkpoint else []
    title = "An encoder pre-trained on text"
    run = Run(title, source, origins, files, recipe, options)
    folder = finish_run(module.model, tokenizer, run, embedding)
    for line in guesses(module.model.cpu(), tokenizer, sample):
        options.report(line)
    return folder


def _acquire(
    files: list[Path],
    recipe: PretrainRecipe,
    options: RunOptions,
    checkpoint: Checkpoint | None,
    original: Checkpoint | None,
    vocabulary: Path | None,
) -> None:
    """Acquire the directory of the run for this recipe and these inputs."""
    vocabulary_hash = None
    if vocabulary:
        tokenizer_json = open_tokenizer(vocabulary).tokenizer.to_str()
        vocabulary_hash = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    inputs = {
        "text": fingerprint(files),
        "vocabulary": vocabulary_hash,
        "checkpoint": checkpoint.source.weights_sha256 if checkpoint else None,
    }
    if original and original is not checkpoint:
        inputs["embeddings"] = original.source.weights_sha256
    acquire_run_dir(options.run_dir, recipe, inputs)


def _learn_vocabulary(
    files: list[Path], recipe: PretrainRecipe, options: RunOptions
) -> CheckpointTokenizer:
    """Learn a vocabulary from the training documents, or open the run's existing vocabulary."""
    folder, vocabulary = options.run_dir / VOCABULARY, recipe.vocabulary
    if not (folder / "vocab.txt").is_file():
        options.report(f"learning a vocabulary of {vocabulary.size:,} tokens")
        learnt = train_tokenizer(
            lambda: (
                document
                for document in read_documents(files)
                if not is_held_out(document.key, recipe.held_out)
            ),
            size=vocabulary.size,
            lowercase=vocabulary.lowercase,
            min_frequency=vocabulary.min_frequency,
        )
        save_vocabulary(learnt, folder)
    return open_tokenizer(folder)


def _train(
    module: MaskedText | ReplacedTokens,
    tokenizer: CheckpointTokenizer,
    files: list[Path],
    recipe: PretrainRecipe,
    options: RunOptions,
) -> TextBatch:
    """Train the module on the text.

    Returns:
        A batch of masked text to show guesses for, held out if possible.
    """
    corpus = run_corpus(files, tokenizer, recipe.held_out, options)
    parameters = module.model.parameter_count()
    options.report(f"a {recipe.model.family} of {parameters:,} parameters")
    batches = TextBatches(corpus.train, recipe, tokenizer)
    held_out = held_out_batches(corpus.held_out, recipe, tokenizer, options.report)
    objective = TextObjective(module, batches, held_out, options.device)
    train(objective, options, seed=recipe.seed, optimisation=recipe.optimisation)
    return held_out[-1][0] if held_out else batches(0, 0)


@torch.no_grad()
def fill_positions(module: nn.Module, trained: int) -> None:
    """Replace the position embeddings from ``trained`` on by copies of those before."""
    for part in module.modules():
        if isinstance(part, Encoder) and part.embeddings.position is not None:
            positions = part.embeddings.position.weight  # [S, H]
            positions.copy_(repeated_positions(positions[:trained], len(positions)))


_GUESSES = 3
_CONTEXT = 7
"""Tokens shown on each side of a masked token."""


def guesses(
    model: Model, tokenizer: CheckpointTokenizer, batch: TextBatch, count: int = 4
) -> list[str]:
    """Describe the model's guesses for one masked token in each of the first sequences.

    Returns:
        One description per sequence: the text around the token, the token, and three guesses. The
        list is empty if the model has no masked-LM head.
    """
    if model.masked_lm is None:
        return []
    scorer = TorchScorer(model, torch.device("cpu"))
    length = batch.input_ids.shape[1]
    lines = []
    for row in range(min(count, len(batch.input_ids))):
        (masks,) = torch.nonzero(batch.positions // length == row, as_tuple=True)
        if not len(masks):
            continue
        middle = masks[len(masks) // 2]
        position, label = int(batch.positions[middle]) % length, int(batch.labels[middle])
        was = tokenizer.readable([label])
        size = int(batch.attention_mask[row].sum())
        ids = batch.input_ids[row, :size].numpy()
        types = batch.token_type_ids[row, :size].numpy()
        masked = MaskedRow(ids, types, np.array([position]), np.array([label]))
        [(best, _)] = score_masks(scorer, [masked], k=_GUESSES)
        first = max(1, position - _CONTEXT)
        before = tokenizer.readable(ids[first:position].tolist())
        after = tokenizer.readable(ids[position + 1 : position + _CONTEXT + 1].tolist())
        guessed = ", ".join(tokenizer.readable([token]) for token in best[0].tolist())
        lines.append(f"  {before} ____ {after}\n      was {was!r}, guessed {guessed}")
    return lines
