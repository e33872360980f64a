"""Loads what exists: a Hugging Face or sentence-transformers directory, or a hub id, becomes a torch `Model`.

Every tensor of ours is filled from exactly one of the checkpoint's, in shape, finite; otherwise nothing is loaded.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from export.errors import ExportError
from export.heads import EMBEDDING, EXPORT_HEADS, ExportHead, tensor_names
from export.models import FAMILIES, EncoderConfig, Family, Model
from export.models.activations import ACTIVATIONS
from export.sentence import EmbeddingRecipe, encoder_folder, read_recipe
from export.settings_files import read_settings
from export.source import locate
from export.tensors import read_tensors, sha256_of, weight_files
from export.tokenizer import CheckpointTokenizer, load_tokenizer
from model_store.heads import Head
from model_store.heads.head import Frozen
from model_store.manifest import Source

_ENCODER_PREFIXES = ("embeddings.", "encoder.", "transformer.")
"""How the names of an encoder's tensors begin, its family's prefix removed."""

_PADDING_ROWS = 127
"""How many rows an embedding may have beyond the vocabulary: it is often padded to a multiple of up to 128."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        model: in evaluation mode, float32, with the heads the checkpoint has.
        heads: what it can be exported for.
        default_heads: what it is exported for unless asked otherwise.
        options: what a manifest says of a head, by head name.
        license: as the model card's front matter names it.
        card: the model card, if there is one.
        notes: what its user should know (missing heads, guesses), a line each.
    """

    model: Model
    tokenizer: CheckpointTokenizer
    recipe: EmbeddingRecipe
    heads: tuple[Head, ...]
    default_heads: tuple[Head, ...]
    options: Mapping[str, Frozen]
    source: Source
    license: str | None
    card: str | None
    notes: tuple[str, ...]


def load_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        source: a directory, or a hub id.
        revision: the hub's branch, tag or commit.

    Raises:
        ExportError: it cannot be loaded, or not wholly.
    """
    files = locate(source, revision)
    recipe = read_recipe(files.folder)
    folder = encoder_folder(files.folder)
    family, config, settings = _read_config(folder)
    weights = weight_files(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(tokenizer, config)

    model, notes = _fill(read_tensors(weights), family, config, settings)
    if model.masked_lm is not None:
        if tokenizer.mask_id is None:
            raise ExportError(
                "the checkpoint has a masked-language-model head, but its tokenizer has no [MASK] token"
            )
        # Rows beyond the vocabulary stand for no token: they must never be predicted.
        model.masked_lm.decoder.bias.data[tokenizer.size :] = torch.finfo(torch.float32).min / 2
    if tokenizer.note:
        notes.append(tokenizer.note)

    card_file = files.folder / "README.md"
    card = card_file.read_text(encoding="utf-8", errors="replace") if card_file.is_file() else None
    heads = tuple(
        head
        for name, head in EXPORT_HEADS.items()
        if head.module is None or getattr(model, name) is not None
    )
    return Checkpoint(
        model=model.eval(),
        tokenizer=tokenizer,
        recipe=recipe or EmbeddingRecipe(),
        heads=tuple(head.head for head in heads),
        default_heads=_default_heads(heads, says_pooling=recipe is not None),
        options=_read_options(heads, settings),
        source=Source(
            kind=files.kind,
            location=files.location,
            revision=files.revision,
            weights_sha256=sha256_of(weights),
        ),
        license=_license(card),
        card=card,
        notes=tuple(notes),
    )


def _read_config(folder: Path) -> tuple[Family, EncoderConfig, Mapping[str, Any]]:
    settings = read_settings(folder / "config.json")
    if not settings:
        raise ExportError(f"{folder} holds no config.json")
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ExportError(
            f"architecture {kind!r} is not supported (config.json's model_type: {', '.join(FAMILIES)})"
        )
    if settings.get("quantization_config"):
        raise ExportError(
            "the checkpoint is quantised (config.json's quantization_config); export the original weights"
        )
    try:
        config = FAMILIES[kind].read_config(settings)
    except KeyError as error:
        raise ExportError(f"config.json does not give {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        at = (
            f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}"
            if first["loc"]
            else first["msg"]
        )
        raise ExportError(f"config.json: {at}") from error
    except ValueError as error:
        raise ExportError(f"config.json: {error}") from error
    if config.activation not in ACTIVATIONS:
        raise ExportError(
            f"activation {config.activation!r} is not supported ({', '.join(ACTIVATIONS)})"
        )
    return FAMILIES[kind], config, settings


