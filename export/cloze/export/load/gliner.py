"""Reads a folder of GLiNER: which variant it is, its encoder, its tokenizer and its head.

Source: the library gliner 0.2.29, which loads leniently: a missing tensor stays random. Here it is
refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.entities import EntityHead, SpanScorer, TokenScorer, label_recipe, mlp
from cloze.export.load.parts import HeadFiles
from cloze.export.load.source import locate, read_settings
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.error_lines import first_problem
from cloze.model_store.heads.entities import EntityKind, EntityOptions

CONFIG_FILE: Final = "gliner_config.json"

_ENCODER: Final = "token_rep_layer.bert_layer.model."
_LABEL_ENCODER: Final = "token_rep_layer.labels_encoder.model."
_LABEL_TOKENIZER: Final = "labels_tokenizer"
_FLERT: Final = "[FLERT]"
"""A token that the library adds before the markers, and never reads."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")

_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "max_width": 12,
    "max_len": 384,
    "span_mode": "markerV0",
    "num_rnn_layers": 1,
    "embed_ent_token": True,
    "class_token_index": -1,
    "ent_token": "<<ENT>>",
    "sep_token": "<<SEP>>",
}
"""What the library takes for fields that older configs lack."""

_SPAN_MODES: Final = ("markerV0", "marker", "token_level")

_REFUSED: Final[Mapping[str, str]] = {
    "labels_decoder": "a decoder that writes labels",
    "relations_layer": "relations between entities",
    "represent_spans": "spans beside words",
    "fuse_layers": "a sum of all layers of the encoder",
    "span_encoder_config": "an encoder of spans",
    "precomputed_prompts_mode": "labels that are part of the weights",
}
"""Fields that no export computes, if they are set."""

_REFUSED_OF_BI_ENCODERS: Final = "post_fusion_schema"
"""A field that other variants ignore."""

_ONLY: Final[Mapping[str, Any]] = {"subtoken_pooling": "first", "words_splitter_type": "whitespace"}

_STREAMING: Final = "gliner_streaming_span"

_LONGEST: Final = 1024
"""Tokens of the longest sequence of an encoder without a table of positions.

384 words and a prompt may have more than the 512 tokens that DeBERTa's settings name.
"""

_SPAN_TENSORS: Final[Mapping[str, str]] = {
    "scorer.start.": "span_rep_layer.span_rep_layer.project_start.",
    "scorer.end.": "span_rep_layer.span_rep_layer.project_end.",
    "scorer.out.": "span_rep_layer.span_rep_layer.out_project.",
    "scorer.label.": "prompt_rep_layer.",
}
_TOKEN_TENSORS: Final[Mapping[str, str]] = {
    "scorer.word.": "scorer.proj_token.",
    "scorer.label.": "scorer.proj_label.",
    "scorer.out.": "scorer.out_mlp.",
}
_SHARED_TENSORS: Final[Mapping[str, str]] = {
    "projection.": "token_rep_layer.projection.",
    "lstm.": "rnn.lstm.",
}
"""The first parts of our names, and those of the checkpoint."""

_LABEL_TENSORS: Final[Mapping[str, str]] = {
    "projection.": "token_rep_layer.labels_projection.",
    "label.": _SPAN_TENSORS["scorer.label."],
}
"""The same of the layers after the encoder of labels, in a bi-encoder."""


