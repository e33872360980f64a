"""The part of an export that makes a bundle the base of adapters (`AdapterSupport`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family
from cloze.export.graph.session import Session
from cloze.export.model import Model, hidden_states
from cloze.model_store import adapter_section
from cloze.model_store.adapter_section import (
    AdaptedLayer,
    AdapterHead,
    AdapterSupport,
    HeadActivation,
)
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import GraphSpec
from cloze.model_store.layouts import Feeds
from cloze.model_store.manifest import Graph, Precision

ALL_LAYERS: Final = "all-linear"
"""PEFT's name of all linear layers."""

TENSORS_FILE: Final = "adapter-heads.safetensors"

_HEADS: Final = ("sequence_classification", "token_classification")
_DEFAULT_ACTIVATION: Final = "tanh"

_RANK, _TOKENS = 4, 16


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """The linear layers of a model that adapters may change.

    Attributes:
        parts: by name of a module of transformers, without the prefix, the layers that it has as
            one, in the order of their rows.
    """

    model: Model
    parts: Mapping[str, tuple[nn.Linear, ...]]

    @classmethod
    def of(cls, model: Model, targets: Sequence[str]) -> "AdaptedModel":
        """Return the layers whose names end with one of these, as PEFT's ``target_modules``.

        Raises:
            ExportError: a target names no linear layer of the encoder.
        """
        parts = _packed_layers(model)
        chosen: dict[str, tuple[nn.Linear, ...]] = {}
        for target in targets:
            matching = {
                name: layers
                for name, layers in parts.items()
                if target == ALL_LAYERS or name == target or name.endswith(f".{target}")
            }
            if not matching:
                known = sorted({name.rpartition(".")[2] for name in parts})
                raise ExportError(
                    f"--adapters {target}: no linear layer of the encoder has the name "
                    f"(there: {', '.join(known)}; or {ALL_LAYERS})"
                )
            chosen |= matching
        return cls(model, chosen)

    @property
    def numbers(self) -> dict[nn.Linear, int]:
        """The place of each layer among those of `adapter_in`."""
        layers = dict.fromkeys(layer for parts in self.parts.values() for layer in parts)
        return {layer: number for number, layer in enumerate(layers)}

    def describe(self, graphs: Mapping[Precision, Graph], folder: Path) -> AdapterSupport:
        """Return the section of the manifest; write the tensors of the base's heads."""
        family, numbers = FAMILIES[self.model.config.family], self.numbers
        heads = _heads(family)
        tensors = self._tensors_of_heads(heads)
        if tensors:
            (folder / TENSORS_FILE).write_bytes(save(tensors))
        return AdapterSupport(
            graph=graphs[Precision.FP32],
            int8=graphs.get(Precision.INT8),
            prefixes=tuple(prefix for prefix in (family.prefix, *family.other_prefixes) if prefix),
            layers={
                name: AdaptedLayer(
                    numbers=tuple(numbers[layer] for layer in layers),
                    inputs=layers[0].in_features,
                    outputs=layers[0].out_features,
                )
                for name, layers in self.parts.items()
            },
            heads=heads,
            tensors_file=TENSORS_FILE if tensors else None,
        )

    def _tensors_of_heads(self, heads: Mapping[str, AdapterHead]) -> dict[str, Tensor]:
        """Return the poolers of the model's heads, which adapters usually leave as they are."""
        tensors: dict[str, Tensor] = {}
        for name in ("next_sentence", *_HEADS):
            module = getattr(self.model, name, None)
            spec = heads.get(name) or heads.get(_HEADS[0])
            if spec is None or module is None or getattr(module, "pooler", None) is None:
                continue
            for theirs, ours in spec.tensors.items():
                if ours.startswith("pooler."):
                    tensors[theirs] = module.get_parameter(ours).detach().contiguous()
        return tensors

    @torch.no_grad()
    def verify(self, session: Session, spec: GraphSpec, tolerance: float) -> float:
        """Compare a graph with torch for sequences of three adapters and of none, in one batch.

        torch runs each sequence with the low-rank product merged into its weights.

        Returns:
            The largest difference of the hidden states, relative to their largest value.

        Raises:
            ExportError: it is more than the tolerance, as in a family whose graph has constants
                that depend on an adapted layer.
        """
        rng = np.random.default_rng(0)
        vocabulary = self.model.config.vocab_size
        batch = [
            Encoding(ids, np.zeros(_TOKENS, np.int32))
            for ids in rng.integers(0, vocabulary, (4, _TOKENS), np.int32)
        ]
        adapters = [self._random(rng) if number else {} for number in range(len(batch))]
        expected = [
            self._merged_states(encoding, adapter)
            for encoding, adapter in zip(batch, adapters, strict=True)
        ]
        feeds = BatchCodec(spec).pack(batch).feeds | self._feeds(adapters)
        feeds[adapter_section.HIDDEN_ROWS.name] = np.arange(4 * _TOKENS, dtype=np.int32)
        (hidden,) = session.run([adapter_section.HIDDEN.name], feeds)
        wanted = np.concatenate(expected)
        error = float(np.abs(hidden - wanted).max() / max(1.0, np.abs(wanted).max()))
        if not error <= tolerance:
            raise ExportError(
                f"a {self.model.config.family} with adapters on these layers differs from torch by "
                f"{error:.1e}, more than {tolerance:.0e}: leave out --adapters"
            )
        return error

    def _random(self, rng: np.random.Generator) -> dict[nn.Linear, tuple[Tensor, Tensor]]:
        """Return a random A [R, in] and B [out, R] for each layer."""

        def draw(*shape: int) -> Tensor:
            return torch.from_numpy(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32))

        return {
            layer: (draw(_RANK, layer.in_features), 0.3 * draw(layer.out_features, _RANK))
            for layer in self.numbers
        }

    def _merged_states(
        self, encoding: Encoding, adapter: Mapping[nn.Linear, tuple[Tensor, Tensor]]
    ) -> NDArray[np.float32]:
        """Return the last hidden states [S, H] of a sequence with an adapter."""
        before = {layer: layer.weight.data for layer in adapter}
        try:
            for layer, (a, b) in adapter.items():
                layer.weight.data = before[layer] + b @ a
            return cast(NDArray[np.float32], hidden_states(self.model, [encoding])[-1].numpy())
        finally:
            for layer, weight in before.items():
                layer.weight.data = weight

    def _feeds(self, adapters: Sequence[Mapping[nn.Linear, Any]]) -> Feeds:
        """Return the tables and the rows of adapters, one per sequence."""
        numbers = self.numbers
        rows = np.zeros((2, len(adapters), len(numbers), _RANK), np.int32)
        widths = {w for layer in numbers for w in (layer.in_features, layer.out_features)}
        tables = {width: [np.zeros((1, width), np.float32)] for width in widths}
        for sequence, adapter in enumerate(adapters):
            for layer, (a, b) in adapter.items():
                for side, matrix in enumerate((a, b.t())):
                    table = tables[matrix.shape[1]]
                    first = sum(map(len, table))
                    rows[side, sequence, numbers[layer]] = range(first, first + _RANK)
                    table.append(matrix.numpy())
        return adapter_section.row_inputs(
            {width: np.concatenate(table) for width, table in tables.items()}, rows
        )


