"""Packs and unpacks one row per sequence, or one row per token, for several heads."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cloze.model_store.heads.head import GraphSpec, Outputs, Requests
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec


def pack_first_rows(rows: TensorSpec) -> Callable[[Requests, Placement, GraphSpec], Feeds]:
    """Return a `Head.pack` that selects the ``[CLS]`` row of each encoding with a request."""

    def pack(requests: Requests, placement: Placement, _: GraphSpec) -> Feeds:
        return {rows.name: placement.starts[:-1][[request is not None for request in requests]]}

    return pack


def unpack_rows(
    output: TensorSpec, result: Callable[[Any], Any]
) -> Callable[[Requests, Placement, Outputs], list[Any]]:
    """Return a `Head.unpack` that gives each request the next row of ``output``."""

    def unpack(requests: Requests, _: Placement, outputs: Outputs) -> list[Any]:
        rows = iter(outputs[output.name])
        return [None if request is None else result(next(rows)) for request in requests]

    return unpack


def pack_token_rows(rows: TensorSpec) -> Callable[[Requests, Placement, GraphSpec], Feeds]:
    """Return a `Head.pack` that selects every row of each encoding with a request."""

    def pack(requests: Requests, placement: Placement, _: GraphSpec) -> Feeds:
        starts = placement.starts
        asked = [
            np.arange(starts[i], starts[i + 1], dtype=np.int32)
            for i, request in enumerate(requests)
            if request is not None
        ]
        return {rows.name: np.concatenate(asked) if asked else np.zeros(0, np.int32)}

    return pack


def unpack_token_rows(
    output: TensorSpec, result: Callable[[Any], Any]
) -> Callable[[Requests, Placement, Outputs], list[Any]]:
    """Return a `Head.unpack` that gives each request one row of ``output`` per token."""

    def unpack(requests: Requests, placement: Placement, outputs: Outputs) -> list[Any]:
        results: list[Any] = []
        first = 0
        for request, length in zip(requests, placement.lengths.tolist(), strict=True):
            if request is None:
                results.append(None)
                continue
            results.append(result(outputs[output.name][first : first + length]))
            first += length
        return results

    return unpack
