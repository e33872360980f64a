"""Writes the graph that text-embeddings-inference and infinity-emb load: plain operators, fp32.

    python -m cloze.bench.peers.plain_onnx CHECKPOINT    # writes CHECKPOINT/onnx/model.onnx

The program needs torch, onnx and transformers.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

_OPSET = 17


class _OneOutput(torch.nn.Module):
    """A transformers model whose inputs have a fixed order, and which has one output."""

    def __init__(self, model: torch.nn.Module, names: list[str], output: str) -> None:
        super().__init__()
        self._model, self._names, self._output = model, names, output

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output for int64 inputs [B, S]."""
        named = dict(zip(self._names, inputs, strict=True))
        values: Tensor = getattr(self._model(**named), self._output)
        return values


def write(checkpoint: Path) -> Path:
    """Write the graph into the checkpoint, and return its path.

    The graph's output is the logits [B, L] of a text classifier, or the last hidden state [B, S, H]
    of any other checkpoint.

    Raises:
        OSError: the folder has no checkpoint, or is not writable.
    """
    # Of the implementations of attention, this one can be traced.
    architectures = AutoConfig.from_pretrained(checkpoint).architectures or []
    classifies = any(name.endswith("ForSequenceClassification") for name in architectures)
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    output = "logits" if classifies else "last_hidden_state"
    model = kind.from_pretrained(checkpoint, attn_implementation="eager").eval()
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
            _OneOutput(model, names, output),
            example,
            str(file),
            input_names=names,
            output_names=[output],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in names}
            | {output: {0: "batch"} if classifies else {0: "batch", 1: "length"}},
            opset_version=_OPSET,
            dynamo=False,
        )
    return file


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write(Path(sys.argv[1])))
