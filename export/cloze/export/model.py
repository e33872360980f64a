"""An encoder with its heads: the torch module, its outputs, and its graphs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, HeadSpec
from cloze.export.graph.adapted import AdaptedFp32, AdaptedInt8, LowRankInputs
from cloze.export.graph.builder import GraphBuilder, StoredWeight
from cloze.export.graph.linear_ops import Fp16, InputScale, Int8, LinearOps
from cloze.export.graph.trunk import PackedTrunk, TrunkGraph
from cloze.export.heads import EXPORT_HEADS
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.head import HeadBatch, HeadGraph, HeadSetup, flat_rows
from cloze.export.heads.masked_lm import MaskedLMHead
from cloze.model_store.adapter_section import HIDDEN, HIDDEN_ROWS
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs, PackedBatch
from cloze.model_store.heads import HEADS, GraphSpec, Head
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Precision, Weights

LAYOUTS = {
    Precision.FP32: Layout.DENSE,
    Precision.INT8: Layout.DENSE,
    Precision.FP16: Layout.PACKED,
}
"""The layout of each precision. fp32 and int8 are for a CPU, fp16 is for CUDA."""

SUFFIXES = {Precision.FP32: "", Precision.INT8: "-int8", Precision.FP16: "-fp16"}
"""What the names of the files of each precision end with."""

_HEAD_SIZE_STEP, _LARGEST_HEAD_SIZE = 8, 256
"""The flash kernel takes attention heads of multiples of 8 numbers, up to 256."""


class Model(nn.Module):
    """A model of any family. Each head is an attribute with its name; None: the head is absent.

    Args:
        options: options of heads, by head name, as in a manifest.
    """

    masked_lm: MaskedLMHead | None

    def __init__(
        self,
        config: EncoderConfig,
        heads: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        names, options, family = frozenset(heads), options or {}, FAMILIES[config.family]
        self.config = config
        self.options = {name: section for name, section in options.items() if name in names}
        self.encoder = family.encoder(config)
        for name, head in EXPORT_HEADS.items():
            if head.module is None:
                continue
            module = None
            if name in names:
                spec = family.heads.get(name, HeadSpec({}))
                module = head.module(HeadSetup(config, self.encoder, spec, options.get(name)))
            setattr(self, name, module)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, H] after the last layer; see `Encoder.states`."""
        return self.encoder.states(input_ids, token_type_ids, attention_mask)[-1]


def head_module(model: Model, recipe: EmbeddingRecipe, name: str) -> Any:
    """Return the module that a head's functions take; None if the model lacks the head.

    The functions of a head without a torch module take the recipe of embeddings.
    """
    head = EXPORT_HEADS[name]
    if head.module is None and head.module_of is None:
        return recipe
    return getattr(model, head.module_of or name)


class TorchScorer:
    """Runs a torch model in fp32. Without a recipe of embeddings, they are means of tokens."""

    def __init__(
        self, model: Model, device: torch.device, recipe: EmbeddingRecipe | None = None
    ) -> None:
        self._model, self._device, self.layers = model, device, model.config.layers
        self._recipe = recipe or EmbeddingRecipe()
        graph = GraphSpec(Layout.DENSE, tuple(HEADS), token_types=True, layers=self.layers)
        self._codec = BatchCodec(graph)

    @torch.inference_mode()
    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""
        self._model.eval()
        states = hidden_states(self._model, batch, self._device)
        packed = self._codec.pack(batch)
        outputs = torch_outputs(self._model, self._recipe, states, packed, tuple(packed.requests))
        return packed.unpack(outputs)


def hidden_states(
    model: Model, batch: Sequence[Encoding], device: torch.device | None = None
) -> Tensor:
    """Return the states [N, T, H] of encodings of one length: the embeddings, then each layer."""
    ids, types = (
        torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        for rows in ([e.input_ids for e in batch], [e.token_type_ids for e in batch])
    )
    states = model.encoder.states(ids, types, _attention_mask(batch, device))
    return torch.stack(states).flatten(1, 2)


def _attention_mask(batch: Sequence[Encoding], device: torch.device | None) -> Tensor | None:
    """Return the tokens to which tokens attend, bool [B, S]; None: they attend to all tokens."""
    keys = [max((r.keys for r in e.requests.values()), default=0) or len(e) for e in batch]
    if all(count == len(encoding) for count, encoding in zip(keys, batch, strict=True)):
        return None
    positions = torch.arange(len(batch[0]), device=device)
    return positions < torch.tensor(keys, device=device)[:, None]


