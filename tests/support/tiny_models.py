"""Models of a few numbers with every head, and what a graph of them is made from."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig, RelativePositions
from cloze.export.heads.embedding import EmbeddingRecipe, Projection
from cloze.export.model import Model
from cloze.model_store.heads import (
    HEADS,
    Pooling,
    entities,
    lexical,
    multi_vector,
    sequence_classification,
    token_classification,
)
from cloze.model_store.sequences import SpecialTokens

LABELS = {
    sequence_classification.HEAD.name: sequence_classification.SequenceLabels(
        labels=("a", "b", "c"), problem_type="single_label_classification"
    ),
    token_classification.HEAD.name: token_classification.TokenLabels(labels=("O", "B", "I", "X")),
    multi_vector.HEAD.name: multi_vector.LateInteraction(
        dimensions=6, query_tokens=8, document_tokens=9
    ),
    lexical.HEAD.name: lexical.LexicalOptions(skipped_ids=(0, 2)),
    entities.HEAD.name: entities.EntityOptions(
        kind=entities.EntityKind.SPAN, max_width=3, max_len=8, ent_id=6, sep_id=7
    ),
}

TOKENIZER: Any = SimpleNamespace(size=30, special=SpecialTokens(2, 3, 4), mask_id=4)


OWN_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "ernie": {"type_vocab_size": 3},
    "electra": {"type_vocab_size": 2, "embedding_size": 12},
    "albert": {
        "type_vocab_size": 2, "embedding_size": 12, "layers": 4, "layer_groups": 2,
        "activation": "gelu_new",
    },
    "modernbert": {
        "layers": 3, "local_layers": (False, True, True), "window": 3, "gated": True,
        "rotary_base": 60.0, "local_rotary_base": 20.0, "classifier_pooling": "mean",
        "without_bias": frozenset({"attention", "up", "down", "norm", "head"}),
    },
    "mobilebert": {
        "type_vocab_size": 2, "embedding_size": 12, "bottleneck": 8, "feed_forwards": 3,
        "activation": "relu",
    },
    "nomic_bert": {
        "type_vocab_size": 2, "gated": True, "activation": "silu", "rotary_base": 50.0,
        "without_bias": frozenset({"attention", "up", "down"}),
    },
    "gte": {
        "type_vocab_size": 2, "gated": True, "rotary_base": 50.0, "rotary_factor": 4.0,
        "without_bias": frozenset({"up"}),
    },
    "deberta-v2": {
        "position_embeddings": False,
        "relative_positions": RelativePositions(
            distances=24, buckets=8, terms=("c2p", "p2c"), norm=True
        ),
    },
}  # fmt: skip
"""The sizes that are particular to a family; the others have no token types."""


def config(family: str = "bert", **sizes: Any) -> EncoderConfig:
    fields: dict[str, Any] = {
        "vocab_size": 30, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 24,
        "max_positions": 24, "type_vocab_size": 0, "layer_norm_eps": 1e-3,
    }  # fmt: skip
    return EncoderConfig(family=family, **(fields | OWN_SIZES.get(family, {}) | sizes))


@torch.no_grad()
def model(family: str = "bert", **sizes: Any) -> Model:
    """Return a model whose every parameter matters: no bias is 0, no scale is 1."""
    made = Model(config(family, **sizes), list(HEADS), LABELS).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return made


def projected(pooling: Pooling = Pooling.MEAN) -> EmbeddingRecipe:
    """Return a recipe with two layers after its pooling; the first one has a tanh."""
    generator = torch.Generator().manual_seed(6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    first = Projection(drawn(12, 16), drawn(12), "Tanh")
    return EmbeddingRecipe(pooling, (first, Projection(drawn(10, 12), None)))


def checkpoint(made: Model, recipe: EmbeddingRecipe) -> Any:
    """Return what verification needs of a checkpoint."""
    return SimpleNamespace(model=made, recipe=recipe, tokenizer=TOKENIZER, options={})
