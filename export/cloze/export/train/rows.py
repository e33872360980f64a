"""Texts as a model reads them: tokens in, batches out, and what a model computes of held-out rows.

Shapes: B sequences of S tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig

from cloze.export.errors import DataError
from cloze.export.measure.labelled import LabelledText, TaggedSentence
from cloze.export.train.batches import PaddedBatch, padded, padded_length
from cloze.export.train.folder import has_token_types
from cloze.export.train.task_recipe import LabelSettings
from cloze.model_store.sequences import without_space

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Row:
    """A text, a pair or a sentence as the model reads it.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        word_of: int64 [S], the number of each token's word in a sentence; -1 outside of words.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    word_of: NDArray[np.int64]

    def first_tokens(self) -> NDArray[np.int64]:
        """Return the index of the first token of each word that has one."""
        before = np.concatenate([[-1], self.word_of[:-1]])
        return np.flatnonzero((self.word_of >= 0) & (self.word_of != before))


def encode_rows(
    rows: Sequence[LabelledText | TaggedSentence],
    text: Tokenizer,
    settings: LabelSettings,
) -> list[Row]:
    """Return texts, pairs, and sentences whose words are joined by spaces.

    Of a long pair, the longer text is cut.

    Raises:
        DataError: a text is too long and must not be cut, or has no token.
    """
    inputs = [_input(row) for row in rows]
    text.enable_truncation(settings.tokens)
    encodings = text.encode_batch(inputs)
    text.no_truncation()
    for row, source, encoding in zip(rows, inputs, encodings, strict=True):
        if encoding.overflowing and settings.long_text == "error":
            length = len(text.encode_batch([source])[0].ids)
            raise DataError(
                f"{row.at}: {_first(source)[:60]!r} has {length} tokens, the limit is "
                f'{settings.tokens}; shorten it, or set long_text = "truncate"'
            )
        if 0 not in encoding.sequence_ids:
            raise DataError(f"{row.at}: {_first(source)[:60]!r} has no token of the vocabulary")
    return [_row(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]


def _input(row: LabelledText | TaggedSentence) -> str | tuple[str, str]:
    if isinstance(row, TaggedSentence):
        return " ".join(row.words)
    return row.text if row.text_pair is None else (row.text, row.text_pair)


def _first(source: str | tuple[str, str]) -> str:
    return source if isinstance(source, str) else source[0]


def _row(row: LabelledText | TaggedSentence, encoding: Encoding) -> Row:
    word_of = np.full(len(encoding.ids), -1)
    if isinstance(row, TaggedSentence):
        ends = np.cumsum([len(word) + 1 for word in row.words])
        is_text = np.array([number == 0 for number in encoding.sequence_ids])
        offsets = without_space(" ".join(row.words), encoding.offsets)
        starts = np.array([start for start, _ in offsets])
        word_of[is_text] = np.searchsorted(ends, starts[is_text], "right")
    ids, types = (np.array(each, np.int64) for each in (encoding.ids, encoding.type_ids))
    return Row(ids, types, word_of)


def model_inputs(batch: PaddedBatch, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the arguments of a model of transformers."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if has_token_types(config):
        inputs["token_type_ids"] = batch.token_type_ids
    return inputs


def outputs_of(
    network: torch.nn.Module,
    rows: Sequence[Any],
    compute: Callable[[PaddedBatch], Tensor],
    *,
    size: int,
    max_tokens: int,
) -> list[Floats]:
    """Return what a network in evaluation mode computes of rows, in order.

    The processes of a run share the batches, and each gets the results of all.

    Args:
        rows: with ``input_ids`` and ``token_type_ids``.
        compute: batch -> [B, L], or [B, S, L] without the padding in the result.
        size: rows per batch.
        max_tokens: the longest sequence of the network.
    """
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    state, device = PartialState(), next(network.parameters()).device
    network.eval()
    results: dict[int, Floats] = {}
    with torch.inference_mode():
        for group in groups[state.process_index :: state.num_processes]:
            chosen = [rows[index] for index in group]
            length = padded_length(len(chosen[-1].input_ids), max_tokens)
            ids, types = ([getattr(row, name) for row in chosen] for name in _FIELDS)
            batch = PaddedBatch(*padded(ids, types, length)).to(device)
            for index, row, output in zip(group, chosen, compute(batch).cpu(), strict=True):
                array: Floats = output.float().numpy()
                results[int(index)] = array[: len(row.input_ids)] if array.ndim == 2 else array
    shared: Mapping[int, Floats] = dict(gather_object(list(results.items())))
    return [shared[index] for index in range(len(rows))]


_FIELDS = ("input_ids", "token_type_ids")
