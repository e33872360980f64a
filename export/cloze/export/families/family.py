"""The description of a model family: which checkpoints it reads, and what they become.

Rules map the tensors of checkpoints to ours. A name in a rule may be a pattern: ``*`` stands for
the number of a layer, ``{p}`` for ``weight`` or ``bias``. A family names its heads, but does not
depend on them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Encoder
from cloze.model_store.layouts import Layout


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Target:
    """What a tensor of a checkpoint becomes.

    Attributes:
        convert: the checkpoint's tensor -> ours; raises ``ValueError`` or an error of torch for a
            tensor of another shape.
        is_added: whether the result is added to the tensor of another rule with this name.
    """

    name: str
    convert: Callable[[Tensor], Tensor] = _unchanged
    is_added: bool = False


class Rule(Protocol):
    """The mapping of some tensors, or of some per layer."""

    @property
    def theirs(self) -> str:
        """Return the name of the tensors in a checkpoint."""

    def read(self, name: str) -> list[Target]:
        """Return what a tensor of a checkpoint becomes; nothing if the rule is not about it."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The tensor is ours, under another name."""

    theirs: str
    ours: str

    def read(self, name: str) -> list[Target]:
        """See `Rule`."""
        new = _translate(name, self.theirs, self.ours)
        return [Target(new)] if new else []


@dataclass(frozen=True, slots=True)
class Slice:
    """Our tensor is the checkpoint's without its first rows.

    Attributes:
        first: number of rows that are left out.
    """

    theirs: str
    ours: str
    first: int

    def read(self, name: str) -> list[Target]:
        """See `Rule`."""
        return [Target(self.ours, lambda rows: rows[self.first :])] if name == self.theirs else []


@dataclass(frozen=True, slots=True)
class Split:
    """Several of our tensors are the rows of one of the checkpoint, in equal parts.

    For example, queries, keys and values of attention are often packed.

    Attributes:
        ours: our names, in the order of their rows.
    """

    theirs: str
    ours: tuple[str, ...]

    def read(self, name: str) -> list[Target]:
        """See `Rule`."""
        parts = enumerate(_translate(name, self.theirs, ours) for ours in self.ours)
        return [Target(ours, partial(self._part, number)) for number, ours in parts if ours]

    def _part(self, number: int, rows: Tensor) -> Tensor:
        if len(rows) % len(self.ours):
            raise ValueError(f"its rows are not {len(self.ours)} equal parts")
        return rows.chunk(len(self.ours))[number]


@dataclass(frozen=True, slots=True)
class Fold:
    """The first row of the checkpoint's tensor is part of each row of ours."""

    theirs: str
    ours: str
    into: Rule

    def read(self, name: str) -> list[Target]:
        """See `Rule`."""
        if name == self.theirs:
            return [Target(self.ours, lambda rows: rows[:1], is_added=True)]
        return self.into.read(name)