def _check_vocabulary(tokenizer: CheckpointTokenizer, config: EncoderConfig) -> None:
    rows, size = config.vocab_size, tokenizer.size
    if size > rows or rows - size > _PADDING_ROWS:
        raise ExportError(
            f"the tokenizer has {size} tokens, but the embedding has {rows} rows: they do not belong together"
        )


def _default_heads(heads: tuple[ExportHead, ...], *, says_pooling: bool) -> tuple[Head, ...]:
    """Return the heads to export unless asked otherwise.

    An encoder that was tuned for answers or labels is not one for embeddings, unless the
    checkpoint says how to pool them.
    """
    tuned = [head for head in heads if head.fine_tuned]
    others = [head for head in heads if not head.fine_tuned and head.head.name != EMBEDDING]
    chosen = tuned if tuned and not others and not says_pooling else heads
    return tuple(head.head for head in chosen)


def _read_options(heads: tuple[ExportHead, ...], settings: Mapping[str, Any]) -> dict[str, Frozen]:
    """Return what ``config.json`` says of each head that needs more than the sizes."""
    return {
        head.head.name: head.read_options(settings)
        for head in heads
        if head.read_options is not None
    }


Found = dict[str, tuple[str, Tensor]]
"""Our tensor name -> the checkpoint's name, and the tensor."""


def _fill(
    tensors: Mapping[str, Tensor],
    family: Family,
    config: EncoderConfig,
    settings: Mapping[str, Any],
) -> tuple[Model, list[str]]:
    """Build the model with the heads whose tensors are there, and fill it."""
    found, unknown = _rename(tensors, family)
    heads, notes = _find_heads(found, family, settings)
    options = _read_options(tuple(EXPORT_HEADS[name] for name in heads), settings)
    with torch.device("meta"):
        model = Model(config, heads, options)
    wanted = dict(model.named_parameters())  # tied weights appear once, under the encoder's name
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ExportError(_describe_missing(missing, unknown, family))
    state = {
        name: _checked(name, *found[name], parameter.shape) for name, parameter in wanted.items()
    }
    _check_whole_encoder(found, unknown, wanted, family, config)
    model.load_state_dict(state, strict=False, assign=True)
    if model.masked_lm is not None:
        _check_tied(found)
        model.masked_lm.decoder.weight = model.encoder.embeddings.word.weight
    if ignored := sorted({name.split(".")[0] for name in unknown}):
        notes.append(f"ignored tensors of no known head: {', '.join(ignored)}")
    return model, notes


def _rename(tensors: Mapping[str, Tensor], family: Family) -> tuple[Found, list[str]]:
    """Return the tensors by our names, and the checkpoint's names that are none of ours."""
    found: Found = {}
    unknown: list[str] = []
    head_names = tensor_names(family)
    for theirs, tensor in tensors.items():
        names = family.rename(theirs, head_names)
        if not names and not theirs.endswith("position_ids"):
            unknown.append(theirs)
        for ours in names:
            if ours in found and not torch.equal(found[ours][1], tensor):
                raise ExportError(f"{theirs} and {found[ours][0]} should be one tensor, but differ")
            found.setdefault(ours, (theirs, tensor))
    return found, unknown


