"""Shows a model's guesses for a few masked tokens at the end of a run."""

import numpy as np
import torch

from cloze.export.evaluation.scorer import score_masks
from cloze.export.model import Model, TorchScorer
from cloze.export.tokenizer import CheckpointTokenizer
from cloze.export.train.batches import TextBatch

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
        ids = batch.input_ids[row : row + 1, :size].numpy()
        types = batch.token_type_ids[row : row + 1, :size].numpy()
        best, _ = score_masks(
            scorer, ids, types, np.array([position]), np.array([label]), k=_GUESSES
        )
        first = max(1, position - _CONTEXT)
        before = tokenizer.readable(ids[0, first:position].tolist())
        after = tokenizer.readable(ids[0, position + 1 : position + _CONTEXT + 1].tolist())
        guessed = ", ".join(tokenizer.readable([token]) for token in best[0].tolist())
        lines.append(f"  {before} ____ {after}\n      was {was!r}, guessed {guessed}")
    return lines
