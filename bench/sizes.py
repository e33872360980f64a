"""Published architectures with random weights: what a batch costs depends on sizes, not on what was learnt."""

from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint import Checkpoint, load_checkpoint
from export.models import EncoderConfig, Model
from export.publish import ExportOptions, export
from export.train.save import save_checkpoint
from export.train.vocabulary import SPECIAL_TOKENS, wordpiece
from model_store import Bundle, Store
from model_store.manifest import Precision


def _size(
    family: str,
    layers: int,
    hidden_size: int,
    heads: int,
    *,
    vocab_size: int = 30522,
    max_positions: int = 512,
) -> EncoderConfig:
    types = 2 if family == "bert" else 0
    return EncoderConfig(
        family,
        vocab_size,
        hidden_size,
        layers,
        heads,
        4 * hidden_size,
        max_positions=max_positions,
        type_vocab_size=types,
    )


SIZES = {
    "bert-base": _size("bert", 12, 768, 12),
    "bert-large": _size("bert", 24, 1024, 16),
    "distilbert": _size("distilbert", 6, 768, 12),
    "tiny": _size("bert", 2, 64, 2, vocab_size=1000, max_positions=64),
}
"""Devlin et al. 2019, section 3; Sanh et al. 2019, section 3; and one to try the measurement with."""

_SQUAD_PERCENTILES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100)
_SQUAD_LENGTHS = (41, 85, 107, 126, 138, 149, 162, 177, 195, 217, 260, 301, 378, 384, 384)
"""Tokens of question and paragraph in 9,231 questions of SQuAD 1.1, BERT's uncased vocabulary, cut to 384; their mean is 174."""


def squad_lengths(count: int, longest: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths in tokens, [count], distributed as SQuAD's; for a model of shorter sequences, all shorter in proportion."""
    drawn = np.interp(
        np.random.default_rng(seed).uniform(0, 100, count), _SQUAD_PERCENTILES, _SQUAD_LENGTHS
    )
    return np.maximum(3, np.rint(drawn * min(1.0, longest / max(_SQUAD_LENGTHS))).astype(np.int64))


def flops(config: EncoderConfig, lengths: Sequence[int] | NDArray[np.int64]) -> float:
    """Floating-point operations of the encoder on sequences of these lengths, a multiply-add being two.

    The matrix products, and attention's two products a layer, ``4 S H`` a token. Embeddings, norms and heads are not counted.
    """
    sizes = np.asarray(lengths, np.float64)
    matrices = 2 * (4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size)
    return float(
        config.layers * (matrices * sizes.sum() + 4 * config.hidden_size * np.square(sizes).sum())
    )


def random_bundle(name: str, folder: Path, *, cuda: bool) -> tuple[Bundle, Checkpoint]:
    """A bundle for embeddings of one of `SIZES`, verified against torch as every bundle is, and what it was exported from.

    Args:
        name: of the size, and of the bundle.
        folder: gets the checkpoint and the store.
        cuda: add the packed fp16 graph, and compare it as CUDA's kernels run it.

    Raises:
        ExportError: the graph does not agree with torch.
    """
    config = SIZES[name]
    torch.manual_seed(0)
    model = Model(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    # Words and not numbers, so that a word is a token.
    words = map("".join, product(ascii_lowercase, repeat=4))
    vocabulary = [*SPECIAL_TOKENS, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    vocabulary += islice(words, config.vocab_size - len(vocabulary))
    checkpoint = folder / f"{name}-checkpoint"
    save_checkpoint(
        model,
        wordpiece({token: number for number, token in enumerate(vocabulary)}, lowercase=True),
        checkpoint,
    )
    store = Store(folder / "store")
    precisions = (Precision.FP16,) if cuda else ()
    bundle = export(
        str(checkpoint),
        name,
        store,
        ExportOptions(tasks=("embed",), precisions=precisions, cuda=cuda),
    )
    return bundle, load_checkpoint(str(checkpoint))
