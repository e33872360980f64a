"""Converts a batch of encodings to graph inputs, and graph outputs to results per encoding.

The engine, export's verification and the scorers all build their graph inputs with this module.
The module does not depend on a runtime.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import tensors
from cloze.model_store.heads import HEADS, GraphSpec, HeadRequest
from cloze.model_store.layouts import Feeds, Int32, Layout, Placement

HeadOutputs = Mapping[str, Any]
"""Results of one encoding, by head name; one result per head that the encoding asks for."""


# Not frozen: `frozen` costs 0.7 us, a tenth of an engine process's time per text.
@dataclass(slots=True)
class Encoding:
    """One tokenized sequence and what is asked of each head. The unit of queues and batches.

    Attributes:
        input_ids: [S] int32, with ``[CLS]`` and ``[SEP]``.
        token_type_ids: [S] int32.
        requests: requests to heads, by head name.
        adapter: key of the adapter that the sequence runs with; "": the base alone.
    """

    input_ids: Int32
    token_type_ids: Int32
    requests: Mapping[str, HeadRequest] = field(default_factory=dict)
    adapter: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def padded_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes that heads pad to the largest ones of a batch, by head name."""
        return {name: one.padded_sizes for name, one in self.requests.items() if one.padded_sizes}

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows that heads expand to the size of the vocabulary."""
        return sum([request.vocabulary_rows for request in self.requests.values()])


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch as a graph reads it.

    Attributes:
        feeds: the graph's inputs.
        outputs: names of the outputs that the batch asks for; if none, all names.
        placement: the rows of the batch's tokens.
        requests: by the name of each head that the batch asks, the request of each encoding; None
            if the encoding does not ask the head.
    """

    feeds: Feeds
    outputs: list[str]
    placement: Placement
    requests: Mapping[str, Sequence[HeadRequest | None]]

    def unpack(self, outputs: dict[str, NDArray[Any]]) -> list[HeadOutputs]:
        """Return each encoding's results from the graph's outputs."""
        results: list[dict[str, Any]] = [{} for _ in self.placement.lengths]
        for name, requests in self.requests.items():
            values = HEADS[name].unpack(requests, self.placement, outputs)
            for result, value in zip(results, values, strict=True):
                if value is not None:
                    result[name] = value
        return list(results)


def placement_of(layout: Layout, lengths: Sequence[int] | Int32) -> Placement:
    """Return the placement of sequences with these lengths."""
    sizes = np.asarray(lengths, np.int32)
    starts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    return Placement(layout, sizes, starts)


class BatchCodec:
    """Packs encodings into one graph's inputs.

    Args:
        graph: the graph's inputs. In the dense layout all encodings of a batch have one length.

    Attributes:
        heads: the graph's heads.
    """

    def __init__(self, graph: GraphSpec) -> None:
        self._graph = graph
        self.heads = [HEADS[name] for name in graph.heads]
        nothing = placement_of(graph.layout, [])
        self._unasked = {head.name: head.pack([], nothing, graph) for head in self.heads}

    def pack(self, batch: Sequence[Encoding]) -> PackedBatch:
        """Return the graph's inputs for a batch of at least one encoding."""
        placement = placement_of(self._graph.layout, [len(e.input_ids) for e in batch])
        is_packed = placement.layout is Layout.PACKED
        join: Callable[[Sequence[Int32]], Int32] = np.concatenate if is_packed else np.array
        feeds: Feeds = {tensors.INPUT_IDS.name: join([e.input_ids for e in batch])}
        if self._graph.token_types:
            feeds[tensors.TOKEN_TYPE_IDS.name] = join([e.token_type_ids for e in batch])
        if is_packed:
            feeds |= placement.feeds()
        asked: dict[str, list[HeadRequest | None]] = {}
        for head in self.heads:
            requests = [encoding.requests.get(head.name) for encoding in batch]
            if any(request is not None for request in requests):
                asked[head.name] = requests
                feeds |= head.pack(requests, placement, self._graph)
            else:
                feeds |= self._unasked[head.name]
        names = [tensor.name for name in asked or self._unasked for tensor in HEADS[name].outputs]
        return PackedBatch(feeds, names, placement, asked)
