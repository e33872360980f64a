"""Converts a batch of encodings to graph inputs, and graph outputs to results per encoding.

The engine, export's verification and the scorers all build their graph inputs with this module.
The module does not depend on a runtime.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import tensors
from cloze.model_store.heads import HEADS, GraphSpec, Head, HeadRequest
from cloze.model_store.layouts import Feeds, Int32, Placement

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
    """

    input_ids: Int32
    token_type_ids: Int32
    requests: Mapping[str, HeadRequest] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows that heads expand to the size of the vocabulary."""
        return sum(request.vocabulary_rows for request in self.requests.values())


class BatchCodec:
    """Packs encodings into one graph's inputs and unpacks its outputs.

    Args:
        graph: the graph's inputs. In the dense layout all encodings of a batch have one length.
    """

    def __init__(self, graph: GraphSpec) -> None:
        self._graph = graph
        self._heads = [HEADS[name] for name in graph.heads]

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the graph's heads."""
        return self._graph.heads

    def outputs(self, batch: Sequence[Encoding]) -> list[str]:
        """Return the names of the outputs that the batch asks for; if none, all names."""
        asked = [head for head in self._heads if any(head.name in e.requests for e in batch)]
        return [tensor.name for head in asked or self._heads for tensor in head.outputs]

    def placement(self, batch: Sequence[Encoding]) -> Placement:
        """Return the rows of the batch's tokens."""
        return Placement.of(self._graph.layout, np.fromiter(map(len, batch), np.int32, len(batch)))

    def pack(self, batch: Sequence[Encoding]) -> Feeds:
        """Return the graph's inputs for a batch of at least one encoding."""
        placement = self.placement(batch)
        feeds: Feeds = {tensors.INPUT_IDS.name: placement.join([e.input_ids for e in batch])}
        if self._graph.token_types:
            types = placement.join([e.token_type_ids for e in batch])
            feeds[tensors.TOKEN_TYPE_IDS.name] = types
        feeds |= placement.feeds()
        for head in self._heads:
            feeds |= head.pack(requests_of(batch, head), placement, self._graph)
        return feeds

    def unpack(
        self, batch: Sequence[Encoding], outputs: dict[str, NDArray[Any]]
    ) -> list[HeadOutputs]:
        """Return each encoding's results from the graph's outputs."""
        placement = self.placement(batch)
        results: list[dict[str, Any]] = [{} for _ in batch]
        for head in self._heads:
            requests = requests_of(batch, head)
            if all(request is None for request in requests):
                continue
            for result, value in zip(
                results, head.unpack(requests, placement, outputs), strict=True
            ):
                if value is not None:
                    result[head.name] = value
        return list(results)


def requests_of(batch: Sequence[Encoding], head: Head) -> list[HeadRequest | None]:
    """Return each encoding's request to a head; None if an encoding does not ask the head."""
    return [encoding.requests.get(head.name) for encoding in batch]
