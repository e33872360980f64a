"""Checks that a graph has the operators, weights and tensors that its manifest promises.

The hashes of a bundle prove that its files belong together, not that its author means well. These
checks run before a runtime opens the graph.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cloze.model_store import adapter_section
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.layouts import Layout
from cloze.model_store.limits import MAX_GRAPH_BYTES
from cloze.model_store.manifest import BundleSpec, Graph
from cloze.model_store.onnx_file import (
    DeclaredTensor,
    DeclaredWeight,
    OnnxGraph,
    parse_onnx,
)
from cloze.model_store.plain_files import read_plain
from cloze.model_store.store import Bundle
from cloze.model_store.tensors import TABLES, TRUNK_INPUTS, TensorSpec

FUSED_DOMAIN: Final = "com.microsoft"
"""The domain of onnxruntime's fused operators."""

_DOMAINS: Final = ("", FUSED_DOMAIN)
"""The domains of the operators that `cloze export` writes; ONNX's own is empty."""

WEIGHTS_SUFFIX: Final = ".bin"
"""The end of the name of every file of weights."""

_STORED_TYPES: Final = ("", ".fp16", ".int8")
"""The ends of a table's name, by the types in which tables are stored."""


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a bundle's graph must have.

    Attributes:
        shape: the tensor's sizes; None stands for a size that differs per batch.
    """

    spec: TensorSpec
    shape: tuple[int | None, ...]

    def may_be_declared_as(self, tensor: DeclaredTensor) -> bool:
        """Return whether a graph may declare the tensor so: any size of the model may be free."""
        return (
            tensor.dtype == self.spec.numpy_dtype
            and len(tensor.shape) == len(self.shape)
            and all(
                size in (None, want) for size, want in zip(tensor.shape, self.shape, strict=True)
            )
        )

    def may_have(self, shape: Sequence[int]) -> bool:
        """Return whether a value of the tensor may have a shape."""
        return len(shape) == len(self.shape) and all(
            want in (None, size) for size, want in zip(shape, self.shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.spec.dtype} {format_shape(self.shape)}"


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The inputs and outputs that a bundle's graph must have, by name."""

    inputs: Mapping[str, ExpectedTensor]
    outputs: Mapping[str, ExpectedTensor]


def expected_tensors(manifest: BundleSpec, layout: Layout) -> ExpectedTensors:
    """Return the inputs and outputs of a bundle's graph in a layout."""
    one_word = Encoding(np.zeros(3, np.int32), np.zeros(3, np.int32))
    feeds = BatchCodec(manifest.graph_spec(layout)).pack([one_word]).feeds
    inputs = {spec.name: _expect(spec, layout, {}) for spec in TRUNK_INPUTS}
    outputs: dict[str, ExpectedTensor] = {}
    for head in manifest.graph_heads:
        sizes = head.model_sizes(manifest.sizes)
        inputs |= {spec.name: _expect(spec, layout, sizes) for spec in head.inputs}
        outputs |= {spec.name: _expect(spec, layout, sizes) for spec in head.outputs}
    return ExpectedTensors({name: inputs[name] for name in feeds}, outputs)


def _expect(spec: TensorSpec, layout: Layout, sizes: Mapping[str, int]) -> ExpectedTensor:
    shape = (size if isinstance(size, int) else sizes.get(size) for size in spec.shape_in(layout))
    return ExpectedTensor(spec, tuple(shape))


def check_graph(bundle: Bundle, graph: Graph, adapters: AdapterSupport | None = None) -> None:
    """Check one graph of a bundle against the bundle's manifest.

    Args:
        adapters: the section of adapters, if the graph takes them.

    Raises:
        OSError: the graph's file cannot be read.
        ValueError: the graph has an operator, a weight or a tensor that the manifest excludes, or
            lacks one that the manifest promises.
    """
    manifest = bundle.manifest
    onnx = parse_onnx(read_plain(bundle.file(graph.file), MAX_GRAPH_BYTES))
    _check_operators(onnx)
    sizes = {name: file.size for name, file in manifest.files.items()}
    layers, heads = manifest.architecture.layers, len(manifest.graph_heads)
    _check_places(onnx.weights, sizes, max(layers, heads))
    expected = expected_tensors(manifest, graph.layout)
    if adapters is not None:
        expected = _with_adapters(expected, adapters, manifest.architecture.hidden_size)
    _check_tensors("input", onnx.inputs, expected.inputs)
    _check_tensors("output", onnx.outputs, expected.outputs)
    _check_tables(onnx.weights, manifest)


