"""Published architectures with random weights.

The cost of a batch depends on the sizes of the matrices, not on the values of the weights.
"""

from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import BertWordPieceTokenizer
from transformers import AutoModel, BertConfig, DistilBertConfig, PreTrainedConfig

from cloze.export.blocks.config import EncoderConfig
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.tokenizer_files import SPECIAL_TOKENS
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.manifest import Precision

SIZES: dict[str, PreTrainedConfig] = {
    "bert-base": BertConfig(),
    "bert-large": BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "distilbert": DistilBertConfig(),
    "tiny": BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
    ),
}
"""Devlin et al. 2019, section 3; Sanh et al. 2019, section 3; ``tiny`` tests the measurement."""

_SQUAD_PERCENTILES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100)
_SQUAD_LENGTHS = (41, 85, 107, 126, 138, 149, 162, 177, 195, 217, 260, 301, 378, 384, 384)
"""Percentiles of the tokens per question with its paragraph.

Of 9,231 questions of SQuAD 1.1 in BERT's uncased vocabulary, cut to 384 tokens; the mean is 174.
"""


def squad_lengths(count: int, longest: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw lengths in tokens with the distribution of SQuAD.

    Args:
        longest: tokens of the model's longest sequence; if SQuAD's longest does not fit, all
            lengths are scaled down by the same factor.

    Returns:
        int64 [count].
    """
    percentiles = np.random.default_rng(seed).uniform(0, 100, count)
    lengths = np.interp(percentiles, _SQUAD_PERCENTILES, _SQUAD_LENGTHS)
    scale = min(1.0, longest / max(_SQUAD_LENGTHS))
    return np.maximum(3, np.rint(lengths * scale).astype(np.int64))


def flops(config: EncoderConfig, lengths: Sequence[int] | NDArray[np.int64]) -> float:
    """Count the floating-point operations of the encoder; a multiply-add counts as two.

    The count includes the matrix products and the two products of attention, ``4 S H`` per token
    and layer. The count excludes embeddings, norms and heads.
    """
    sizes = np.asarray(lengths, np.float64)
    matrices = 2 * (4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size)
    return float(
        config.layers * (matrices * sizes.sum() + 4 * config.hidden_size * np.square(sizes).sum())
    )


def random_bundle(name: str, folder: Path, *, cuda: bool) -> tuple[Bundle, Checkpoint]:
    """Export an embedding model with random weights, verified against torch as every bundle is.

    Args:
        cuda: export the packed fp16 graph too, and compare the graph with torch on CUDA.

    Returns:
        The bundle, and the checkpoint that the bundle was exported from.

    Raises:
        ExportError: the graph does not agree with torch.
    """
    checkpoint = folder / f"{name}-checkpoint"
    torch.manual_seed(0)
    AutoModel.from_config(SIZES[name]).save_pretrained(checkpoint)  # type: ignore[no-untyped-call]
    vocabulary = _vocabulary(SIZES[name].vocab_size)
    BertWordPieceTokenizer(vocabulary).save(str(checkpoint / "tokenizer.json"))
    precisions = (Precision.FP16,) if cuda else ()
    options = ExportOptions(tasks=("embed",), precisions=precisions, cuda=cuda)
    bundle = export(str(checkpoint), name, Store(folder / "store"), options)
    return bundle, load_checkpoint(str(checkpoint))


def _vocabulary(size: int) -> dict[str, int]:
    """Return `size` tokens and their ids."""
    parts = (f"##{letter}" for letter in ascii_lowercase)
    tokens = [*SPECIAL_TOKENS.values(), *ascii_lowercase, *parts]
    # The remaining tokens consist of letters, because a number is not always one token.
    words = map("".join, product(ascii_lowercase, repeat=4))
    tokens += islice(words, size - len(tokens))
    return {token: number for number, token in enumerate(tokens)}
