"""Keeps the sentence embeddings of a checkpoint while its encoder learns another objective.

Sources: Li & Hoiem 2018, "Learning without Forgetting", section 3 (the outputs of the original
model on the new data are a target); Reimers & Gurevych 2020, "Making Monolingual Sentence
Embeddings Multilingual using Knowledge Distillation", section 3.
Shapes: B sequences of S tokens, H hidden size, N texts of L tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cloze.export.model import Model
from cloze.export.train.batches import TextBatch

_MIN_TOKENS = 8
"""Shortest length in tokens at which embeddings are compared."""

_EVALUATION_TOKENS = 32
"""Fixed length in tokens during evaluation, so that every evaluation measures the same texts."""


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return unit-length means over real tokens.

    Args:
        hidden: [B, S, H].
        mask: bool [B, S], True for real tokens.

    Returns:
        float32 [B, H].
    """
    weights = mask[:, :, None].to(hidden.dtype)
    return F.normalize(((hidden * weights).sum(1) / weights.sum(1)).float(), dim=-1)


def unmasked_texts(batch: TextBatch, tokens: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first texts of a batch without masking, cut to ``length`` tokens.

    Args:
        tokens: upper bound on N * L, unless one text exceeds this bound.
        length: L.

    Returns:
        input_ids int64 [N, L]; bool [N, L], True for real tokens. Each text ends with ``[SEP]``.
    """
    rows = max(1, tokens // length)
    flat = batch.input_ids.flatten().clone()
    flat[batch.positions] = batch.labels
    originals = flat.view_as(batch.input_ids)[:rows]
    sizes = batch.first_tokens[:rows]  # [N]
    in_first_text = torch.arange(originals.shape[1], device=sizes.device) < sizes[:, None]
    separators = originals.gather(1, sizes[:, None] - 1)[:, 0]
    input_ids, mask = originals[:, :length].clone(), in_first_text[:, :length]
    input_ids[:, -1] = torch.where(sizes > length, separators, input_ids[:, -1])
    return input_ids * mask, mask


class KeptEmbeddings:
    """The embeddings of the frozen original model, as targets for the trained model.

    Args:
        tokens: upper bound on the tokens per batch to compare, which bounds the cost.
    """

    def __init__(self, original: Model, tokens: int) -> None:
        self._original = original.eval().requires_grad_(False)
        self._tokens = tokens

    def cosine(self, model: Model, batch: TextBatch) -> Tensor:
        """Return the mean cosine of both models' embeddings of the same unmasked texts.

        In training, the text length is drawn per batch, uniformly on a logarithmic scale, up to
        what the original model can read. Padding tokens are ignored.

        Returns:
            A 0-d tensor.
        """
        longest = min(batch.input_ids.shape[1], self._original.config.max_positions)
        length = min(_EVALUATION_TOKENS, longest)
        if model.training and longest > _MIN_TOKENS:
            length = int(_MIN_TOKENS * (longest / _MIN_TOKENS) ** float(torch.rand(())))
        input_ids, mask = unmasked_texts(batch, self._tokens, length)
        with torch.no_grad():
            targets = mean_pool(self._original(input_ids, None, mask), mask)  # [N, H]
        return (mean_pool(model(input_ids, None, mask), mask) * targets).sum(1).mean()
