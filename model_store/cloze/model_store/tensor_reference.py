"""Writes `docs/tensors.md`: the inputs and outputs of every graph, from their specifications.

python -m cloze.model_store.tensor_reference > docs/tensors.md
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Final

from cloze.model_store.heads import HEADS, Head
from cloze.model_store.layouts import Layout
from cloze.model_store.tensors import TRUNK_INPUTS, TensorSpec

_INTRODUCTION = """\
# Graph inputs and outputs

<!-- Generated: python -m cloze.model_store.tensor_reference > docs/tensors.md -->

This page is generated from `cloze.model_store.tensors` and `cloze.model_store.heads`. Do not edit
the page. After a change of a tensor, run `make docs`.

A graph has the inputs of the encoder, and the inputs and outputs of each head that the bundle has.
The encoder computes `hidden`: one row of hidden states per token of the batch, `[T, H]`. `hidden`
is not an output. Each head selects rows of `hidden` by their row numbers.

A letter has one meaning in all tensors. If no encoding of a batch requests a head, the inputs of
the head have no rows: without masks, M is 0. "absent": the layout does not have the tensor.

"""

LETTERS: Final[Mapping[str, str]] = {
    "B": "sequences in the batch",
    "S": "tokens of the longest sequence; in the dense layout all sequences have S tokens",
    "T": "tokens of all sequences of the batch; in the dense layout T = B * S",
    "H": "hidden size of the encoder",
    "A": "sequences with tokens to which no token attends",
    "C": "sequences to classify",
    "D": "numbers per embedding of a sequence",
    "E": "sequences to embed",
    "F": "numbers per vector of a token",
    "G": "tokens whose hidden states are returned",
    "I": "tokens of the longest sequence to embed",
    "J": "weights per sparse vector",
    "K": "predictions per mask",
    "L": "labels of the model",
    "M": "masks to fill",
    "N": "requested logits",
    "P": "pairs of texts",
    "Q": "tokens to weigh",
    "R": "tokens to classify",
    "U": "sequences with a sparse vector",
    "V": "tokens with a vector",
    "W": "tokens of the longest sequence with a sparse vector",
    "X": "vectors of layers",
    "Y": "tokens of the longest sequence with a vector of layers",
    "Z": "layers of the encoder, and 1 for the embeddings",
}
"""The sizes that the letters in shapes stand for."""

_HEADER = """\
| tensor | dtype | shape, dense | shape, packed | meaning |
|---|---|---|---|---|
"""


def tensor_reference() -> str:
    """Return the text of `docs/tensors.md`."""
    letters = "".join(f"| {letter} | {size} |\n" for letter, size in LETTERS.items())
    introduction = f"{_INTRODUCTION}| letter | size |\n|---|---|\n{letters}"
    sections = [introduction, "## Encoder\n\nInputs:\n\n" + _table(TRUNK_INPUTS)]
    sections += [_head_section(head) for head in HEADS.values()]
    return "\n".join(sections)


def _head_section(head: Head) -> str:
    parts = [f"## Head `{head.name}` (task `{head.task}`)\n"]
    if head.inputs:
        parts.append("Inputs:\n\n" + _table(head.inputs))
    else:
        parts.append("The head has no inputs of its own.\n")
    parts.append("Outputs:\n\n" + _table(head.outputs))
    return "\n".join(parts)


def _table(tensors: Iterable[TensorSpec]) -> str:
    return _HEADER + "".join(map(_row, tensors))


def _row(tensor: TensorSpec) -> str:
    dense, packed = (_shape(tensor, layout) for layout in (Layout.DENSE, Layout.PACKED))
    return f"| `{tensor.name}` | {tensor.dtype} | {dense} | {packed} | {tensor.meaning} |\n"


def _shape(tensor: TensorSpec, layout: Layout) -> str:
    if not tensor.is_in(layout):
        return "absent"
    return f"[{', '.join(map(str, tensor.shape_in(layout)))}]"


if __name__ == "__main__":
    sys.stdout.write(tensor_reference())