def _with_adapters(
    expected: ExpectedTensors, adapters: AdapterSupport, hidden_size: int
) -> ExpectedTensors:
    """Return the inputs and outputs of a graph that takes adapters."""
    rows = (adapter_section.LAYER_ROWS_IN, adapter_section.LAYER_ROWS_OUT)
    tables = map(adapter_section.table, adapters.widths)
    specs = (*rows, *tables, adapter_section.HIDDEN_ROWS)
    hidden, sizes = adapter_section.HIDDEN, {"H": hidden_size}
    return ExpectedTensors(
        {**expected.inputs, **{spec.name: _expect(spec, Layout.DENSE, {}) for spec in specs}},
        {**expected.outputs, hidden.name: _expect(hidden, Layout.DENSE, sizes)},
    )


def _check_operators(onnx: OnnxGraph) -> None:
    for domain, operator in sorted(onnx.operators):
        if domain not in _DOMAINS:
            raise ValueError(
                f"the operator {operator!r} has the domain {domain!r}; a bundle has operators "
                f"of ONNX and of {FUSED_DOMAIN} only"
            )


def _check_places(
    weights: Mapping[str, DeclaredWeight], sizes: Mapping[str, int], most_names: int
) -> None:
    """Check that weights lie inside the bundle's files of weights, and that none overlap.

    Weights that overlap could need more memory than their file has bytes. One weight may have
    several names, since each int8 product reads a weight of a name of its own.

    Args:
        most_names: the most names that one weight may have.
    """
    totals: Counter[str] = Counter()
    names: Counter[DeclaredWeight] = Counter()
    for name, weight in weights.items():
        if weight.file is None:
            continue
        names[weight] += 1
        if names[weight] > most_names:
            raise ValueError(f"the weight {name!r} lies where {most_names} others lie")
        if names[weight] > 1:
            continue
        if weight.file not in sizes or not weight.file.endswith(WEIGHTS_SUFFIX):
            raise ValueError(
                f"the weight {name!r} lies in {weight.file!r}, which is not one of the bundle's "
                f"files of weights (*{WEIGHTS_SUFFIX})"
            )
        available = sizes[weight.file]
        totals[weight.file] += weight.size
        if (end := max(weight.offset + weight.size, totals[weight.file])) > available:
            raise ValueError(
                f"the weight {name!r} needs {end} bytes of {weight.file}, which has {available}"
            )


def _check_tensors(
    kind: str, declared: Mapping[str, DeclaredTensor], expected: Mapping[str, ExpectedTensor]
) -> None:
    if missing := expected.keys() - declared.keys():
        raise ValueError(f"the graph lacks the {kind} {min(missing)!r}, which its tasks need")
    if surplus := declared.keys() - expected.keys():
        raise ValueError(f"the graph has the {kind} {min(surplus)!r}, which no task of it uses")
    for name, tensor in declared.items():
        if not expected[name].may_be_declared_as(tensor):
            raise ValueError(
                f"the {kind} {name} is {tensor.dtype} {format_shape(tensor.shape)}, "
                f"but must be {expected[name]}"
            )


def _check_tables(weights: Mapping[str, DeclaredWeight], manifest: BundleSpec) -> None:
    """Check that the tables which the graph looks up have the shapes that the manifest says.

    An id beyond a table would read other memory.
    """
    shapes = manifest.table_shapes()
    for table in TABLES:
        if table not in shapes and any(table + end in weights for end in _STORED_TYPES):
            raise ValueError(f"the graph has the table {table!r}, which the manifest does not list")
    for table, shape in shapes.items():
        stored = [weights[name] for end in _STORED_TYPES if (name := table + end) in weights]
        if not stored:
            raise ValueError(f"the graph lacks the weight {table!r}")
        for weight in stored:
            if weight.shape != shape:
                raise ValueError(
                    f"the weight {table!r} is {format_shape(weight.shape)}, but the manifest says "
                    f"{format_shape(shape)}"
                )


def format_shape(shape: Sequence[int | None]) -> str:
    """Return a shape for an error; ``*`` stands for a size that differs per batch."""
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"
