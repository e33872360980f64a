"""The model that a run starts from: a checkpoint's encoder, fresh heads, and kept embeddings."""

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.families import FAMILIES
from cloze.export.heads import MASKED_LM, NEXT_SENTENCE
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model
from cloze.export.train.embeddings import KeptEmbeddings
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.objectives import MaskedText, initialise
from cloze.export.train.recipe import MaskedTokens, PretrainRecipe
from cloze.export.train.run_options import RunOptions
from cloze.export.train.vocabulary import open_tokenizer
from cloze.model_store.heads import HEADS, Pooling
from cloze.model_store.heads.head import Frozen

_POSITIONS = "encoder.embeddings.position.weight"


def start_from(
    checkpoint: Checkpoint,
    heads: Iterable[str],
    *,
    dropout: float,
    seed: int,
    max_positions: int | None = None,
    options: Mapping[str, Frozen] | None = None,
) -> Model:
    """Build a model with the given heads and dropout from the weights of a checkpoint.

    Args:
        heads: heads of the new model; a head that the checkpoint lacks gets random weights.
        max_positions: positions of the new model, at least the checkpoint's; the further ones are
            copies, see `repeated_positions`. None: as many as the checkpoint has.
        options: labels of heads; a classifier of other labels than the checkpoint's gets random
            weights. None: the checkpoint's labels.

    Raises:
        TrainError: the checkpoint's family has no such head.
    """
    heads = tuple(heads)
    family = FAMILIES[checkpoint.model.config.family]
    for head in heads:
        if head not in family.heads:
            raise TrainError(f"a {family.name} has no head for {HEADS[head].task}")
    torch.manual_seed(seed)
    positions = max_positions or checkpoint.model.config.max_positions
    config = replace(checkpoint.model.config, dropout=dropout, max_positions=positions)
    model = Model(config, heads, {**checkpoint.model.options, **(options or {})})
    initialise(model)
    names = model.state_dict().keys()
    relabelled = tuple(
        f"{head}.classifier."
        for head, labels in model.options.items()
        if labels != checkpoint.model.options.get(head)
    )
    weights = {
        name: tensor
        for name, tensor in checkpoint.model.state_dict().items()
        if name in names and not name.startswith(relabelled)
    }
    weights |= _shared_pooler(checkpoint, names, weights.keys())
    if _POSITIONS in weights:
        weights[_POSITIONS] = repeated_positions(weights[_POSITIONS], positions)
    model.load_state_dict(weights, strict=False)
    return model


def _shared_pooler(
    checkpoint: Checkpoint, names: Collection[str], filled: Collection[str]
) -> dict[str, Tensor]:
    """Return the pooler of next sentence for a classifier without one (Devlin et al. 2019)."""
    if checkpoint.model.next_sentence is None:
        return {}
    tensors = checkpoint.model.next_sentence.state_dict(prefix="sequence_classification.")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if ".pooler." in name and name in names and name not in filled
    }


def repeated_positions(positions: Tensor, length: int) -> Tensor:
    """Return the position embeddings [length, H] that begin with ``positions`` [S, H].

    The further ones repeat the embeddings 1 to S - 1. Position 0 always holds ``[CLS]``, so its
    embedding is not repeated.
    """
    rows = torch.arange(length, device=positions.device)
    trained = len(positions)
    return positions[torch.where(rows < trained, rows, 1 + (rows - 1) % (trained - 1))]


