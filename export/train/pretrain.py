"""Pre-training: vocabulary, corpus, model, training loop, checkpoint, and guesses at the end."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from cloze.export.errors import TrainError
from cloze.export.measure.documents import fingerprint, is_held_out, read_documents
from cloze.export.measure.examples import SentenceObjective
from cloze.export.train.batches import TextBatch, TextBatches
from cloze.export.train.card import Run
from cloze.export.train.folder import Folder, open_folder, position_embedding
from cloze.export.train.loop import train
from cloze.export.train.objectives import MaskedText, ReplacedTokens, make_pretraining, run_masked
from cloze.export.train.recipe import PretrainRecipe
from cloze.export.train.run_dir import VOCABULARY, acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import (
    check_vocabulary,
    continued_model,
    kept_embeddings,
    repeated_positions,
    write_encoder,
)
from cloze.export.train.text_objective import (
    TextObjective,
    held_out_batches,
    run_corpus,
)
from cloze.export.train.vocabulary import save_vocabulary, train_tokenizer


def pretrain(
    files: list[Path],
    recipe: PretrainRecipe,
    options: RunOptions,
    *,
    source: Folder | None = None,
    embeddings_from: Folder | None = None,
    vocabulary: Folder | None = None,
) -> Path:
    """Train a model from text.

    Args:
        source: model to continue, with its sizes and vocabulary; None: random weights.
        embeddings_from: model whose embeddings the run keeps; None: the source.
        vocabulary: folder with a tokenizer; None: the vocabulary is learnt from the text.

    Returns:
        The folder of the new model.

    Raises:
        TrainError: an input is missing or unsuitable, or the run fails, see `train`.
    """
    _check_starts(recipe, source, embeddings_from, vocabulary)
    original, module = embeddings_from or source, None
    if source and original:
        network = continued_model(source, recipe, options.report)
        kept = kept_embeddings(original, recipe.pretraining, options)
        module = MaskedText(network, recipe.pretraining, kept)
    acquire_run_dir(options.run_dir, recipe, _inputs(files, source, embeddings_from, vocabulary))
    tokens = source or vocabulary or _learn_vocabulary(files, recipe, options)
    started = module or make_pretraining(
        recipe.model, tokens.text.get_vocab_size(), recipe.pretraining, recipe.seed
    )
    sample = _train(started, tokens, files, recipe, options)
    result = started.network
    if not source:
        fill_positions(result, max(phase.tokens for phase in recipe.phases))
        tokens.tokenizer.model_max_length = recipe.model.max_tokens
    if recipe.pretraining.sentence is SentenceObjective.SOP:
        result = _without_pair_head(result)
    title, origins = "An encoder pre-trained on text", [source] if source else []
    location = source.location if source else None
    run = Run(title, location, origins, files, recipe, options)
    folder = write_encoder(result, tokens.tokenizer, run, original)
    for line in guesses(result, tokens.tokenizer, sample):
        options.report(line)
    return folder


def _check_starts(
    recipe: PretrainRecipe,
    source: Folder | None,
    embeddings_from: Folder | None,
    vocabulary: Folder | None,
) -> None:
    """Check that the folders that a run starts from suit each other and the recipe."""
    if source is None:
        if recipe.pretraining.keep_embeddings:
            raise TrainError(
                "keep_embeddings = true needs a checkpoint whose embeddings to keep: "
                "name one with --from"
            )
        if embeddings_from:
            raise TrainError("--embeddings-from needs --from")
        return
    if vocabulary:
        check_vocabulary(vocabulary, source, "--vocab")
    if not embeddings_from:
        return
    if not recipe.pretraining.keep_embeddings:
        raise TrainError("--embeddings-from needs keep_embeddings = true in the recipe")
    check_vocabulary(embeddings_from, source, "--embeddings-from")
    kept, size = embeddings_from.config.hidden_size, source.config.hidden_size
    if kept != size:
        raise TrainError(
            f"the embeddings of {embeddings_from.location} have {kept:,} dimensions, those of "
            f"the checkpoint {size:,}"
        )


def _inputs(
    files: list[Path],
    source: Folder | None,
    embeddings_from: Folder | None,
    vocabulary: Folder | None,
) -> dict[str, str | None]:
    """Return the hashes of the inputs of a run by their names."""
    vocabulary_hash = None
    if vocabulary:
        vocabulary_hash = hashlib.sha256(vocabulary.text.to_str().encode()).hexdigest()
    inputs = {
        "text": fingerprint(files),
        "vocabulary": vocabulary_hash,
        "checkpoint": source.weights_sha256 if source else None,
    }
    return inputs | ({"embeddings": embeddings_from.weights_sha256} if embeddings_from else {})


def _learn_vocabulary(files: list[Path], recipe: PretrainRecipe, options: RunOptions) -> Folder:
    """Learn a vocabulary from the training documents, or open the run's existing vocabulary."""
    folder, vocabulary = options.run_dir / VOCABULARY, recipe.vocabulary
    with PartialState().main_process_first():
        if not (folder / "tokenizer.json").is_file():
            options.report(f"learning a vocabulary of {vocabulary.size:,} tokens")
            learnt = train_tokenizer(
                lambda: (
                    document
                    for document in read_documents(files)
                    if not is_held_out(document.key, recipe.held_out)
                ),
                size=vocabulary.size,
                lowercase=vocabulary.lowercase,
            )
            save_vocabulary(learnt, folder)
    return open_folder(str(folder))