def _packed_layers(model: Model) -> dict[str, tuple[nn.Linear, ...]]:
    """Return the names of transformers' linear modules -> our layers that each has as one.

    Adapters name modules, not the tensors of files, which some families name otherwise. A layer
    that stands twice has its first name.
    """
    linears = {
        f"{name}.weight": module
        for name, module in model.encoder.named_modules(prefix="encoder")
        if isinstance(module, nn.Linear)
    }
    packed: dict[str, tuple[str, list[str]]] = {}
    for rule in FAMILIES[model.config.family].rules(model.config):
        for layer in range(model.config.layers):
            theirs = rule.theirs.replace("*", str(layer)).replace("{p}", "weight")
            ours = [target.name for target in rule.read(theirs)]
            for name in ours:
                packed.setdefault(name, (theirs.removesuffix(".weight"), ours))
    return {
        theirs: tuple(linears[name] for name in ours)
        for theirs, ours in (packed[name] for name in linears)
    }


def _heads(family: Family) -> dict[str, AdapterHead]:
    """Return the heads that adapters of a family may have: a classifier, and a pooler before it."""
    heads = {}
    for name in _HEADS:
        if (spec := family.heads.get(name)) is None:
            continue
        activation = spec.activation or _DEFAULT_ACTIVATION
        parts = {ours.partition(".")[0] for ours in spec.tensors.values()}
        if not parts <= {"pooler", "classifier"} or activation not in get_args(HeadActivation):
            continue
        tensors = {
            family.without_prefix(theirs.replace("{p}", kind)): ours.replace("{p}", kind)
            for theirs, ours in spec.tensors.items()
            for kind in ("weight", "bias")
        }
        heads[name] = AdapterHead(tensors=tensors, activation=cast(HeadActivation, activation))
    return heads
