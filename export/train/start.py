"""The model that fine-tuning starts from: a checkpoint's encoder, and fresh heads where needed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from cloze.export.checkpoint import Checkpoint
from cloze.export.models import Model
from cloze.export.train.objectives import initialise


@dataclass(frozen=True, slots=True)
class Start:
    """A model to train and its tokenizer.

    Attributes:
        model: model with the requested heads.
        tokenizer: tokenizer of the checkpoint.
        created: names of the heads with random weights, which the checkpoint does not have.
    """

    model: Model
    tokenizer: Tokenizer
    created: tuple[str, ...] = ()


def start_from(checkpoint: Checkpoint, heads: Iterable[str], *, dropout: float, seed: int) -> Start:
    """Build a model with the given heads and dropout from the weights of a checkpoint.

    Args:
        checkpoint: source of the weights.
        heads: heads of the new model; a head that the checkpoint lacks gets random weights.
        dropout: dropout probability in training.
        seed: seed of the random weights.
    """
    torch.manual_seed(seed)
    heads = tuple(heads)
    config = replace(checkpoint.model.config, dropout=dropout)
    model = Model(config, heads, checkpoint.model.options)
    initialise(model)
    names = model.state_dict().keys()
    weights = {
        name: tensor for name, tensor in checkpoint.model.state_dict().items() if name in names
    }
    model.load_state_dict(weights, strict=False)
    created = tuple(head for head in heads if getattr(checkpoint.model, head) is None)
    return Start(model, checkpoint.tokenizer.tokenizer, created)
