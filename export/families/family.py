"""The description of a model family: which checkpoints it reads, and what they become.

Does not depend on heads: a family names them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Encoder
from cloze.export.families.rules import Rename, Rule, Target
from cloze.model_store.layouts import Layout


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head in the checkpoints of one family.

    Attributes:
        tensors: the head's tensor names in a checkpoint -> our names without the head's name. See
            `Rename` for the patterns. Reading uses any match, writing the last one.
        activation: the activation of the layer before the last one, as a key of
            `activations.ACTIVATIONS`; None: the head's usual one, the encoder's for masked language
            modelling and tanh for a classifier.
        without: the first part of the names of other tensors -> why a checkpoint with them lacks
            the head.
    """

    tensors: Mapping[str, str]
    activation: str | None = None
    without: Mapping[str, str] = field(default_factory=dict)


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
    """The mapping from one family's checkpoints to our modules, and back.

    Attributes:
        name: the family's ``model_type`` in ``config.json``.
        read_config: ``config.json`` -> sizes; raises ``KeyError`` for a missing size and
            ``ValueError`` for an unsupported setting.
        write_config: sizes -> the ``config.json`` from which `read_config` reads these sizes.
        encoder: sizes -> a new encoder.
        prefix: the first part of tensor names when the encoder is part of a larger module.
        rules: sizes -> how the encoder's tensors in a checkpoint become ours. Reading uses the
            first match, writing the last match.
        heads: the heads that checkpoints of the family may have, by head name.
        classes: names of heads -> the class of ``config.json`` that has exactly these heads.
        class_prefix: the first part of the names of transformers' classes.
        wordpiece: the family's WordPiece tokenizer; None: the family has another kind.
        sentencepiece_class: transformers' class of the family's SentencePiece tokenizer; None: the
            family has another kind.
        layouts: the layouts that the family's attention allows.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], EncoderConfig]
    write_config: Callable[[EncoderConfig], dict[str, Any]]
    encoder: Callable[[EncoderConfig], Encoder]
    prefix: str
    rules: Callable[[EncoderConfig], tuple[Rule, ...]]
    heads: Mapping[str, HeadSpec]
    class_prefix: str
    wordpiece: WordPieceKind | None = None
    sentencepiece_class: str | None = None
    classes: Mapping[frozenset[str], str] = field(default_factory=dict)
    layouts: frozenset[Layout] = frozenset(Layout)

    def read(self, tensor: str, config: EncoderConfig) -> list[Target]:
        """Return what a checkpoint's tensor becomes; nothing if our modules lack the tensor.

        Args:
            tensor: the tensor's name in the checkpoint.
            config: the sizes of the encoder.
        """
        name = tensor.removeprefix(self.prefix)
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

    def write(self, tensors: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """Return our tensors under their names in a checkpoint of this family.

        Args:
            tensors: the parameters of a model, by our names.
            config: the sizes of the encoder.
        """
        written: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            head, _, rest = name.partition(".")
            if head in self.heads:
                names = self.heads[head].tensors.items()
                matches = [Rename(*pair).write(rest, {rest: tensor}) for pair in names]
                prefix = ""
            else:
                matches = [rule.write(name, tensors) for rule in self.rules(config)]
                prefix = self.prefix
            last = [match for match in matches if match is not None][-1:]
            assert last, f"a {self.name} has no tensor {name}"
            written |= {prefix + theirs: value for theirs, value in last[0].items()}
        return written
