"""The contract of a head, which every module of this package fulfils with its `HEAD`.

A head is what a graph can compute for a sequence. Almost every head gathers the rows that are
requested before the head projects, so a head without requests costs nothing, and one batch may
mix all heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from cloze.model_store.layouts import Feeds, Layout, Placement
from cloze.model_store.tensors import TensorSpec


class Frozen(BaseModel):
    """A part of a manifest: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of the vocabulary that this part names."""
        return ()


class Pooling(StrEnum):
    """How the hidden states of one sequence become one vector.

    Source: Reimers & Gurevych 2019, section 3.
    """

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    """The weights are the positions 1 to S."""

    LAST = "lasttoken"


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What the service needs in order to build a graph's inputs.

    Attributes:
        layout: the graph's layout.
        heads: names of the graph's heads.
        token_types: whether the trunk has the input `token_type_ids`.
        pooling: the pooling of the embedding head; None: the graph has no embedding head.
        layers: number of layers of the trunk.
        include_prompt: whether embeddings pool the tokens of a prompt, too.
        options: the heads' sections of the manifest, by head name.
    """

    layout: Layout
    heads: tuple[str, ...]
    token_types: bool
    pooling: Pooling | None = None
    layers: int = 0
    include_prompt: bool = True
    options: Mapping[str, Frozen] = field(default_factory=dict)


class ModelSizes(NamedTuple):
    """The sizes of a model that shapes of its graph's tensors depend on.

    Attributes:
        hidden_size: width of the hidden states.
        layers: number of layers of the trunk.
        dimensions: numbers per embedding; None: the model has no embedding head.
        options: the heads' sections of the manifest, by head name.
    """

    hidden_size: int
    layers: int
    dimensions: int | None
    options: Mapping[str, Frozen]


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """What one encoding asks of one head. A head with parameters derives a frozen dataclass."""

    vocabulary_rows: ClassVar[int] = 0
    """Rows that the head expands to the size of the vocabulary. A batch limits their sum."""

    padded_sizes: ClassVar[tuple[int, ...]] = ()
    """Sizes that the head pads to the largest ones of a batch; their product is its cost."""

    keys: ClassVar[int] = 0
    """Number of the sequence's first tokens to which tokens attend; 0: they attend to all."""


@dataclass(frozen=True, slots=True)
class ArrayResult:
    """The result of a head that computes one array for an encoding; the head has its shape."""

    array: NDArray[np.float32]


Outputs = dict[str, NDArray[Any]]
"""Graph outputs by tensor name."""

Requests = Sequence[Any]
"""The requests to one head, one per encoding of a batch; None where an encoding asks nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """One head's contract.

    Attributes:
        name: the head's name in encodings and in the torch model.
        task: the head's name in manifests and in `cloze export --task`.
        pack: (requests, placement, graph) -> the head's graph inputs; zero rows without requests.
        unpack: (requests, placement, outputs) -> one result per request, None for None.
        request: the dataclass of one encoding's request.
        result: the dataclass of one encoding's result.
        largest_request: (largest number of vocabulary rows) -> the request that needs the most
            memory.
        ranked: outputs of ids, by name -> the output of numbers in whose descending order they are.
        options: the type of the head's section in a manifest, under `heads`; None: no section.
        has_default_options: whether a manifest may lack the section.
        per_token: whether a result has one row per token of its sequence.
        rows: request -> rows of its result, unless they are per token; None: one row.
        model_sizes: sizes -> the letters in shapes of the head's tensors that stand for sizes
            of the model, with their sizes. The other letters differ per batch.
    """

    name: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    pack: Callable[[Requests, Placement, GraphSpec], Feeds]
    unpack: Callable[[Requests, Placement, Outputs], list[Any]]
    request: type[HeadRequest] = HeadRequest
    result: type = ArrayResult
    largest_request: Callable[[int], HeadRequest] = lambda _: HeadRequest()
    ranked: Mapping[str, str] = field(default_factory=dict)
    options: type[Frozen] | None = None
    has_default_options: bool = False
    model_sizes: Callable[[ModelSizes], Mapping[str, int]] = lambda _: {}
    per_token: bool = False
    rows: Callable[[Any], int] | None = None
