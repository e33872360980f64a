"""Averages the weights of checkpoints that were fine-tuned from one checkpoint.

Source: Wortsman et al. 2022, "Model soups". The average of runs with different settings is often
better than each of them, and costs as much as one of them to serve.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from cloze.export.errors import TrainError
from cloze.export.heads import EMBEDDING
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.train.card import CARD, common_license, front_matter
from cloze.export.train.save import save_checkpoint


@torch.inference_mode()
def average(sources: Sequence[str], folder: Path, license_name: str | None = None) -> Path:
    """Write the mean of the weights of two or more checkpoints as a new checkpoint.

    It has the heads of the first one. Each weight is the mean over the checkpoints that have it, so
    the mean of a fine-tuned model and the one that it started from (Wortsman et al. 2022, "Robust
    fine-tuning of zero-shot models") keeps the heads that only the first one has.

    Args:
        license_name: its licence; None: the one that all checkpoints name, if they do.

    Returns:
        The folder.

    Raises:
        TrainError: there is only one checkpoint; or one has a head that the first one lacks; or
            they differ in their sizes, labels or tokens; or have dense layers after their pooling.
        ExportError: a checkpoint cannot be loaded.
    """
    if len(sources) < 2:
        raise TrainError("an average needs at least two checkpoints")
    checkpoints = [load_checkpoint(source) for source in sources]
    first, *others = checkpoints
    if first.recipe.steps:
        raise TrainError(f"{sources[0]} has dense layers after its pooling, which are not averaged")
    vocabulary = first.tokenizer.tokenizer.get_vocab()
    given = {name: [tensor.double()] for name, tensor in first.model.state_dict().items()}
    for source, other in zip(sources[1:], others, strict=True):
        weights = other.model.state_dict()
        if any(
            name not in given or tensor.shape != given[name][0].shape
            for name, tensor in weights.items()
        ):
            raise TrainError(f"{source} has other sizes or other heads than {sources[0]}")
        if not other.model.options.items() <= first.model.options.items():
            raise TrainError(f"{source} has other labels than {sources[0]}")
        if other.tokenizer.tokenizer.get_vocab() != vocabulary:
            raise TrainError(f"{source} has another vocabulary than {sources[0]}")
        for name, tensor in weights.items():
            given[name].append(tensor.double())
    means = {name: torch.stack(tensors).mean(0).float() for name, tensors in given.items()}
    first.model.load_state_dict(means)
    embeds = EMBEDDING in {head.name for head in first.default_heads}
    recipe = first.recipe if embeds else None
    save_checkpoint(first.model, first.tokenizer, folder, embedding=recipe)
    names = "\n".join(f"- {source}" for source in sources)
    matter = front_matter(license_name or common_license(checkpoints))
    (folder / CARD).write_text(f"{matter}# The average of {len(sources)} checkpoints\n\n{names}\n")
    return folder
