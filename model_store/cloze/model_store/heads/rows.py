"""How heads that compute one row per sequence, or one row per token, pack and unpack."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cloze.model_store.heads.head import ArrayResult, GraphSpec, Outputs, Requests
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec

Pack = Callable[[Requests, Placement, GraphSpec], Feeds]
Unpack = Callable[[Requests, Placement, Outputs], list[Any]]


def per_sequence(rows: TensorSpec, output: TensorSpec) -> tuple[Pack, Unpack]:
    """Return both for a row of `output` from the ``[CLS]`` row of each sequence."""

    def pack(requests: Requests, placement: Placement, _: GraphSpec) -> Feeds:
        return {rows.name: placement.starts[:-1][[request is not None for request in requests]]}

    return pack, unpack_rows(output)


def unpack_rows(output: TensorSpec) -> Unpack:
    """Return a `Head.unpack` that gives each request the next row of ``output``."""

    def unpack(requests: Requests, _: Placement, outputs: Outputs) -> list[Any]:
        rows = iter(outputs[output.name])
        return [None if request is None else ArrayResult(next(rows)) for request in requests]

    return unpack


def per_token(rows: TensorSpec, output: TensorSpec) -> tuple[Pack, Unpack]:
    """Return both for a row of `output` from the row of each token of a sequence."""

    def pack(requests: Requests, placement: Placement, _: GraphSpec) -> Feeds:
        starts = placement.starts
        asked = [
            np.arange(starts[i], starts[i + 1], dtype=np.int32)
            for i, request in enumerate(requests)
            if request is not None
        ]
        return {rows.name: np.concatenate(asked) if asked else np.zeros(0, np.int32)}

    def unpack(requests: Requests, placement: Placement, outputs: Outputs) -> list[Any]:
        asked = [request is not None for request in requests]
        ends = np.cumsum(placement.lengths * asked).tolist()
        parts = np.split(outputs[output.name], ends[:-1])
        return [ArrayResult(part) if one else None for part, one in zip(parts, asked, strict=True)]

    return pack, unpack