def open_source(source: str, recipe: PretrainRecipe, vocabulary: Path | None) -> Checkpoint:
    """Load the checkpoint that pre-training continues from.

    Args:
        vocabulary: folder of a vocabulary, which must equal the checkpoint's; None: not given.

    Raises:
        TrainError: the recipe or the vocabulary contradicts the checkpoint.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    _check_recipe(recipe, checkpoint)
    if vocabulary:
        check_vocabulary(open_tokenizer(vocabulary), checkpoint, vocabulary, "--vocab")
    check_kept_embeddings(recipe.pretraining, checkpoint)
    return checkpoint


def _check_recipe(recipe: PretrainRecipe, checkpoint: Checkpoint) -> None:
    config = checkpoint.model.config
    given_sizes = sorted(recipe.model.model_fields_set - {"dropout", "max_tokens"})
    longest, positions = (
        max(phase.tokens for phase in recipe.phases),
        _positions(recipe, checkpoint),
    )
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
    if positions < config.max_positions:
        raise TrainError(
            f"[model] max_tokens = {positions} is less than the checkpoint's "
            f"{config.max_positions} positions; positions are only added"
        )
    if longest > positions:
        raise TrainError(
            f"a phase of {longest} tokens exceeds the checkpoint's {positions} positions; "
            f"[model] max_tokens = {longest} adds positions"
        )


def _positions(recipe: PretrainRecipe, checkpoint: Checkpoint) -> int:
    """Return the positions of the new model: those of the recipe if it names them."""
    if "max_tokens" in recipe.model.model_fields_set:
        return recipe.model.max_tokens
    return checkpoint.model.config.max_positions


def check_vocabulary(
    given: CheckpointTokenizer, checkpoint: Checkpoint, folder: Path | str, option: str
) -> None:
    """Check that a vocabulary is the checkpoint's.

    Raises:
        TrainError: it is another vocabulary.
    """
    given_tokens = given.tokenizer.get_vocab()
    source_tokens = checkpoint.tokenizer.tokenizer.get_vocab()
    if given_tokens != source_tokens:
        raise TrainError(
            f"the vocabulary in {folder} ({len(given_tokens):,} tokens) is not the checkpoint's "
            f"({len(source_tokens):,} tokens); leave {option} out, or train from nothing"
        )


def open_original(name: str, recipe: PretrainRecipe, checkpoint: Checkpoint) -> Checkpoint:
    """Load the checkpoint whose embeddings a continued run keeps.

    Raises:
        TrainError: the recipe keeps no embeddings, or the two checkpoints differ in vocabulary or
            hidden size.
        ExportError: the checkpoint cannot be loaded.
    """
    if not recipe.pretraining.keep_embeddings:
        raise TrainError("--embeddings-from needs keep_embeddings = true in the recipe")
    original = load_checkpoint(name)
    check_vocabulary(original.tokenizer, checkpoint, name, "--embeddings-from")
    kept, size = original.model.config.hidden_size, checkpoint.model.config.hidden_size
    if kept != size:
        raise TrainError(
            f"the embeddings of {name} have {kept:,} dimensions, those of the checkpoint {size:,}"
        )
    check_kept_embeddings(recipe.pretraining, original)
    return original


def check_kept_embeddings(recipe: MaskedTokens, checkpoint: Checkpoint) -> None:
    """Check that `KeptEmbeddings` can keep the embeddings of the checkpoint if the recipe asks.

    Raises:
        TrainError: the embedding is not the mean of the hidden states.
    """
    embedding = checkpoint.recipe
    is_mean = embedding.poolings == (Pooling.MEAN,) and not embedding.steps
    if recipe.keep_embeddings and not is_mean:
        raise TrainError(
            "keep_embeddings = true keeps the mean of the hidden states, but the checkpoint's "
            f"embedding is another ({embedding.pooling}, {len(embedding.steps)} dense layers)"
        )


def kept_recipe(checkpoint: Checkpoint) -> EmbeddingRecipe | None:
    """Return the embedding recipe of the checkpoint for the new checkpoint.

    The result is None if the recipe has dense layers, because their weights are not kept.
    """
    return None if checkpoint.recipe.steps else checkpoint.recipe


def continue_from(
    checkpoint: Checkpoint, original: Checkpoint, recipe: PretrainRecipe, options: RunOptions
) -> tuple[CheckpointTokenizer, MaskedText]:
    """Return the checkpoint's tokenizer, and its model with the heads that the recipe trains.

    Args:
        original: checkpoint whose embeddings are kept if the recipe asks; often the same.
    """
    heads = [MASKED_LM]
    if recipe.pretraining.sentence is not SentenceObjective.NONE:
        heads.append(NEXT_SENTENCE)
    model = start_from(
        checkpoint,
        heads,
        dropout=recipe.model.dropout,
        seed=recipe.seed,
        max_positions=_positions(recipe, checkpoint),
    )
    if created := [head for head in heads if getattr(checkpoint.model, head) is None]:
        names = ", ".join(created)
        options.report(f"heads that the checkpoint does not have, with random weights: {names}")
    if not kept_recipe(checkpoint):
        options.report("the dense layers after the checkpoint's pooling are not kept")
    kept_embeddings = None
    if recipe.pretraining.keep_embeddings:
        kept_embeddings = KeptEmbeddings(
            deepcopy(original.model).to(options.device), recipe.pretraining.embedding_tokens
        )
    return checkpoint.tokenizer, MaskedText(model, recipe.pretraining, kept_embeddings)
