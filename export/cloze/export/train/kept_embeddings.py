"""Keeps the sentence embeddings of a checkpoint while its encoder learns another objective.

Sources: Li & Hoiem 2018, "Learning without Forgetting", section 3 (the outputs of the original
model on the new data are a target); Reimers & Gurevych 2020, "Making Monolingual Sentence
Embeddings Multilingual using Knowledge Distillation", section 3.
Shapes: B sequences of S tokens, H hidden size, N texts of L tokens,
D dimensions of an embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from transformers import PreTrainedModel

from cloze.export.errors import TrainError
from cloze.export.train.batches import TextBatch
from cloze.export.train.folder import MODULES, Folder, max_tokens, one_line_errors
from cloze.export.train.recipe import Pretraining

_MIN_TOKENS = 8
"""Shortest length in tokens at which embeddings are compared."""

_EVALUATION_TOKENS = 32
"""Fixed length in tokens during evaluation, so that every evaluation measures the same texts."""


def open_sentences(source: Folder) -> SentenceTransformer:
    """Return a folder's model of sentence-transformers; without modules, it has mean pooling.

    Raises:
        TrainError: a module is missing or damaged, has only pickled weights or needs code of the
            folder, or the first one is no model of transformers.
    """
    for pickle in source.card.rglob("pytorch_model.bin"):
        if pickle.parent != source.path and not pickle.with_name("model.safetensors").is_file():
            raise TrainError(f"{pickle} is never loaded, since it can run code")
    with one_line_errors(source.card):
        sentences = SentenceTransformer(
            str(source.card),
            device="cpu",
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": torch.float32},
        )
    if not isinstance(sentences[0], Transformer):
        raise TrainError(f"{source.card}: the first module is no Transformer")
    return sentences


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
    """The embeddings of the frozen original model, as targets for the trained encoder."""

    def __init__(self, original: SentenceTransformer, recipe: Pretraining) -> None:
        self._original = original.eval().requires_grad_(False)
        self._recipe = recipe

    def loss(self, encoder: Any, batch: TextBatch, figures: dict[str, Tensor]) -> Tensor:
        """Return the weighted cosine distance, and add the cosine to the figures."""
        figures["embedding_cosine"] = cosine = self.cosine(encoder, batch)
        return self._recipe.embedding_weight * (1 - cosine)

    def cosine(self, encoder: Any, batch: TextBatch) -> Tensor:
        """Return the mean cosine of both models' embeddings of the same unmasked texts.

        In training, the text length is drawn per batch, uniformly on a logarithmic scale, up to
        what the original model can read. Padding tokens are ignored.
        """
        original: Any = self._original[0].model
        longest = min(batch.input_ids.shape[1], max_tokens(original))
        length = min(_EVALUATION_TOKENS, longest)
        if encoder.training and longest > _MIN_TOKENS:
            length = int(_MIN_TOKENS * (longest / _MIN_TOKENS) ** float(torch.rand(())))
        input_ids, mask = unmasked_texts(batch, self._recipe.embedding_tokens, length)
        with torch.no_grad():
            targets = self._embed(original, input_ids, mask)  # [N, D]
        return (self._embed(encoder, input_ids, mask) * targets).sum(1).mean()

    def _embed(self, encoder: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings float32 [N, D] of length 1, by the modules of the original model."""
        hidden = encoder(input_ids=input_ids, attention_mask=mask)[0]
        features = {"token_embeddings": hidden, "attention_mask": mask.long()}
        for module in list(self._original)[1:]:
            features = module(features)
        return F.normalize(features["sentence_embedding"].float(), dim=-1)


def kept_embeddings(
    original: Folder, recipe: Pretraining, device: torch.device
) -> KeptEmbeddings | None:
    """Return the embeddings of a folder as a target; None: the recipe does not keep them."""
    if not recipe.keep_embeddings:
        return None
    return KeptEmbeddings(open_sentences(original).to(device), recipe)


def with_modules(network: PreTrainedModel, source: Folder | None) -> Any:
    """Return a network as the encoder of a folder's model of sentence-transformers, if it is one.

    The folder's pooling, its layers after the pooling and its prompts are kept.
    """
    if source is None or not (source.card / MODULES).is_file():
        return network
    sentences = open_sentences(source)
    sentences[0].model = network
    return sentences
