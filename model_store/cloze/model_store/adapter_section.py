"""The section of a manifest about adapters, and the tensors of a graph that takes them.

An adapter is what a model has besides the weights of its base: low-rank matrices on linear layers
of the encoder, a head, or both. The graph with adapters has the weights of the graph without, and
reads the low-rank matrices from tables of rows. A row is one row of A or one column of B, so a
table holds matrices of any rank. `adapter_in` and `adapter_out` say which rows belong to each
sequence; row 0 is zero.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from cloze.model_store.heads.head import Frozen
from cloze.model_store.layouts import Feeds, Int32
from cloze.model_store.limits import MAX_LAYERS
from cloze.model_store.sections import FileName, Graph, Precision, Width
from cloze.model_store.tensors import TensorSpec

MAX_ADAPTED_LAYERS: Final = 16 * MAX_LAYERS

_ROWS_SHAPE: Final = ("adapters", "layers * ranks")
"""One row per sequence, or a single one if all sequences have the same adapter."""

LAYER_ROWS_IN: Final = TensorSpec(
    "adapter_in", "int32", _ROWS_SHAPE, "the rows of A of the first linear layer, then the next"
)
LAYER_ROWS_OUT: Final = TensorSpec(
    "adapter_out", "int32", _ROWS_SHAPE, "the columns of B, in the same order"
)
HIDDEN_ROWS: Final = TensorSpec(
    "adapter_rows", "int32", ("own_rows",), "the rows of `hidden` that the heads of adapters read"
)
HIDDEN: Final = TensorSpec("adapter_hidden", "float32", ("own_rows", "H"), "those rows")

HeadActivation = Literal["tanh", "relu"]
"""The activations of a head's first layer that adapters may have."""


def table(width: int) -> TensorSpec:
    """Return the table of rows of a width."""
    meaning = "rows of A and columns of B, times alpha / rank; row 0 is zero"
    return TensorSpec(f"adapter_table_{width}", "float32", ("rows", width), meaning)


def row_inputs(tables: Mapping[int, NDArray[np.float32]], rows: Int32) -> Feeds:
    """Return the inputs about adapters of a batch, without `HIDDEN_ROWS`.

    Args:
        tables: by width [rows, width].
        rows: [2, B, N, R], the rows of A and of B of each sequence and layer.
    """
    rows_in, rows_out = rows.reshape(2, rows.shape[1], -1)
    own = {LAYER_ROWS_IN.name: rows_in, LAYER_ROWS_OUT.name: rows_out}
    return own | {table(width).name: values for width, values in tables.items()}


class AdaptedLayer(Frozen):
    """A linear layer of a checkpoint that adapters may change.

    Attributes:
        numbers: the places of its parts among the layers of `adapter_in`. A checkpoint may
            store several of our layers as one, for example queries, keys and values.
        inputs: width of its input.
        outputs: width of the output of each part.
    """

    numbers: tuple[Annotated[int, Field(ge=0, lt=MAX_ADAPTED_LAYERS)], ...] = Field(min_length=1)
    inputs: Width
    outputs: Width


class AdapterHead(Frozen):
    """A head that an adapter may have.

    Attributes:
        tensors: names of tensors in a checkpoint, without a prefix of the family -> our names:
            those of an optional layer ``pooler`` and of ``classifier``.
        activation: the activation of the pooler.
    """

    tensors: dict[str, str]
    activation: HeadActivation


class AdapterSupport(Frozen):
    """The graphs of a bundle that take adapters.

    Attributes:
        prefixes: what the names of the encoder's tensors may begin with.
        layers: by name in a checkpoint, without a prefix.
        heads: by name of the head.
        tensors_file: tensors of the base's heads that an adapter without them reads, in the format
            safetensors, by their names in a checkpoint; None: there are none.
    """

    graph: Graph
    int8: Graph | None = None
    prefixes: tuple[str, ...]
    layers: dict[str, AdaptedLayer]
    heads: dict[str, AdapterHead]
    tensors_file: FileName | None = None

    def graph_of(self, precision: Precision) -> Graph:
        """Return the graph of a precision.

        Raises:
            ValueError: the bundle has none.
        """
        graphs = {Precision.FP32: self.graph, Precision.INT8: self.int8}
        if (graph := graphs.get(precision)) is None:
            raise ValueError(f"no {precision} graph takes adapters; ask for fp32 or export again")
        return graph

    @property
    def count(self) -> int:
        """The number of layers in the graph."""
        return len({number for layer in self.layers.values() for number in layer.numbers})

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the tables."""
        layers = self.layers.values()
        return tuple(sorted({w for layer in layers for w in (layer.inputs, layer.outputs)}))

    @model_validator(mode="after")
    def _numbers_are_places(self) -> Self:
        numbers = sorted(number for layer in self.layers.values() for number in layer.numbers)
        if numbers != list(range(len(numbers))):
            raise ValueError("the numbers of adapted layers must be 0 to N - 1, each once")
        return self