def torch_outputs(
    model: Model,
    recipe: EmbeddingRecipe,
    states: torch.Tensor,
    batch: PackedBatch,
    heads: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """Return the outputs of heads that a graph should compute for a batch, by output name."""
    nothing = [None] * len(batch.placement.lengths)
    outputs: dict[str, NDArray[Any]] = {}
    for name in heads:
        export_head = EXPORT_HEADS[name]
        module = head_module(model, recipe, name)
        if module is None:
            continue
        asked = HeadBatch(states, batch.requests.get(name, nothing), batch.placement)
        reference = export_head.reference(module, asked)
        outputs |= {output: values.cpu().numpy() for output, values in reference.items()}
    return outputs


class GraphWriter:
    """Writes a model's graphs into one folder; weights that two graphs share are stored once.

    Args:
        weights: the storage of matrices; the model must be rounded already (`round_weights`).
        prefix: what the names of the files begin with.
    """

    def __init__(
        self,
        model: Model,
        recipe: EmbeddingRecipe,
        heads: Sequence[Head],
        folder: Path,
        weights: Weights = Weights.FP32,
        scales: Mapping[str, InputScale] | None = None,
        prefix: str = "",
    ) -> None:
        self._model, self._recipe, self._heads = model, recipe, heads
        self._folder, self._weights, self._prefix = folder, weights, prefix
        self._scales = scales or {}
        self._stored: dict[str, StoredWeight] = {}

    @torch.no_grad()
    def write(
        self, precision: Precision = Precision.FP32, adapted: Collection[nn.Linear] | None = None
    ) -> Graph:
        """Write a graph of a precision, and its weights that are not stored yet; describe it.

        Args:
            adapted: the layers that adapters may change, in the order of the graph's inputs; None:
                the graph takes no adapters.

        Raises:
            ExportError: the model's attention heads have no fast kernel in fp16.
        """
        config, layout = self._model.config, LAYOUTS[precision]
        g = GraphBuilder(half=self._weights is not Weights.FP32)
        linear_ops = self._linear_ops(g, precision, is_adapted=adapted is not None)
        if isinstance(linear_ops, AdaptedFp32):
            groups = [group.linears for group in self._model.encoder.products().values()]
            linear_ops.low_rank = LowRankInputs(g, adapted or (), groups)
        trunk = (PackedTrunk if layout is Layout.PACKED else TrunkGraph)(linear_ops)
        modules = {
            head.name: head_module(self._model, self._recipe, head.name) for head in self._heads
        }
        for name, module in modules.items():
            if (write_keys := EXPORT_HEADS[name].write_keys) is not None:
                write_keys(module, trunk)
        rows = [(EXPORT_HEADS[name].rows, module) for name, module in modules.items()]
        if layout is Layout.DENSE and adapted is None and all(read for read, _ in rows):
            trunk.keep_rows([tensor for read, module in rows if read for tensor in read(module)])
        states = self._model.encoder.write(trunk)
        flat = flat_rows(g, layout, states[-1], config)
        graph = HeadGraph(linear_ops, layout, states, flat, config, trunk.rows)
        for name, module in modules.items():
            assert module is not None  # callers choose heads that the model has
            EXPORT_HEADS[name].write(module, graph)
        if adapted is not None:
            graph.output(graph.gather(HIDDEN_ROWS), HIDDEN, H=config.hidden_size)
        suffix = SUFFIXES[precision] + ("" if adapted is None else "-adapters")
        file = f"{self._prefix}{layout.value}{suffix}.onnx"
        weights_file = f"{self._prefix}weights{suffix}.bin"
        self._stored |= g.save(self._folder / file, self._folder / weights_file, self._stored)
        return Graph(
            file=file,
            layout=layout,
            precision=precision,
            weights=self._weights,
            opset=g.opset,
            operators=g.operators(),
        )

    def _linear_ops(self, g: GraphBuilder, precision: Precision, *, is_adapted: bool) -> LinearOps:
        match precision:
            case Precision.INT8:
                kind: type[LinearOps] = AdaptedInt8 if is_adapted else Int8
            case Precision.FP16:
                _check_head_size(self._model.config)
                kind = Fp16
            case Precision.FP32:
                kind = AdaptedFp32 if is_adapted else LinearOps
        return kind(g, self._scales, integers=self._weights is Weights.INT8)


def _check_head_size(config: EncoderConfig) -> None:
    """Refuse a family that is not packed, and heads without a variable-length flash kernel."""
    family, size = FAMILIES[config.family], config.head_size
    if Layout.PACKED not in family.layouts:
        raise ExportError(
            f"a {config.family} has no fp16 graph: {family.dense_because}; "
            "leave out --precision fp16"
        )
    if size % _HEAD_SIZE_STEP or size > _LARGEST_HEAD_SIZE:
        raise ExportError(
            f"heads of {size} numbers have no fast attention in fp16, only multiples of "
            f"{_HEAD_SIZE_STEP} up to {_LARGEST_HEAD_SIZE}; leave out --precision fp16"
        )
