"""Pre-training: vocabulary, text and model, from nothing or from a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedModel,
)

from cloze.export.errors import Report, TrainError
from cloze.export.measure.documents import fingerprint, is_held_out, read_documents
from cloze.export.measure.examples import SentenceObjective
from cloze.export.train.batches import text_objective
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import Folder, max_tokens, open_folder
from cloze.export.train.kept_embeddings import kept_embeddings, with_modules
from cloze.export.train.loop import train
from cloze.export.train.objectives import MaskedText, make_pretraining
from cloze.export.train.recipe import PretrainRecipe
from cloze.export.train.run_dir import VOCABULARY, acquire_run_dir
from cloze.export.train.run_options import RunOptions
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
    """Train a model from text, and return its folder.

    Args:
        source: model to continue, with its sizes and vocabulary; None: random weights.
        embeddings_from: model whose embeddings the run keeps; None: the source.
        vocabulary: folder with a tokenizer; None: the vocabulary is learnt from the text.

    Raises:
        TrainError: an input is missing or unsuitable, or the run fails, see `train`.
    """
    original = embeddings_from or source
    _check_starts(recipe, source, embeddings_from, vocabulary)
    started: Any = None
    limit = recipe.model.max_tokens
    if source and original:
        network = continued_model(source, recipe, options.report)
        kept = kept_embeddings(original, recipe.pretraining, options.device)
        started = MaskedText(network, recipe.pretraining, kept)
        limit = max_tokens(network)
    longest = max(phase.tokens for phase in recipe.phases)
    if longest > limit:
        raise TrainError(f"a phase of {longest} tokens exceeds the model's {limit} positions")
    inputs = {
        "text": fingerprint(files),
        "vocabulary": fingerprint([], vocabulary.text.to_str().encode()) if vocabulary else None,
        "checkpoint": source.weights_sha256 if source else None,
        "checkpoint of embeddings": embeddings_from.weights_sha256 if embeddings_from else None,
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    tokens = source or vocabulary or _learn_vocabulary(files, recipe, options)
    if not source:
        size = tokens.text.get_vocab_size()
        started = make_pretraining(recipe.model, size, recipe.pretraining, recipe.seed)
    network = started.network
    parameters = f"{network.num_parameters():,} parameters"
    options.report(f"a {network.config.model_type} of {parameters}")
    objective = text_objective(started, files, recipe, tokens, options)
    train(objective, options, recipe)
    if not source:
        _fill_positions(network, longest)
        tokens.tokenizer.model_max_length = recipe.model.max_tokens
    if recipe.pretraining.sentence is SentenceObjective.SOP:
        network = _without_pair_head(network)
    run = Run("An encoder pre-trained on text", source, files, recipe, options)
    return write_run(with_modules(network, original), tokens.tokenizer, run)


def _check_starts(
    recipe: PretrainRecipe,
    source: Folder | None,
    embeddings_from: Folder | None,
    vocabulary: Folder | None,
) -> None:
    """Check that the folders that a run starts from suit each other and the recipe."""
    keeps = recipe.pretraining.keep_embeddings
    if source is None:
        if keeps:
            raise TrainError(
                "keep_embeddings = true needs a checkpoint whose embeddings to keep: "
                "name one with --from"
            )
        if embeddings_from:
            raise TrainError("--embeddings-from needs --from")
        return
    given_sizes = sorted(recipe.model.model_fields_set - {"dropout"})
    if given_sizes or recipe.vocabulary.model_fields_set or vocabulary:
        given = f"[model] {', '.join(given_sizes)}" if given_sizes else "a vocabulary"
        raise TrainError(
            f"{given} is given, but sizes and vocabulary are the checkpoint's; "
            "see the recipe pretrain-further"
        )
    if recipe.pretraining.method != "mlm":
        raise TrainError(
            "a checkpoint goes on with masked tokens, not with replaced ones: it has no generator"
        )
    if embeddings_from is None:
        return
    if not keeps:
        raise TrainError("--embeddings-from needs keep_embeddings = true in the recipe")
    size = source.config.hidden_size
    has_size = embeddings_from.config.hidden_size == size
    if not has_size or embeddings_from.text.get_vocab() != source.text.get_vocab():
        raise TrainError(
            f"{embeddings_from.location} has another vocabulary than {source.location}, or its "
            f"embeddings have not {size:,} dimensions"
        )


def continued_model(source: Folder, recipe: PretrainRecipe, report: Report) -> PreTrainedModel:
    """Return the model that pre-training goes on with; raise if its family lacks a head."""
    sentence, config = recipe.pretraining.sentence, source.config
    auto_class: Any = AutoModelForMaskedLM
    if sentence is not SentenceObjective.NONE:
        auto_class = AutoModelForPreTraining
        if type(config) not in MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING:
            raise TrainError(f"a {config.model_type} has no head for {sentence}")
    network, new = source.load(auto_class, seed=recipe.seed, dropout=recipe.model.dropout)
    if new:
        report("the checkpoint lacks a head of the recipe, which begins with random weights")
    return network


@torch.no_grad()
def _fill_positions(network: PreTrainedModel, trained: int) -> None:
    """Replace the position embeddings from ``trained`` on by copies of those before.

    Position 0 always holds ``[CLS]``, so its embedding is not repeated.
    """
    positions: Any = network.base_model.get_submodule("embeddings.position_embeddings")
    rows = torch.arange(trained, len(positions.weight))
    positions.weight[trained:] = positions.weight[1 + (rows - 1) % (trained - 1)]


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


def _without_pair_head(network: PreTrainedModel) -> PreTrainedModel:
    """Return the masked-LM model of a family: a head for next sentences has another question."""
    kind: Any = AutoModelForMaskedLM
    masked: PreTrainedModel = kind.from_config(network.config)
    weights = network.state_dict()
    masked.load_state_dict({name: weights[name] for name in masked.state_dict()})
    return masked