def _find_heads(
    found: Found, family: Family, settings: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the heads that the checkpoint has, and notes on heads that it has not."""
    heads, notes = [], []
    architectures = settings.get("architectures") or []
    for name, head in EXPORT_HEADS.items():
        if head.module is None:
            continue
        if head.architecture is not None and not any(
            isinstance(a, str) and a.endswith(head.architecture) for a in architectures
        ):
            continue
        has_head, note = _look_for_head(head, found, family)
        if has_head:
            heads.append(name)
        if note:
            notes.append(note)
    return heads, notes


def _check_whole_encoder(
    found: Found,
    unknown: list[str],
    wanted: Mapping[str, Tensor],
    family: Family,
    config: EncoderConfig,
) -> None:
    """Refuse tensors of the encoder that the model does not have."""
    for name in unknown:
        if name.removeprefix(family.prefix).startswith(_ENCODER_PREFIXES):
            raise ExportError(
                f"{name} is part of the encoder, but no {family.name} has it: "
                "it would be left out silently"
            )
    for ours, (theirs, _) in found.items():
        if re.match(r"encoder\.layers\.\d+\.", ours) and ours not in wanted:
            raise ExportError(
                f"the checkpoint has {theirs}, but config.json names only {config.layers} layers"
            )


def _look_for_head(head: ExportHead, found: Found, family: Family) -> tuple[bool, str | None]:
    """Return whether the checkpoint has a head, and what to say if it has the head in part."""
    name, task = head.head.name, head.head.task
    names = tensor_names(family).get(name, {})
    tensors = _expand(names.values()) - _TIED
    present = sorted(tensor for tensor in tensors if f"{name}.{tensor}" in found)
    if names and len(present) == len(tensors):
        return True, None
    if not present:
        return False, f"{task} is not offered: the checkpoint has no tensors for it"
    for first, reason in head.incomplete.items():
        if all(tensor.startswith(first) for tensor in present):
            return False, f"{task} is not offered: {reason}"
    absent = [tensor for tensor in _in_order(names.values()) if tensor in tensors - set(present)]
    raise ExportError(
        f"the {family.name} checkpoint's {task} head lacks {', '.join(absent)}: "
        "a tensor is missing or renamed"
    )


_TIED = {"decoder.weight"}
"""A tensor that a checkpoint may leave out, since it is the encoder's."""


def _in_order(names: Iterable[str]) -> list[str]:
    """Return tensor names with ``{p}`` replaced by ``weight`` and ``bias``."""
    parts = (
        [name.replace("{p}", part) for part in ("weight", "bias")] if "{p}" in name else [name]
        for name in names
    )
    return list(dict.fromkeys(name for expanded in parts for name in expanded))


def _expand(names: Iterable[str]) -> set[str]:
    return set(_in_order(names))


def _describe_missing(missing: list[str], unknown: list[str], family: Family) -> str:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if len(unknown) > 3:
        seen = f"; it has {', '.join(sorted(unknown)[:3])} and {len(unknown) - 3} more that no {family.name} has"
    else:
        seen = (
            f"; it has {', '.join(sorted(unknown))}, which no {family.name} has" if unknown else ""
        )
    return f"the checkpoint lacks {missing[0]}{more}: a tensor is missing or renamed{seen}"


def _checked(ours: str, theirs: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        raise ExportError(
            f"{theirs} has shape {list(tensor.shape)}, but config.json's sizes ask for {list(shape)}"
        )
    if not tensor.is_floating_point():
        raise ExportError(f"{theirs} holds {tensor.dtype}, not floating-point weights")
    tensor = tensor.float().contiguous()
    if not torch.isfinite(tensor).all():
        raise ExportError(f"{theirs} (our {ours}) holds NaN or infinity")
    return tensor


def _check_tied(found: Mapping[str, tuple[str, Tensor]]) -> None:
    decoder = found.get("masked_lm.decoder.weight")
    if decoder is not None and not torch.equal(
        decoder[1], found["encoder.embeddings.word.weight"][1]
    ):
        raise ExportError(
            f"{decoder[0]} differs from the word embeddings; only tied decoders are supported"
        )


def _license(card: str | None) -> str | None:
    """``license:`` of the model card's front matter."""
    front = re.match(r"---\n(.*?)\n---", card or "", re.DOTALL)
    found = (
        re.search(r"^license:[ \t]+([\w.+-]*\w)[ \t]*$", front[1], re.MULTILINE) if front else None
    )
    return found[1] if found else None
