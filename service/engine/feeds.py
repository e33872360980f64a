"""A batch of queries as a graph's inputs, and the graph's outputs as each query's own. Numbers only: knows no runtime."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store import Manifest, Task, packing
from model_store import interface as names
from model_store.manifest import Layout
from model_store.packing import Feeds
from service.core import Output, Query

_NOTHING = np.zeros(0, np.int32)
_NO_MASKS: Feeds = {
    names.MASK_ROWS: _NOTHING,
    names.TOP_K: np.ones(1, np.int64),
    names.TARGET_MASKS: _NOTHING,
    names.TARGET_IDS: _NOTHING,
}

_OUTPUTS = {
    Task.FILL_MASK: (names.TOP_LOGITS, names.TOP_IDS, names.LOGSUMEXP, names.TARGET_LOGITS),
    Task.NSP: (names.PAIR_LOGITS,),
    Task.EMBED: (names.EMBEDDINGS,),
    Task.QA: (names.SPAN_LOGITS,),
}


class BatchFeeds:
    """Packs batches for one graph.

    Args:
        manifest: of its bundle.
        layout: of the graph. In the dense one all queries of a batch must have one length.
    """

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._tasks: Collection[Task] = frozenset(manifest.tasks)
        self._has_token_types = manifest.architecture.type_vocab_size > 0
        self._pooling = manifest.embedding.pooling if manifest.embedding else ""
        self._packed = layout is Layout.PACKED

    def wanted(self, batch: Sequence[Query]) -> list[str]:
        """The graph's outputs that a query of the batch asks for, and spans, which none asks for by name; else all."""
        found: list[str] = []
        if Task.FILL_MASK in self._tasks and any(query.masks for query in batch):
            found += _OUTPUTS[Task.FILL_MASK]
        if Task.NSP in self._tasks and any(query.pair for query in batch):
            found += _OUTPUTS[Task.NSP]
        if Task.EMBED in self._tasks and any(query.embed for query in batch):
            found += _OUTPUTS[Task.EMBED]
        if Task.QA in self._tasks:
            found += _OUTPUTS[Task.QA]
        return found or [name for task in self._tasks for name in _OUTPUTS[task]]

    def pack(self, batch: Sequence[Query]) -> Feeds:
        """The graph's inputs."""
        lengths = np.fromiter(map(len, batch), np.int32, len(batch))
        starts = packing.starts_of(lengths)[:-1]
        join = np.concatenate if self._packed else np.array
        feeds: Feeds = {names.INPUT_IDS: join([query.input_ids for query in batch])}
        if self._has_token_types:
            feeds[names.TOKEN_TYPE_IDS] = join([query.token_type_ids for query in batch])
        if self._packed:
            feeds |= packing.place(lengths)
        if Task.FILL_MASK in self._tasks:
            feeds |= _masks(batch, starts) if any(query.masks for query in batch) else _NO_MASKS
        if Task.NSP in self._tasks:
            feeds[names.PAIR_ROWS] = starts[[query.pair for query in batch]]
        if Task.EMBED in self._tasks:
            chosen = np.flatnonzero([query.embed for query in batch])
            if self._packed:
                feeds |= packing.pool(starts[chosen], lengths[chosen], self._pooling)
            else:
                feeds[names.EMBED_SEQUENCES] = chosen.astype(np.int32)
        return feeds


def _masks(batch: Sequence[Query], starts: NDArray[np.int32]) -> Feeds:
    """What the fill-mask head is asked; every target of a query is asked of each of its masks."""
    counts = [len(query.masks) for query in batch]
    rows = np.concatenate([start + np.array(query.masks, np.int32) for start, query in zip(starts, batch, strict=True)])
    numbers = np.split(np.arange(len(rows), dtype=np.int32), np.cumsum(counts)[:-1])
    pairs = [
        (np.repeat(masks, len(query.targets)), np.tile(np.array(query.targets, np.int32), len(masks)))
        for masks, query in zip(numbers, batch, strict=True)
    ]
    return {
        names.MASK_ROWS: rows.astype(np.int32),
        names.TOP_K: np.array([max(1, *(query.top_k for query in batch))], np.int64),
        names.TARGET_MASKS: np.concatenate([masks for masks, _ in pairs]),
        names.TARGET_IDS: np.concatenate([targets for _, targets in pairs]),
    }


def unpack(batch: Sequence[Query], values: dict[str, NDArray[Any]]) -> list[Output]:
    """Give every query its rows of the graph's outputs."""
    outputs = []
    token = mask = target = pair = embed = 0
    spans = values.get(names.SPAN_LOGITS)
    for query in batch:
        output = Output()
        if count := len(query.masks):
            masks = slice(mask, mask + count)
            output.top_logits = values[names.TOP_LOGITS][masks, : query.top_k]
            output.top_ids = values[names.TOP_IDS][masks, : query.top_k]
            output.logsumexp = values[names.LOGSUMEXP][masks]
            wanted = count * len(query.targets)
            output.target_logits = values[names.TARGET_LOGITS][target : target + wanted].reshape(count, -1)
            mask, target = mask + count, target + wanted
        if query.pair:
            output.pair_logits = values[names.PAIR_LOGITS][pair]
            pair += 1
        if query.embed:
            output.embedding = values[names.EMBEDDINGS][embed]
            embed += 1
        if spans is not None:
            output.span_logits = spans[token : token + len(query)]
            token += len(query)
        outputs.append(output)
    return outputs
