"""Graphs have exactly the inputs and outputs that their specifications and `docs/tensors.md` list."""

import runpy
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.model import LAYOUTS, GraphWriter
from cloze.model_store.heads import (
    HEADS,
    embedding,
    entities,
    layer_embedding,
    multi_vector,
    sequence_classification,
    token_classification,
    token_embedding,
)
from cloze.model_store.heads.entities import ENTITY_LABEL_VECTORS
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision
from cloze.model_store.tensors import TOKEN_TYPE_IDS, TRUNK_INPUTS, TensorSpec
from tests.support.tiny_models import model

SCRIPTS = Path(__file__).parents[2] / "scripts"

MODEL_SIZES = {
    embedding.EMBEDDINGS.name: {"D": 16},
    sequence_classification.CLASS_LOGITS.name: {"L": 3},
    token_classification.TOKEN_LOGITS.name: {"L": 4},
    token_embedding.TOKEN_EMBEDDINGS.name: {"H": 16},
    multi_vector.MULTI_VECTORS.name: {"F": 6},
    layer_embedding.LAYER_SUMS.name: {"H": 16},
    layer_embedding.LAYER_MAXIMA.name: {"H": 16},
    entities.ENTITY_SCORES.name: {"k": 3},
}
"""Letters of an output's shape that stand for a size of the model, not of the batch."""

Shape = tuple[str | int, ...]


def letters(tensors: Iterable[TensorSpec]) -> set[str]:
    layouts = (Layout.DENSE, Layout.PACKED)
    sizes = [size for tensor in tensors for one in layouts for size in tensor.shape_in(one)]
    return {size[0] for size in sizes if isinstance(size, str)}  # "B + 1" is of B


def test_a_letter_has_one_meaning_in_all_tensors() -> None:
    """onnxruntime takes two sizes with one letter for equal: two heads must not share a count.

    The sizes of a model are the same for all heads, or numbers in the graph.
    """
    shared = letters(TRUNK_INPUTS) | {"H", "L"}
    used = {name: letters((*head.inputs, *head.outputs)) for name, head in HEADS.items()}
    counts = [letter for own in used.values() for letter in own - shared]
    assert len(counts) == len(set(counts)), sorted(counts)
    assert runpy.run_path(str(SCRIPTS / "tensor-reference"))["LETTERS"].keys() == shared | set(
        counts
    )


def declared(values: list[onnx.ValueInfoProto]) -> dict[str, tuple[str, Shape]]:
    """Return (dtype, shape) of a graph's inputs or outputs by name."""
    result = {}
    for value in values:
        tensor = value.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        shape = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
        result[value.name] = (dtype, shape)
    return result


def specified(tensors: list[TensorSpec], layout: Layout) -> dict[str, tuple[str, Shape]]:
    """Return (dtype, shape) of the tensors that graphs of a layout have, by name."""
    return {
        tensor.name: (
            tensor.dtype,
            tuple(
                MODEL_SIZES.get(tensor.name, {}).get(str(size), size)
                for size in tensor.shape_in(layout)
            ),
        )
        for tensor in tensors
        if tensor.is_in(layout)
    }


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("precision", list(Precision))
def test_every_tensor_of_a_graph_is_specified(
    family: str, precision: Precision, tmp_path: Path
) -> None:
    heads = tuple(HEADS.values())
    recipe = EmbeddingRecipe(include_prompt=False)  # its graph has the most inputs
    GraphWriter(model(family), recipe, heads, tmp_path).write(precision)
    graph = onnx.load(next(tmp_path.glob("*.onnx")), load_external_data=False).graph
    layout = LAYOUTS[precision]
    trunk = [t for t in TRUNK_INPUTS if family == "bert" or t is not TOKEN_TYPE_IDS]
    inputs = [*trunk, *(tensor for head in heads for tensor in head.inputs)]
    inputs.remove(ENTITY_LABEL_VECTORS)  # of a bi-encoder, in place of `ENTITY_LABELS`
    outputs = [tensor for head in heads for tensor in head.outputs]
    assert declared(list(graph.input)) == specified(inputs, layout)
    assert declared(list(graph.output)) == specified(outputs, layout)
