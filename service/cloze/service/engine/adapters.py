"""The loaded adapters of an engine, and the batches of sequences that ask for them.

The matrices of all adapters are rows of a few tables, one per width. A table reserves addresses for
as many bytes as adapters may have together; memory is taken as rows are written.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import adapter_section
from cloze.model_store.adapter import Adapter, Head
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads.head import ArrayResult
from cloze.model_store.layouts import Feeds, Int32
from cloze.service.engine.session import CpuSession
from cloze.service.errors import AdapterUnavailable, StartupError

log = logging.getLogger("cloze")


@dataclass(slots=True)
class _Loaded:
    """An adapter in the tables.

    Attributes:
        rows: int32 [2, N, R], the rows of A and of B of each layer; 0 where the rank is lower.
        owned: the rows by width, to be freed.
        size: bytes.
        users: number of requests that hold the adapter, and of batches that run with it.
    """

    rows: Int32
    owned: dict[int, list[int]]
    head: Head | None
    size: int
    users: int = 0


class LoadedAdapters:
    """Adapters by key. A request holds its adapter, which is read if it is not loaded.

    An adapter that nothing holds stays until another one needs the room. With room for two, `hold`
    of "c" evicts "a" if "a" and "b" are loaded, nothing holds "a", and "b" was used last.

    Args:
        most_bytes: most bytes of all loaded adapters, at least those of the largest one.
    """

    def __init__(self, support: AdapterSupport, most_bytes: int) -> None:
        self.layers, self._most_bytes = support.count, most_bytes
        self.tables = {
            width: np.zeros((1 + most_bytes // (4 * width), width), np.float32)
            for width in support.widths
        }
        self._unused = {width: count(1) for width in self.tables}
        self._freed: dict[int, list[int]] = {width: [] for width in self.tables}
        self._readers: dict[str, Callable[[], Adapter]] = {}
        self._loaded: dict[str, _Loaded] = {}  # the longest unused first
        self._waits_for_room = False
        self._changed = threading.Condition()
        self._reader = ThreadPoolExecutor(1, "adapter-reader")

    @property
    def size(self) -> int:
        """The bytes of the loaded adapters."""
        return sum(one.size for one in self._loaded.values())

    @property
    def keys(self) -> list[str]:
        """The keys of the loaded adapters, the longest unused first."""
        return list(self._loaded)

    def add(self, key: str, read: Callable[[], Adapter]) -> None:
        """Make an adapter known, without reading it."""
        with self._changed:
            self._readers[key] = read

    def forget(self, key: str) -> None:
        """Free an adapter that no request asks for any more."""
        with self._changed:
            self._readers.pop(key, None)
            if (one := self._loaded.get(key)) is not None and not one.users:
                self._drop(key)

    def hold(self, key: str) -> Future[None]:
        """Load an adapter, and keep it until `release`; the result ends when it is loaded.

        One thread reads adapters, one after another, so nobody else waits for the disk. If the
        adapters that are held leave no room, the thread waits until some are released. Meanwhile
        every further `hold` waits behind it, so that room comes.
        """
        with self._changed:
            if self._waits_for_room or not self._hold_loaded(key):
                return self._reader.submit(self._hold, key)
        loaded: Future[None] = Future()
        loaded.set_result(None)
        return loaded

    def release(self, key: str) -> None:
        """End a `hold`."""
        with self._changed:
            one = self._loaded[key]
            one.users -= 1
            if not one.users and key not in self._readers:  # forgotten meanwhile
                self._drop(key)
            self._changed.notify_all()

    @contextmanager
    def using(self, keys: Sequence[str]) -> Iterator[list[_Loaded | None]]:
        """Yield the adapter of each key, None for ""; they stay loaded meanwhile.

        Raises:
            AdapterUnavailable: an adapter is not loaded any more, because its request has ended.
        """
        wanted = dict.fromkeys(filter(None, keys))
        with self._changed:
            if not wanted.keys() <= self._loaded.keys():
                raise AdapterUnavailable("no request holds the adapter any more")
            for key in wanted:
                self._hold_loaded(key)
            adapters = [self._loaded.get(key) for key in keys]
        try:
            yield adapters
        finally:
            for key in wanted:
                self.release(key)

    def _hold_loaded(self, key: str) -> bool:
        """Hold an adapter if it is loaded; return whether it is. The caller holds the lock."""
        if (one := self._loaded.pop(key, None)) is None:
            return False
        self._loaded[key] = one  # the last one used
        one.users += 1
        return True

    def _hold(self, key: str) -> None:
        """Read an adapter if it is not loaded, wait for room, and hold the adapter."""
        with self._changed:
            if self._hold_loaded(key):
                return
            read = self._readers.get(key)
        name = key.partition("@")[0]
        if read is None:
            raise AdapterUnavailable(f"the adapter {name} was removed")
        try:
            adapter = read()
        except (ValueError, StartupError) as error:
            log.error("the adapter %s: %s", name, first_line(error))
            raise AdapterUnavailable(
                f"the files of the adapter {name} have changed since the last reload"
            ) from error
        assert adapter.size <= self._most_bytes, "who adds an adapter has checked its size"
        with self._changed:
            self._waits_for_room = True
            self._changed.wait_for(lambda: self._make_room(adapter.size))
            self._waits_for_room = False
        one = self._write(adapter)
        with self._changed:
            self._loaded[key] = one
            self._hold_loaded(key)

    def _make_room(self, size: int) -> bool:
        """Evict adapters that nothing holds, as far as needed; return whether there is room."""
        for key in list(self._loaded):
            if self.size + size <= self._most_bytes:
                break
            if not self._loaded[key].users:
                self._drop(key)
        return self.size + size <= self._most_bytes

    def _write(self, adapter: Adapter) -> _Loaded:
        """Write an adapter into the tables."""
        rows = np.zeros((2, self.layers, adapter.rank), np.int32)
        owned: dict[int, list[int]] = {width: [] for width in self.tables}
        written: dict[int, list[int]] = {}  # layers of one matrix share their A
        for number, layer in adapter.layers.items():
            for side, matrix in enumerate((layer.a, layer.b)):
                if id(matrix) not in written:
                    written[id(matrix)] = self._write_rows(matrix, owned)
                rows[side, number, : len(matrix)] = written[id(matrix)]
        return _Loaded(rows, owned, adapter.head, adapter.size)

    def _write_rows(self, matrix: NDArray[np.float32], owned: dict[int, list[int]]) -> list[int]:
        width = matrix.shape[1]
        with self._changed:
            freed, unused = self._freed[width], self._unused[width]
            numbers = [freed.pop() if freed else next(unused) for _ in matrix]
        self.tables[width][numbers] = matrix  # no other thread has these rows
        owned[width] += numbers
        return numbers

    def _drop(self, key: str) -> None:
        for width, numbers in self._loaded.pop(key).owned.items():
            self._freed[width] += numbers


class AdaptedRuns:
    """Runs batches in which a sequence has an adapter. The heads of adapters run in numpy.

    A head is one or two small products per sequence, so the graph needs no tables of heads, and a
    result does not depend on the batch.
    """

    def __init__(self, adapters: LoadedAdapters, codec: BatchCodec, sessions: CpuSession) -> None:
        self.adapters, self._codec, self.sessions = adapters, codec, sessions

    def run(self, batch: Sequence[Encoding], *, alone: bool) -> list[HeadOutputs]:
        """Return the results of each encoding; see `Engine.run`."""
        session = self.sessions.alone if alone else self.sessions.side_by_side
        with self.adapters.using([encoding.adapter for encoding in batch]) as adapters:
            divided = [_divided(*pair) for pair in zip(batch, adapters, strict=True)]
            packed = self._codec.pack([encoding for encoding, _ in divided])
            heads = [head for _, head in divided]
            starts = pairwise(packed.placement.starts.tolist())
            rows = [_rows(head, *range_) for head, range_ in zip(heads, starts, strict=True)]
            names = packed.outputs if packed.requests else []
            feeds = packed.feeds | self.feeds(adapters)
            feeds[adapter_section.HIDDEN_ROWS.name] = np.array([*chain(*rows)], np.int32)
            *outputs, hidden = session.run([*names, adapter_section.HIDDEN.name], feeds)
            states = np.split(hidden, np.cumsum([*map(len, rows)])[:-1])
            logits = [_logits(*pair) for pair in zip(heads, states, strict=True)]
            for output in (*outputs, hidden, *logits):
                if output.dtype.kind == "f" and not np.isfinite(output).all():
                    raise FloatingPointError  # as `OnnxEngine.run` does
                output.flags.writeable = False
            results = packed.unpack(dict(zip(names, outputs, strict=True)))
            return [
                result if head is None else {**result, head.name: ArrayResult(array)}
                for result, head, array in zip(results, heads, logits, strict=True)
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


def _divided(encoding: Encoding, one: _Loaded | None) -> tuple[Encoding, Head | None]:
    """Return what a sequence asks of the base, and the head of its adapter if it asks for that."""
    if one is None or one.head is None or one.head.name not in encoding.requests:
        return encoding, None
    requests = {name: asked for name, asked in encoding.requests.items() if name != one.head.name}
    return replace(encoding, requests=requests), one.head


def _rows(head: Head | None, first: int, end: int) -> range:
    """Return the rows of a sequence that the head of its adapter reads."""
    if head is None:
        return range(0)
    return range(first, first + 1 if head.name == _PER_SEQUENCE else end)


def _logits(head: Head | None, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the result of a head for the rows of one sequence; nothing without a head."""
    if head is None:
        return hidden
    with np.errstate(over="ignore", invalid="ignore"):
        logits = head.logits(hidden)
    return logits[0] if head.name == _PER_SEQUENCE else logits