def _train(
    module: MaskedText | ReplacedTokens,
    tokens: Folder,
    files: list[Path],
    recipe: PretrainRecipe,
    options: RunOptions,
) -> TextBatch:
    """Train the module on the text.

    Returns:
        A batch of masked text to show guesses for, held out if possible.
    """
    corpus = run_corpus(files, tokens.text, recipe.held_out, options)
    parameters, kind = module.network.num_parameters(), module.network.config.model_type
    options.report(f"a {kind} of {parameters:,} parameters")
    batches = TextBatches(corpus.train, recipe, tokens)
    held_out = held_out_batches(corpus.held_out, recipe, tokens, options.report)
    objective = TextObjective(module, batches, held_out, options.device)
    train(objective, options, seed=recipe.seed, optimisation=recipe.optimisation)
    return held_out[-1][0] if held_out else batches(0, 0)


@torch.no_grad()
def fill_positions(network: PreTrainedModel, trained: int) -> None:
    """Replace the position embeddings from ``trained`` on by copies of those before."""
    embedding = position_embedding(network)
    assert embedding
    positions = embedding[1].weight  # [S, H]
    positions.copy_(repeated_positions(positions[:trained], len(positions)))


def _without_pair_head(network: PreTrainedModel) -> PreTrainedModel:
    """Return the masked-LM model of a family: a head for next sentences has another question."""
    kind: Any = AutoModelForMaskedLM
    masked: PreTrainedModel = kind.from_config(network.config)
    weights = network.state_dict()
    masked.load_state_dict({name: weights[name] for name in masked.state_dict()})
    return masked


_GUESSES = 3
_CONTEXT = 7
"""Tokens shown on each side of a masked token."""


@torch.inference_mode()
def guesses(
    network: Any, tokenizer: PreTrainedTokenizerBase, batch: TextBatch, count: int = 4
) -> list[str]:
    """Describe the model's guesses for one masked token in each of the first sequences.

    Returns:
        One description per sequence: the text around the token, the token, and three guesses. The
        list is empty if the model has no masked-LM head.
    """
    if network.get_output_embeddings() is None:
        return []
    best = run_masked(network, batch.to(network.device)).logits.topk(_GUESSES).indices.cpu()
    rows, places = batch.positions // batch.input_ids.shape[1], batch.input_ids.flatten()
    lines = []
    for row in sorted(set(rows.tolist()))[:count]:
        masks = torch.nonzero(rows == row).flatten()
        middle = masks[len(masks) // 2]
        position = int(batch.positions[middle])
        start = row * batch.input_ids.shape[1]
        end = start + int(batch.attention_mask[row].sum())
        before = _readable(tokenizer, places[max(start + 1, position - _CONTEXT) : position])
        after = _readable(tokenizer, places[position + 1 : min(position + _CONTEXT + 1, end)])
        was = _readable(tokenizer, batch.labels[middle : middle + 1])
        guessed = ", ".join(_readable(tokenizer, token[None]) for token in best[middle])
        lines.append(f"  {before} ____ {after}\n      was {was!r}, guessed {guessed}")
    return lines


def _readable(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> str:
    return str(tokenizer.decode(ids.tolist())).strip()
