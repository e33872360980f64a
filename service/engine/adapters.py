"""The loaded adapters of an engine, and the batches of sequences that ask for them.

The matrices of all adapters are rows of a few tables, one per width. A table reserves addresses for
as many bytes as adapters may have together; memory is taken as rows are written.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import adapter_section
from cloze.model_store.adapter import Adapter, Head
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads.head import ArrayResult
from cloze.model_store.layouts import Feeds, Int32
from cloze.service.core import AdapterUnavailable, StartupError
from cloze.service.engine.session import Session

log = logging.getLogger("cloze")

ReadAdapter = Callable[[], Adapter]
"""Reads an adapter again; raises if it is not what was checked."""


class _NoRoom(ValueError):
    """Adapters need more bytes than the limit while others are in use."""


@dataclass(slots=True)
class _Loaded:
    """An adapter in the tables.

    Attributes:
        rows: int32 [2, N, R], the rows of A and of B of each layer; 0 where the rank is lower.
        owned: the rows by width, to be freed.
        size: bytes.
        users: number of batches that run with the adapter.
    """

    rows: Int32
    owned: dict[int, list[int]]
    head: Head | None
    size: int
    users: int = 0


class LoadedAdapters:
    """Adapters by key. They are read at their first use, and evicted by their last one.

    Args:
        most_bytes: most bytes of all loaded adapters.
    """

    def __init__(self, support: AdapterSupport, most_bytes: int) -> None:
        self.layers, self._most_bytes = support.count, most_bytes
        self.tables = {
            width: np.zeros((1 + most_bytes // (4 * width), width), np.float32)
            for width in support.widths
        }
        self._next = dict.fromkeys(self.tables, 1)
        self._free: dict[int, list[int]] = {width: [] for width in self.tables}
        self._readers: dict[str, ReadAdapter] = {}
        self._loaded: dict[str, _Loaded] = {}  # the longest unused first
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """The bytes of the loaded adapters."""
        return sum(one.size for one in self._loaded.values())

    @property
    def keys(self) -> list[str]:
        """The keys of the loaded adapters, the longest unused first."""
        return list(self._loaded)

    def add(self, key: str, read: ReadAdapter) -> None:
        """Make an adapter known, without reading it."""
        with self._changed:
            self._readers[key] = read

    def forget(self, key: str) -> None:
        """Free an adapter that no request asks for any more."""
        with self._changed:
            self._readers.pop(key, None)
            if (one := self._loaded.get(key)) is not None and not one.users:
                self._drop(key)

    @contextmanager
    def using(self, keys: Sequence[str]) -> Iterator[list[_Loaded | None]]:
        """Yield the adapter of each key, None for ""; they stay loaded meanwhile.

        If the adapters of other batches leave no room, wait until those batches have run. Who waits
        holds no adapter.

        Raises:
            AdapterUnavailable: an adapter cannot be read.
            ValueError: they need more bytes than the limit.
        """
        with self._changed:
            while (adapters := self._take(dict.fromkeys(filter(None, keys)))) is None:
                self._changed.wait()
        try:
            yield [adapters.get(key) for key in keys]
        finally:
            with self._changed:
                self._release(adapters)

    def _take(self, keys: Iterable[str]) -> dict[str, _Loaded] | None:
        """Load adapters and count their use; None: other batches leave no room for them."""
        taken: dict[str, _Loaded] = {}
        try:
            for key in keys:
                taken[key] = one = self._load(key)
                one.users += 1
        except BaseException as error:
            self._release(taken)
            if isinstance(error, _NoRoom) and any(one.users for one in self._loaded.values()):
                return None
            raise
        return taken

    def _release(self, adapters: Mapping[str, _Loaded]) -> None:
        for key, one in adapters.items():
            one.users -= 1
            if not one.users and key not in self._readers:  # forgotten meanwhile
                self._drop(key)
        self._changed.notify_all()

    def _load(self, key: str) -> _Loaded:
        if (one := self._loaded.pop(key, None)) is None:
            name = key.partition("@")[0]
            if key not in self._readers:
                raise AdapterUnavailable(f"the adapter {name} was removed")
            try:
                adapter = self._readers[key]()
            except (ValueError, StartupError) as error:
                log.error("the adapter %s: %s", name, first_line(error))
                raise AdapterUnavailable(
                    f"the files of the adapter {name} have changed since the last reload"
                ) from error
            one = self._place(adapter)
        self._loaded[key] = one  # the last one used
        return one

    def _place(self, adapter: Adapter) -> _Loaded:
        """Write an adapter into the tables, after others are evicted."""
        for key in list(self._loaded):
            if self.size + adapter.size <= self._most_bytes:
                break
            if not self._loaded[key].users:
                self._drop(key)
        if self.size + adapter.size > self._most_bytes:
            raise _NoRoom(
                f"the adapters of one batch need {self.size + adapter.size} bytes, more than the "
                f"limit of {self._most_bytes}"
            )
        rows = np.zeros((2, self.layers, adapter.rank), np.int32)
        owned: dict[int, list[int]] = {width: [] for width in self.tables}
        placed: dict[int, list[int]] = {}  # layers of one matrix share their A
        for number, layer in adapter.layers.items():
            for side, matrix in enumerate((layer.a, layer.b)):
                if id(matrix) not in placed:
                    placed[id(matrix)] = self._write(matrix, owned)
                rows[side, number, : len(matrix)] = placed[id(matrix)]
        return _Loaded(rows, owned, adapter.head, adapter.size)

    def _write(self, matrix: NDArray[np.float32], owned: dict[int, list[int]]) -> list[int]:
        width = matrix.shape[1]
        free, needed = self._free[width], len(matrix)
        numbers = [free.pop() for _ in range(min(needed, len(free)))]
        first = self._next[width]
        numbers += range(first, first + needed - len(numbers))
        self._next[width] = max(first, *(number + 1 for number in numbers))
        self.tables[width][numbers] = matrix
        owned[width] += numbers
        return numbers

    def _drop(self, key: str) -> None:
        for width, numbers in self._loaded.pop(key).owned.items():
            self._free[width] += numbers


class AdaptedRuns:
    """Runs batches in which a sequence has an adapter. The heads of adapters run in numpy.

    A head is one or two small products per sequence, so the graph needs no tables of heads, and a
    result does not depend on the batch.
    """

    def __init__(
        self, adapters: LoadedAdapters, codec: BatchCodec, side_by_side: Session, alone: Session
    ) -> None:
        self.adapters = adapters
        self._codec, self._side_by_side, self._alone = codec, side_by_side, alone

    def run(self, batch: Sequence[Encoding], *, alone: bool) -> list[HeadOutputs]:
        """Return the results of each encoding; see `Engine.run`."""
        session = self._alone if alone else self._side_by_side
        with self.adapters.using([encoding.adapter for encoding in batch]) as adapters:
            heads = [_own_head(*pair) for pair in zip(batch, adapters, strict=True)]
            packed = self._codec.pack(
                [_without(encoding, head) for encoding, head in zip(batch, heads, strict=True)]
            )
            first, *ends = packed.placement.starts.tolist()
            rows = []  # of `hidden`, for each head of an adapter
            for head, end in zip(heads, ends, strict=True):
                if head is not None:
                    rows.append(range(first, first + 1 if head.name == _PER_SEQUENCE else end))
                first = end
            names = packed.outputs if packed.requests else []
            feeds = packed.feeds | self.feeds(adapters)
            feeds[adapter_section.HIDDEN_ROWS.name] = np.array([*chain(*rows)], np.int32)
            *outputs, hidden = session.run([*names, adapter_section.HIDDEN.name], feeds)
            _check_finite(*outputs, hidden)
            results = packed.unpack(dict(zip(names, outputs, strict=True)))
            states = iter(np.split(hidden, np.cumsum([*map(len, rows)])))
            return [
                result if head is None else {**result, head.name: _run(head, next(states))}
                for result, head in zip(results, heads, strict=True)
            ]

    def feeds(self, adapters: Sequence[_Loaded | None]) -> Feeds:
        """Return the graph's inputs about the adapter of each sequence."""
        if len({id(one) for one in adapters}) == 1:
            adapters = adapters[:1]  # their matrices are gathered once
        rank = max([1, *(one.rows.shape[2] for one in adapters if one is not None)])
        rows = np.zeros((2, len(adapters), self.adapters.layers, rank), np.int32)
        for number, one in enumerate(adapters):
            if one is not None:
                rows[:, number, :, : one.rows.shape[2]] = one.rows
        return adapter_section.row_inputs(self.adapters.tables, rows)


_PER_SEQUENCE = "sequence_classification"


def _own_head(encoding: Encoding, one: _Loaded | None) -> Head | None:
    """Return the head of a sequence's adapter, if the sequence asks for it."""
    head = None if one is None else one.head
    return head if head is not None and head.name in encoding.requests else None


def _without(encoding: Encoding, head: Head | None) -> Encoding:
    """Return a sequence that asks only for heads of the base."""
    if head is None:
        return encoding
    requests = {name: one for name, one in encoding.requests.items() if name != head.name}
    return replace(encoding, requests=requests)


def _run(head: Head, hidden: NDArray[np.float32]) -> ArrayResult:
    """Return the result of a head for the rows of one sequence that it reads."""
    with np.errstate(over="ignore", invalid="ignore"):
        logits = head.logits(hidden)
    _check_finite(logits)
    return ArrayResult(logits[0] if head.name == _PER_SEQUENCE else logits)


def _check_finite(*outputs: NDArray[Any]) -> None:
    """Raise if a number overflowed, as `OnnxEngine.run` does."""
    for output in outputs:
        if output.dtype.kind == "f" and not np.isfinite(output).all():
            raise FloatingPointError