@dataclass(frozen=True, slots=True)
class GlinerFolder:
    """A folder with a `CONFIG_FILE`.

    Attributes:
        config: the file, with `_DEFAULTS`.
        backbone: a folder with the ``config.json`` of the encoder, and its tokenizer if the
            checkpoint has none; None: the checkpoint has both.
        label_backbone: the same for the encoder of labels of a bi-encoder.
    """

    path: Path
    config: Mapping[str, Any]
    backbone: Path | None
    label_backbone: Path | None

    @classmethod
    def read(cls, path: Path, backbone: str | None) -> "GlinerFolder":
        """Return the folder of a checkpoint.

        Args:
            backbone: directory or repository of the backbone; None: the config names it. Only the
                config names that of the encoder of labels.

        Raises:
            ExportError: the folder is none of GLiNER, no export computes this variant, or the
                backbone cannot be loaded.
        """
        if not (path / CONFIG_FILE).is_file():
            raise ExportError(
                f"--backbone is for a checkpoint of GLiNER; {path} has no {CONFIG_FILE}"
            )
        config = {**_DEFAULTS, **read_settings(path / CONFIG_FILE)}
        _check_variant(config)
        is_whole = config.get("encoder_config") and _has_tokenizer(path)
        found = labels = None
        if backbone is not None or not is_whole:
            name = backbone or config.get("model_name")
            if not isinstance(name, str):
                problem = f"{CONFIG_FILE} names no model_name"
                raise ExportError(f"{problem}; name its backbone by --backbone")
            found = _backbone(name, "by --backbone")
        if (label_name := config.get("labels_encoder")) and not (
            config.get("labels_encoder_config") and _has_tokenizer(path / _LABEL_TOKENIZER)
        ):
            labels = _backbone(str(label_name), f"as labels_encoder in {CONFIG_FILE}")
        return cls(path, config, found, labels)

    @property
    def is_bi_encoder(self) -> bool:
        """Whether labels have an encoder of their own."""
        return bool(self.config.get("labels_encoder"))

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.path if self.backbone is None or _has_tokenizer(self.path) else self.backbone

    @property
    def label_tokenizer(self) -> Path:
        """The folder of the tokenizer of labels of a bi-encoder."""
        own = self.path / _LABEL_TOKENIZER
        return own if self.label_backbone is None or _has_tokenizer(own) else self.label_backbone

    def encoder_settings(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the ``config.json`` of the encoder, with as many words as its table has rows."""
        return _settings(self.config.get("encoder_config"), self.backbone, tensors, _ENCODER)

    def label_settings(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the same of the encoder of labels."""
        given = self.config.get("labels_encoder_config")
        return _settings(given, self.label_backbone, tensors, _LABEL_ENCODER)

    def with_markers(self, tokenizer: CheckpointTokenizer) -> CheckpointTokenizer:
        """Return a tokenizer that has the markers of labels and words, or no marker.

        A bi-encoder reads none: the library adds them to its tokenizer, but not to its words.

        Raises:
            ExportError: the checkpoint has a tokenizer without them, or with other ids.
        """
        backend, names = tokenizer.tokenizer, [self.config["ent_token"], self.config["sep_token"]]
        if self.is_bi_encoder:
            backend = _without(backend, [_FLERT, *names])
            return replace(tokenizer, tokenizer=backend, max_tokens=None)
        missing = [name for name in names if backend.token_to_id(name) is None]
        if missing and self.tokenizer == self.path:
            raise ExportError(f"the tokenizer lacks the marker {missing[0]}")
        if missing:
            added = [AddedToken(name, special=True) for name in (_FLERT, *names)]
            backend.add_tokens(added)
        index, expected = backend.token_to_id(names[0]), self.config["class_token_index"]
        if expected not in (-1, index):
            raise ExportError(
                f"{CONFIG_FILE}: class_token_index is {expected}, but the tokenizer has "
                f"{names[0]} at {index}"
            )
        return replace(tokenizer, max_tokens=None)

    def read_head(self, files: HeadFiles) -> EntityHead:
        """Return the head; take its tensors out of those of the checkpoint.

        Raises:
            ExportError: a setting is invalid, or a tensor is missing or invalid.
        """
        config, tensors = self.config, files.tensors
        is_token, is_bi = config["span_mode"] == "token_level", self.is_bi_encoder
        find = files.tokenizer.tokenizer.token_to_id
        size, layers = config["hidden_size"], config["num_rnn_layers"]
        try:
            options = EntityOptions(
                kind=EntityKind.TOKEN if is_token else EntityKind.SPAN,
                max_width=config["max_width"],
                max_len=config["max_len"],
                ent_id=None if is_bi else find(config["ent_token"]),
                sep_id=None if is_bi else find(config["sep_token"]),
                embed_ent_token=config["embed_ent_token"],
                label_size=size if is_bi else None,
            )
        except ValidationError as error:
            raise ExportError(f"{CONFIG_FILE}: {first_problem(error)}") from None
        if not (type(size) is int and size > 0 and type(layers) is int and layers <= 8):
            raise ExportError(f"{CONFIG_FILE}: hidden_size {size!r} and num_rnn_layers {layers!r}")
        if is_bi or (
            config.get("has_rnn") is False and not any(name.startswith("rnn.") for name in tensors)
        ):
            layers = 0
        is_marker = config["span_mode"] == "marker"
        scorer = (
            TokenScorer(size)
            if is_token
            else SpanScorer(size, options.max_width, is_marker=is_marker, reads_rows=not is_bi)
        )
        hidden = files.config.hidden_size
        head = EntityHead(
            hidden, size, max(0, layers), scorer, options, is_projected=hidden != size
        )
        _fill(head, tensors, {**_SHARED_TENSORS, **(_TOKEN_TENSORS if is_token else _SPAN_TENSORS)})
        return head

    def read_label_recipe(self, tensors: dict[str, Tensor], hidden_size: int) -> EmbeddingRecipe:
        """Return how an encoder of labels embeds a label; take its tensors out of the others.

        Raises:
            ExportError: a tensor is missing or invalid.
        """
        size = self.config["hidden_size"]
        layers = nn.ModuleDict({"label": mlp(4 * size, size, size)})
        if hidden_size != size:
            layers["projection"] = nn.Linear(hidden_size, size)
        _fill(layers, tensors, _LABEL_TENSORS)
        return label_recipe(layers)


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; those of the encoder without their first part."""
    return {name.removeprefix(_ENCODER): tensor for name, tensor in tensors.items()}


def take_labels(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the tensors of the encoder of labels, and of the layers after it, out of a checkpoint's.

    Those of the encoder are without their first part.
    """
    firsts = (_LABEL_ENCODER, *_LABEL_TENSORS.values())
    taken = [name for name in tensors if name.startswith(firsts)]
    return {name.removeprefix(_LABEL_ENCODER): tensors.pop(name) for name in taken}


def with_room(config: EncoderConfig) -> EncoderConfig:
    """Return the sizes of an encoder that reads `_LONGEST` tokens if no table limits them."""
    if config.position_embeddings or config.relative_positions is None:
        return config
    return replace(config, max_positions=max(config.max_positions, _LONGEST))


def _backbone(name: str, where: str) -> Path:
    """Return a folder with the files of a backbone, but its weights."""
    try:
        return locate(name, with_weights=False).folder
    except ExportError as error:
        raise ExportError(
            f"{error}; the checkpoint needs config.json and the tokenizer of its backbone {name}: "
            f"name a directory with both {where}"
        ) from None


def _settings(
    given: Any, backbone: Path | None, tensors: Mapping[str, Tensor], first: str
) -> dict[str, Any]:
    """Return the settings of an encoder, by its tensors without the first part of their names."""
    settings = given
    if not isinstance(settings, dict):
        assert backbone is not None  # else the folder was refused
        settings = read_settings(backbone / "config.json")
        if not settings:
            raise ExportError(f"the backbone {backbone} holds no config.json")
    rows = [
        len(tensor)
        for name, tensor in tensors.items()
        if name.startswith("embeddings.")
        and name.endswith(("word_embeddings.weight", "tok_embeddings.weight"))
    ]
    if not rows:
        raise ExportError(f"the checkpoint has no table of words below {first}")
    # The class is that of the backbone, not of the checkpoint.
    return {**settings, "vocab_size": rows[0], "architectures": None}


def _without(tokenizer: Tokenizer, names: Sequence[str]) -> Tokenizer:
    """Return a tokenizer without some of the tokens that were added to its vocabulary."""
    described = json.loads(tokenizer.to_str())
    added = described["added_tokens"]
    described["added_tokens"] = [token for token in added if token["content"] not in names]
    return Tokenizer.from_str(json.dumps(described))


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def _check_variant(config: Mapping[str, Any]) -> None:
    """Raise `ExportError` for a variant that no export computes."""
    for name, computes in _REFUSED.items():
        if config.get(name):
            raise ExportError(f"a GLiNER with {computes} is not supported ({CONFIG_FILE}: {name})")
    if config.get("model_type") == _STREAMING:
        raise ExportError("a GLiNER for streams, on a decoder, is not supported")
    for name, only in _ONLY.items():
        if (value := config.get(name, only)) != only:
            raise ExportError(f"{CONFIG_FILE}: {name} {value!r:.80} is not supported ({only})")
    if (mode := config["span_mode"]) not in _SPAN_MODES:
        known = ", ".join(_SPAN_MODES)
        raise ExportError(f"{CONFIG_FILE}: span_mode {mode!r:.80} is not supported ({known})")
    if config.get("labels_encoder"):
        fused = config.get(_REFUSED_OF_BI_ENCODERS)
        if fused or mode == "token_level":
            setting = _REFUSED_OF_BI_ENCODERS if fused else f"span_mode {mode}"
            problem = f"a GLiNER with an encoder for labels and {setting} is not supported"
            raise ExportError(f"{problem} ({CONFIG_FILE}: labels_encoder)")


def _fill(module: nn.Module, tensors: dict[str, Tensor], names: Mapping[str, str]) -> None:
    """Fill a module from the tensors of a checkpoint, which are taken out."""
    state = {}
    for ours, parameter in module.state_dict().items():
        first = next(one for one in names if ours.startswith(one))
        theirs = names[first] + ours.removeprefix(first)
        if (tensor := tensors.pop(theirs, None)) is None:
            raise ExportError(
                f"the checkpoint lacks {theirs}: it is missing or renamed, or {CONFIG_FILE} asks "
                "for one too many; the library would compute with random numbers"
            )
        if tensor.shape != parameter.shape:
            raise ExportError(
                f"{theirs} has shape {list(tensor.shape)}, but {CONFIG_FILE} asks for "
                f"{list(parameter.shape)}"
            )
        if not tensor.isfinite().all():
            raise ExportError(f"{theirs} holds NaN or infinity")
        state[ours] = tensor.float()
    module.load_state_dict(state)
