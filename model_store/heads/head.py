"""What a head is: the contract that every module of this package fulfils with its `HEAD`.

A head is what a graph can compute for a sequence. Every head gathers the rows that it is asked for
before it projects, so a head that is asked for zero rows costs nothing, and one batch may mix all
heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from model_store.layouts import Feeds, Layout, Placement
from model_store.tensors import TensorSpec


class Frozen(BaseModel):
    """A part of a manifest: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Pooling(StrEnum):
    """How the hidden states of one sequence become one vector.

    Source: Reimers & Gurevych 2019, section 3.
    """

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What must be known of a graph to feed it.

    Attributes:
        layout: how tokens lie.
        heads: names of the graph's heads.
        token_types: whether the trunk takes token types.
        pooling: of the embedding head, if the graph has one.
    """

    layout: Layout
    heads: tuple[str, ...]
    token_types: bool
    pooling: Pooling | None = None


class HeadRequest:
    """What one encoding asks of one head. A head's own request is a frozen dataclass."""

    __slots__ = ()

    vocabulary_rows: ClassVar[int] = 0
    """Rows that the head expands to the size of the vocabulary; they bound a batch."""


Outputs = dict[str, NDArray[Any]]
"""Graph outputs by tensor name."""

Requests = Sequence[Any]
"""The requests to one head, one per encoding of a batch; None where an encoding asks nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """One head's contract.

    Attributes:
        name: of the head, in encodings and in the torch model.
        task: the name that manifests and `cloze export --task` have for the head.
        inputs: the tensors that the graph reads.
        outputs: the tensors that the graph writes.
        request: the dataclass of what one encoding asks.
        result: the dataclass of what one encoding gets.
        pack: (requests, placement, graph) -> the graph's inputs; zero rows where no one asks.
        unpack: (requests, placement, outputs) -> a result per request, None where none was asked.
        largest_request: (most vocabulary rows) -> the request that needs the most memory.
        options: what a manifest says of the head, under `heads`; None: nothing.
    """

    name: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    request: type[HeadRequest]
    result: type
    pack: Callable[[Requests, Placement, GraphSpec], Feeds]
    unpack: Callable[[Requests, Placement, Outputs], list[Any]]
    largest_request: Callable[[int], HeadRequest]
    options: type[Frozen] | None = None
