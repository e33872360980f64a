"""The graph to which blocks write: one layout, one precision."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.layouts import BatchLayout, ResidualNorm
from cloze.export.graph.linear_ops import LinearInput, LinearOps
from cloze.model_store.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class TrunkGraph:
    """The unfinished graph of a trunk.

    A ``name`` is the name of a weight and of its place in the model.
    """

    g: GraphBuilder
    layout: BatchLayout
    linear_ops: LinearOps

    def declare(self, tensor: TensorSpec) -> str:
        """Declare an input of the graph."""
        return self.g.declare_input(tensor, self.layout.kind)

    def look_up(self, name: str, table: Tensor, ids: str) -> str:
        """Write the rows of a table [V, H] with these ids."""
        return self.linear_ops.look_up(self.g, name, table, ids)

    def positions(self, table: Tensor) -> str:
        """Write the row of each token's position in a table [P, H]."""
        return self.layout.positions(self.g, self.linear_ops, table)

    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """Write ``LayerNorm`` of the sum of two or more terms."""
        return self.layout.norm_of_sum(self.g, self.linear_ops, terms, name, norm)

    def prepare(self, x: str, name: str, least: float | None = None) -> LinearInput:
        """Convert ``x`` to the input of products; see `LinearOps.prepare_input`."""
        return self.linear_ops.prepare_input(self.g, x, name, least)

    def matmul(self, x: LinearInput, name: str, linear: nn.Linear) -> str:
        """Write ``x @ W^T`` without the bias."""
        return self.linear_ops.matmul(self.g, x, name, linear)

    def vector(self, name: str, values: Tensor) -> str:
        """Add a bias or the scale of a norm, in the type of the trunk's activations."""
        return self.linear_ops.vector(self.g, name, values)

    def residual_norm(self, x: str, skip: str, norm: ResidualNorm) -> str:
        """Write ``LayerNorm(x + skip + bias)``."""
        return self.layout.residual_norm(self.g, self.linear_ops, x, skip, norm)
