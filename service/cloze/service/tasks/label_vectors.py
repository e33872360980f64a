"""The vectors of labels, which the encoder of labels of a bi-encoder computes apart from texts.

`LabelCache` keeps the vectors of recent labels. Those that are missing are computed before the
texts of a request run.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np

from cloze.model_store import Manifest
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import embedding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.service.core import Float32
from cloze.service.text.tokenizer import Tokenizer

_CACHE_BYTES: Final = 2**26
"""Most bytes of the vectors that a model keeps, for example 26,000 of 512 numbers."""

_ENTRY_BYTES: Final = 512
"""Bytes of a label and its place in the cache, without its vector."""


@dataclass(slots=True)
class LabelVectors:
    """The vectors of a request's labels.

    Attributes:
        array: float32 [l, d]. The rows of missing labels are filled before any text runs.
        missing: the row and the encoding of each label whose vector is not known.
    """

    array: Float32
    missing: dict[str, tuple[int, Encoding]]

    @property
    def missing_encodings(self) -> list[Encoding]:
        """What the encoder of labels reads to compute the vectors that are missing."""
        return [encoding for _, encoding in self.missing.values()]

    @property
    def tokens(self) -> int:
        """Number of tokens of the missing labels."""
        return sum(len(encoding) for encoding in self.missing_encodings)


class LabelCache:
    """The vectors of recent labels of one model. Any thread may call the methods.

    Args:
        manifest: of the encoder of labels.

    Attributes:
        max_tokens: most tokens of a label, with the special tokens.
    """

    def __init__(
        self, manifest: Manifest, tokenizer: Tokenizer, most_bytes: int = _CACHE_BYTES
    ) -> None:
        assert manifest.embedding is not None  # else the bundle was refused
        self._size, self._tokenizer = manifest.embedding.dimensions, tokenizer
        self.max_tokens = manifest.limits.max_tokens
        self._most = most_bytes // (4 * self._size + _ENTRY_BYTES)
        self._lock = Lock()
        self._vectors: OrderedDict[str, Float32] = OrderedDict()  # the last used one is the last

    def look_up(self, labels: Sequence[str]) -> LabelVectors:
        """Return the vectors of different labels, as far as they are known."""
        found = LabelVectors(np.zeros((len(labels), self._size), np.float32), {})
        rows: dict[str, int] = {}
        with self._lock:
            for row, label in enumerate(labels):
                if (vector := self._vectors.get(label)) is None:
                    rows[label] = row
                else:
                    self._vectors.move_to_end(label)
                    found.array[row] = vector
        for (label, row), ids in zip(rows.items(), self._tokenizer.word_ids([*rows]), strict=True):
            encoding = self._tokenizer.encode(ids, {embedding.HEAD.name: EmbeddingRequest()})
            found.missing[label] = row, encoding
        return found

    def fill(self, labels: LabelVectors, outputs: Sequence[HeadOutputs]) -> None:
        """Fill the missing rows from what the encoder returned, and keep copies of the vectors.

        The labels that were not used for longest make room.
        """
        for (label, (row, _)), output in zip(labels.missing.items(), outputs, strict=True):
            labels.array[row] = output[embedding.HEAD.name].array
            with self._lock:
                self._vectors[label] = labels.array[row].copy()
                while len(self._vectors) > self._most:
                    self._vectors.popitem(last=False)