def refuse_settings(config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Check that each setting has the only value that is supported, which is its default.

    Raises:
        ValueError: a setting has another value.
    """
    for name, value in only.items():
        if (given := config.get(name)) is not None and given != value:
            raise ValueError(f"{name} {given!r} is not supported (only {value!r})")


def layer_rules(prefix: str, names: Mapping[str, str]) -> tuple[Rename, ...]:
    """Return the rules of the linear layers and norms of every layer of an encoder.

    Args:
        prefix: the first part of their names in a checkpoint.
        names: their names in a checkpoint -> our names, both within a layer.
    """
    return tuple(
        Rename(f"{prefix}.{theirs}.{{p}}", f"encoder.layers.*.{ours}.{{p}}")
        for theirs, ours in names.items()
    )


def packed_attention(theirs: str) -> Split:
    """Return the rule of queries, keys and values in one layer of every layer of an encoder."""
    parts = ("query", "key", "value")
    return Split(theirs, tuple(f"encoder.layers.*.attention.{part}.{{p}}" for part in parts))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        re.escape(name).replace(r"\*", r"(?P<layer>\d+)").replace(r"\{p\}", "(?P<p>weight|bias)")
    )


def _translate(name: str, old: str, new: str) -> str | None:
    """Return ``name`` in the form of ``new`` if the name has the form of ``old``, else None."""
    match = _pattern(old).fullmatch(name)
    return match and match.expand(new.replace("*", r"\g<layer>").replace("{p}", r"\g<p>"))


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head in the checkpoints of one family.

    Attributes:
        tensors: the head's tensor names in a checkpoint -> our names without the head's name. See
            `Rename` for the patterns.
        activation: the activation of the layer before the last one, as a key of
            `layer.ACTIVATIONS`; None: the head's usual one, the encoder's for masked language
            modelling and tanh for a classifier.
        without: the first part of the names of other tensors -> why a checkpoint with them lacks
            the head.
        needs_class: whether ``config.json`` must name a class that has this head, because another
            head of the family has tensors of the same names.
        optional: our names of tensors that the head has only if the settings say so.
        zeros: our names of tensors that are zeros if a checkpoint lacks them.
    """

    tensors: Mapping[str, str]
    activation: str | None = None
    without: Mapping[str, str] = field(default_factory=dict)
    needs_class: bool = False
    optional: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()

    def has(self, part: str) -> bool:
        """Return whether the head has a part, by the first part of our tensor names."""
        return any(ours.startswith(f"{part}.") for ours in self.tensors.values())


def lm_head(dense: str, norm: str, decoder: str, bias: str = "", **others: Any) -> HeadSpec:
    """Return a head of masked language modelling by the names of its layers in a checkpoint.

    Args:
        bias: the name of a bias that is no tensor of the decoder's layer; "": there is none.
        others: see `HeadSpec`.
    """
    layers = {dense: "transform", norm: "norm", decoder: "decoder"}
    tensors = {f"{theirs}.{{p}}": f"{ours}.{{p}}" for theirs, ours in layers.items()}
    return HeadSpec(tensors | ({bias: "decoder.bias"} if bias else {}), **others)


def classifier(pooler: str, last: str = "classifier", **others: Any) -> HeadSpec:
    """Return a head for whole texts by the names of its two layers in a checkpoint."""
    return HeadSpec({f"{pooler}.{{p}}": "pooler.{p}", f"{last}.{{p}}": "classifier.{p}"}, **others)


@dataclass(frozen=True, slots=True)
class WordPieceKind:
    """The WordPiece tokenizer that a family's ``vocab.txt`` describes.

    Attributes:
        name: transformers' class of the tokenizer.
        tokens: names of the special tokens, by their keys in ``tokenizer_config.json``; the others
            have BERT's names.
        separators: number of separators between the texts of a pair. With two of them, all token
            types are 0.
    """

    name: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    separators: int = 1


@dataclass(frozen=True, slots=True)
class Family:
    """The mapping from one family's checkpoints to our modules.

    Attributes:
        name: the family's ``model_type`` in ``config.json``.
        read_config: ``config.json`` -> sizes; raises ``KeyError`` for a missing size and
            ``ValueError`` for an unsupported setting.
        other_types: other values of ``model_type`` that checkpoints of the family have.
        prefix: the first part of tensor names when the encoder is part of a larger module.
        other_prefixes: what some checkpoints have instead of ``prefix``.
        rules: sizes -> how the encoder's tensors in a checkpoint become ours; the first match
            counts. Of several names of one of our linear layers, the first is that of transformers'
            module, which adapters name.
        heads: the heads that checkpoints of the family may have, by head name.
        class_prefix: the first part of the names of transformers' classes.
        wordpiece: the family's WordPiece tokenizer; None: the family has another kind.
        sentencepiece_class: transformers' class of the family's SentencePiece tokenizer; None: the
            family has another kind.
        byte_level_class: transformers' class of the family's byte-level BPE tokenizer, with two
            separators between the texts of a pair; None: the family has another kind.
        layouts: the layouts that the family allows.
        dense_because: why the family does not allow the packed layout, which fp16 takes.
        defaults: settings that ``config.json`` may lack -> what transformers takes for them.
        wrong_defaults: settings that ``config.json`` must have, because what transformers takes for
            them is wrong for the family's published weights.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    encoder: Callable[[EncoderConfig], Encoder]
    prefix: str
    rules: Callable[[EncoderConfig], tuple[Rule, ...]]
    heads: Mapping[str, HeadSpec]
    class_prefix: str
    wordpiece: WordPieceKind | None = None
    sentencepiece_class: str | None = None
    byte_level_class: str | None = None
    layouts: frozenset[Layout] = frozenset(Layout)
    dense_because: str = (
        "its attention adds a bias to the scores, which the variable-length kernel does not"
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)
    wrong_defaults: frozenset[str] = frozenset()
    other_types: frozenset[str] = frozenset()
    other_prefixes: tuple[str, ...] = ()

    def without_prefix(self, tensor: str) -> str:
        """Return the name of a checkpoint's tensor without the first part that varies."""
        for prefix in (self.prefix, *self.other_prefixes):
            if tensor.startswith(prefix):
                return tensor.removeprefix(prefix)
        return tensor

    def read(self, tensor: str, config: EncoderConfig) -> list[Target]:
        """Return what a checkpoint's tensor becomes; nothing if our modules lack the tensor.

        A tensor of a further head has our own name: a classifier of texts and one of tokens have
        one name in transformers.
        """
        if tensor.partition(".")[0] in self.heads:
            return [Target(tensor)]
        name = self.without_prefix(tensor)
        name = name.replace(".gamma", ".weight").replace(".beta", ".bias")
        for rule in self.rules(config):
            if targets := rule.read(name):
                return targets
        return [
            Target(f"{head}.{ours}")
            for head, spec in self.heads.items()
            if (ours := self._name_in(spec, name)) is not None
        ]

    def _name_in(self, spec: HeadSpec, name: str) -> str | None:
        """Return a head's name of a tensor, which another head may have too; None: it has none."""
        for theirs, ours in spec.tensors.items():
            if targets := Rename(theirs.removeprefix(self.prefix), ours).read(name):
                return targets[0].name
        return None
