"""The vectors of labels, which the encoder of labels of a bi-encoder computes apart from texts.

`LabelCache` keeps the vectors of recent labels of each client, which is an API key or an address:
so no client can find out by the time or the tokens of an answer which labels another one uses.
Vectors that are missing are computed before the texts of a request run.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
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
"""Bytes of the key of a label and its place in the cache, without its vector."""


@dataclass(slots=True)
class LabelVectors:
    """The vectors of a request's labels.

    Attributes:
        array: float32 [l, d]. The rows of missing labels are filled before any text runs.
        missing: the row and the encoding of each label whose vector is not known, by its key.
    """

    array: Float32
    missing: dict[bytes, tuple[int, Encoding]]

    @property
    def missing_encodings(self) -> list[Encoding]:
        """What the encoder of labels reads to compute the vectors that are missing."""
        return [encoding for _, encoding in self.missing.values()]

    @property
    def tokens(self) -> int:
        """Number of tokens of the missing labels."""
        return sum(len(encoding) for encoding in self.missing_encodings)


class LabelCache:
    """The vectors of recent labels of one model, by client. Any thread may call the methods.

    The keys are hashes of clients and labels, so no text stays in memory.

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
        self._secret = os.urandom(blake2b.MAX_KEY_SIZE)
        self._vectors: OrderedDict[bytes, Float32] = OrderedDict()  # the last used one is the last

    def look_up(self, client: str, labels: Sequence[str]) -> LabelVectors:
        """Return the vectors of different labels, as far as this client has used them."""
        found = LabelVectors(np.zeros((len(labels), self._size), np.float32), {})
        secret = blake2b(client.encode(), key=self._secret).digest()
        keys = [blake2b(label.encode(), key=secret, digest_size=16).digest() for label in labels]
        rows = []
        with self._lock:
            for row, key in enumerate(keys):
                if (vector := self._vectors.get(key)) is None:
                    rows.append(row)
                else:
                    self._vectors.move_to_end(key)
                    found.array[row] = vector
        ids_of = self._tokenizer.word_ids([labels[row] for row in rows])
        for row, ids in zip(rows, ids_of, strict=True):
            encoding = self._tokenizer.encode(ids, {embedding.HEAD.name: EmbeddingRequest()})
            found.missing[keys[row]] = row, encoding
        return found

    def fill(self, labels: LabelVectors, outputs: Sequence[HeadOutputs]) -> None:
        """Fill the missing rows from what the encoder returned, and keep copies of the vectors.

        The labels that were not used for longest make room.
        """
        for (key, (row, _)), output in zip(labels.missing.items(), outputs, strict=True):
            labels.array[row] = output[embedding.HEAD.name].array
            with self._lock:
                self._vectors[key] = labels.array[row].copy()
                while len(self._vectors) > self._most:
                    self._vectors.popitem(last=False)
