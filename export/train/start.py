"""What a run on text starts from and leaves: a folder's model, more positions, kept modules."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cloze.export.errors import Report, TrainError
from cloze.export.measure.examples import SentenceObjective
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import MODULES, Folder, max_tokens, position_embedding
from cloze.export.train.kept_embeddings import KeptEmbeddings, open_sentences
from cloze.export.train.recipe import Pretraining, PretrainRecipe
from cloze.export.train.run_options import RunOptions


def continued_model(source: Folder, recipe: PretrainRecipe, report: Report) -> PreTrainedModel:
    """Return the model that pre-training goes on with, which has the heads that the recipe trains.

    Raises:
        TrainError: the recipe contradicts the folder, or the family lacks a head.
    """
    _check_recipe(recipe)
    sentence, config = recipe.pretraining.sentence, source.config
    auto_class: Any = AutoModelForMaskedLM
    if sentence is not SentenceObjective.NONE:
        auto_class = AutoModelForPreTraining
        if type(config) not in MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING:
            raise TrainError(f"a {config.model_type} has no head for {sentence}")
    given: dict[str, Any] = {"seed": recipe.seed, "dropout": recipe.model.dropout}
    network = source.whole_model(auto_class, **given)
    if network is None:
        report("the checkpoint lacks a head of the recipe, which begins with random weights")
        network = source.model(auto_class, **given)
    return _with_positions(network, recipe)


def _check_recipe(recipe: PretrainRecipe) -> None:
    given_sizes = sorted(recipe.model.model_fields_set - {"dropout", "max_tokens"})
    if given_sizes or recipe.vocabulary.model_fields_set:
        given = f"[model] {', '.join(given_sizes)}" if given_sizes else "a vocabulary"
        raise TrainError(
            f"{given} is given, but sizes and vocabulary are the checkpoint's; "
            "see the recipe pretrain-further"
        )
    if recipe.pretraining.method != "mlm":
        raise TrainError(
            "a checkpoint goes on with masked tokens, not with replaced ones: it has no generator"
        )


def _with_positions(network: PreTrainedModel, recipe: PretrainRecipe) -> PreTrainedModel:
    """Return the model with as many positions as the recipe names.

    The further positions are copies, see `repeated_positions`.

    Raises:
        TrainError: positions would be removed, or do not suffice, or are no learnt embeddings.
    """
    given = positions = max_tokens(network)
    if "max_tokens" in recipe.model.model_fields_set:
        positions = recipe.model.max_tokens
    if positions < given:
        raise TrainError(
            f"[model] max_tokens = {positions} is less than the checkpoint's "
            f"{given} positions; positions are only added"
        )
    longest = max(phase.tokens for phase in recipe.phases)
    if longest > positions:
        raise TrainError(
            f"a phase of {longest} tokens exceeds the checkpoint's {positions} positions; "
            f"[model] max_tokens = {longest} adds positions"
        )
    if positions == given:
        return network
    embedding = position_embedding(network)
    if embedding is None:
        raise TrainError(
            f"[model] max_tokens = {positions} exceeds the checkpoint's {given} positions, and a "
            f"{network.config.model_type} has no position embeddings to copy; leave it out"
        )
    name, _, unused = embedding
    config = deepcopy(network.config)
    config.max_position_embeddings = unused + positions
    weights = network.state_dict()
    old = weights[f"{name}.weight"]
    new = repeated_positions(old[unused:], positions)
    weights[f"{name}.weight"] = torch.cat([old[:unused], new])
    longer: PreTrainedModel = type(network)(config)
    longer.load_state_dict(weights)
    return longer


def repeated_positions(positions: Tensor, length: int) -> Tensor:
    """Return the position embeddings [length, H] that begin with ``positions`` [S, H].

    The further ones repeat the embeddings 1 to S - 1. Position 0 always holds ``[CLS]``, so its
    embedding is not repeated.
    """
    rows = torch.arange(length, device=positions.device)
    trained = len(positions)
    return positions[torch.where(rows < trained, rows, 1 + (rows - 1) % (trained - 1))]


def check_vocabulary(given: Folder, source: Folder, option: str) -> None:
    """Check that a vocabulary is the checkpoint's.

    Raises:
        TrainError: it is another vocabulary.
    """
    given_tokens, source_tokens = given.text.get_vocab(), source.text.get_vocab()
    if given_tokens != source_tokens:
        raise TrainError(
            f"the vocabulary in {given.location} ({len(given_tokens):,} tokens) is not the "
            f"checkpoint's ({len(source_tokens):,} tokens); leave {option} out, or train from "
            "nothing"
        )


def kept_embeddings(
    original: Folder, recipe: Pretraining, options: RunOptions
) -> KeptEmbeddings | None:
    """Return the embeddings of a folder as a target; None: the recipe does not keep them."""
    if not recipe.keep_embeddings:
        return None
    return KeptEmbeddings(open_sentences(original).to(options.device), recipe.embedding_tokens)


def write_encoder(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    source: Folder | None,
) -> Path:
    """Write the result of a run, see `write_run`.

    A source of sentence-transformers stays one: its pooling, its layers after the pooling and its
    prompts are kept.
    """
    if source is None or not (source.card / MODULES).is_file():
        return write_run(network, tokenizer, run)
    sentences = open_sentences(source)
    sentences[0].model = network
    return write_run(sentences, tokenizer, run, create_model_card=False)
