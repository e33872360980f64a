"""Writes the graph that text-embeddings-inference and infinity-emb load: plain operators, fp32.

    python -m cloze.bench.peers.plain_onnx CHECKPOINT    # writes CHECKPOINT/onnx/model.onnx

The program needs torch, onnx and transformers.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel

_OPSET = 17


class _Encoder(torch.nn.Module):
    """A transformers encoder whose inputs have a fixed order."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self._model, self._names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the last hidden state [B, S, H] for int64 inputs [B, S]."""
        named = dict(zip(self._names, inputs, strict=True))
        hidden: Tensor = self._model(**named).last_hidden_state
        return hidden


def write(checkpoint: Path) -> Path:
    """Write the graph into the checkpoint, and return its path.

    Raises:
        OSError: the folder has no checkpoint, or is not writable.
    """
    # Of the implementations of attention, this one can be traced.
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask"]
    if model.config.model_type == "bert":
        names.append("token_type_ids")
    ids = torch.ones(2, 8, dtype=torch.long)
    example = tuple(torch.zeros_like(ids) if name == "token_type_ids" else ids for name in names)
    file = checkpoint / "onnx" / "model.onnx"
    file.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        # text-embeddings-inference does not load every graph of torch's newer exporter, and this
        # one warns that it is older, and that it traces.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Encoder(model, names),
            example,
            str(file),
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes={
                name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]
            },
            opset_version=_OPSET,
            dynamo=False,
        )
    return file


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write(Path(sys.argv[1])))
