"""Where fine-tuning begins: a checkpoint's encoder, with fresh heads where it lacks those that are wanted."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from export.checkpoint import Checkpoint
from export.models import Model
from export.train.objectives import initialise


@dataclass(frozen=True, slots=True)
class Start:
    """A model to train and the tokenizer it goes with.

    Attributes:
        created: the heads that the checkpoint does not have.
    """

    model: Model
    tokenizer: Tokenizer
    created: tuple[str, ...] = ()


def start_from(checkpoint: Checkpoint, heads: Iterable[str], *, dropout: float, seed: int) -> Start:
    """The checkpoint's weights in a model with just these heads and this dropout; a head that it lacks is new."""
    torch.manual_seed(seed)
    heads = tuple(heads)
    model = Model(replace(checkpoint.model.config, dropout=dropout), heads)
    initialise(model)
    ours = model.state_dict()
    model.load_state_dict(
        {name: tensor for name, tensor in checkpoint.model.state_dict().items() if name in ours},
        strict=False,
    )
    created = tuple(head for head in heads if getattr(checkpoint.model, head) is None)
    return Start(model, checkpoint.tokenizer.tokenizer, created)
