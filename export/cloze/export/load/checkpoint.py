"""Loads a checkpoint: a Hugging Face or sentence-transformers directory, or a hub id."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError
from torch import Tensor

from cloze.export.blocks.config import USUAL_PADDING_ID, EncoderConfig
from cloze.export.blocks.layer import ACTIVATIONS
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES, Family
from cloze.export.families.refused import reason
from cloze.export.families.wrong_settings import WRONG_TYPE, describe_invalid, wrong_setting
from cloze.export.heads import EXPORT_HEADS, ExportHead
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load import adapter_folder, parts
from cloze.export.load import gliner as gliner_files
from cloze.export.load.gliner import GlinerFolder
from cloze.export.load.sentence_transformers import SentenceTransformersFolder
from cloze.export.load.source import (
    CheckpointFiles,
    locate,
    read_settings,
    read_tensors,
    weight_files,
)
from cloze.export.load.tokenizer import CheckpointTokenizer, load_tokenizer, lower_cased
from cloze.export.load.weights import load_model, named_classes
from cloze.export.model import Model, head_module
from cloze.model_store.heads import Head, embedding, entities, lexical, multi_vector
from cloze.model_store.heads.head import Frozen
from cloze.model_store.manifest import Source
from cloze.model_store.peft import CONFIG_FILE, TENSORS_FILE
from cloze.model_store.plain_files import sha256_of

_PADDING_MULTIPLE: Final = 128
"""Many embeddings have spare rows up to a multiple of this. A note says if there are more."""

_MOST_ROWS_PER_TOKEN: Final = 2
"""An embedding with as many rows per token belongs to another vocabulary."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        model: the model in evaluation mode, float32, with the checkpoint's heads.
        default_heads: the heads that are exported unless the user names others.
        folder: the directory, or that of the hub's files on this machine.
        license: the license in the front matter of the model card; None: the card names none.
        card: the model card; None: the checkpoint has no card.
        broken_promise: what ``config.json`` promises and the checkpoint lacks; "" for nothing.
        label_encoder: of a bi-encoder, the encoder that embeds labels for the entity head.
    """

    model: Model
    tokenizer: CheckpointTokenizer
    recipe: EmbeddingRecipe
    heads: tuple[Head, ...]
    default_heads: tuple[Head, ...]
    options: Mapping[str, Frozen]
    folder: Path
    source: Source
    license: str | None
    card: str | None
    notes: tuple[str, ...]
    broken_promise: str = ""
    label_encoder: "Checkpoint | None" = None


def load_checkpoint(
    source: str,
    revision: str | None = None,
    tasks: Collection[str] = (),
    backbone: str | None = None,
) -> Checkpoint:
    """Load a checkpoint.

    Args:
        source, revision: see `locate`.
        tasks: names of tasks. Where ``config.json`` names no class, tensors that several heads
            have are those of the heads of these tasks.
        backbone: where a GLiNER finds what its folder lacks; see `GlinerFolder.read`.

    Raises:
        ExportError: the checkpoint cannot be loaded completely.
    """
    files = locate(source, revision)
    adapter, base = None, files
    if (files.folder / CONFIG_FILE).is_file():
        adapter, base = adapter_folder.read_adapter(files.folder)
    folder = SentenceTransformersFolder.read(base.folder)
    own = folder if adapter is None else SentenceTransformersFolder.read(files.folder)
    gliner = None
    if backbone is not None or (files.folder / gliner_files.CONFIG_FILE).is_file():
        gliner = GlinerFolder.read(files.folder, backbone)
    given, tensors = read_settings(folder.encoder / "config.json"), dict[str, Tensor]()
    if gliner is not None:
        tensors = gliner_files.renamed(read_tensors(weight_files(gliner.path)))
        given = gliner.encoder_settings(tensors)
    label_tensors = gliner_files.take_labels(tensors) if gliner and gliner.is_bi_encoder else None
    given |= folder.of_encoder.of_config
    family, config, settings, defaults = _read_config(folder.encoder, given)
    if gliner is not None:
        config = gliner_files.with_room(config)
    for each in (folder, own):
        each.check_truncation(config.hidden_size)
    weights = weight_files(folder.encoder)
    tokenizer = _with_types_of(config, settings, _load_tokenizer(folder, config, gliner))
    tensors = tensors or read_tensors(weights)
    outside = dict[str, Any]()
    recipe = pooling = own.recipe or folder.recipe
    if adapter is not None and adapter.tensors:  # its heads instead of those of its base
        settings, pooling = adapter_folder.head_settings(adapter, settings), own.recipe
        tensors = adapter_folder.with_heads(tensors, adapter, family, config)
    else:
        settings = folder.with_activation(settings)
        of_heads = parts.HeadFiles(folder, settings, tensors, tokenizer, config)
        readers = _part_readers(folder, settings, gliner)
        outside = {name: read(of_heads) for name, read in readers.items()}
    model, notes = load_model(tensors, family, config, settings, tasks)
    for name, part in outside.items():
        setattr(model, name, part)
        model.options[name] = part.options
    _mask_padding_rows(model, tokenizer)
    if adapter is not None:
        adapter_folder.add_products(model, adapter, encoder_sha256(model))
        weights.append(files.folder / TENSORS_FILE)
    notes += [*defaults, *tokenizer.notes, *_spare_rows(tokenizer, config)]
    heads = _heads_of(model)
    card = _read_card(files.folder) or _read_card(base.folder)
    promises = adapter.tensors if adapter is not None else folder.recipe is None
    checkpoint = Checkpoint(
        model=model.eval(),
        tokenizer=tokenizer,
        recipe=recipe or EmbeddingRecipe(),
        heads=tuple(head.head for head in heads),
        default_heads=_default_heads(heads, declares_pooling=pooling is not None),
        options=model.options,
        folder=files.folder,
        source=_source(files, folder if own.recipe is None else own, weights, model),
        license=_license(card),
        card=card,
        notes=(*FAMILIES.problems, *notes),
        broken_promise=_broken_promise(heads, family, settings) if promises else "",
    )
    if gliner is None or label_tensors is None:
        return checkpoint
    labels = _load_labels(gliner, label_tensors, checkpoint)
    notes = [f"labels: {note}" for note in labels.notes]
    return replace(checkpoint, label_encoder=labels, notes=(*checkpoint.notes, *notes))


def _load_labels(
    gliner: GlinerFolder, tensors: dict[str, Tensor], checkpoint: Checkpoint
) -> Checkpoint:
    """Return the encoder of labels of a bi-encoder, by its tensors."""
    given = gliner.label_settings(tensors)
    family, config, settings, defaults = _read_config(gliner.path, given)
    tokenizer = _with_types_of(config, settings, load_tokenizer(gliner.label_tokenizer))
    _check_vocabulary(tokenizer, config)
    recipe = gliner.read_label_recipe(tensors, config.hidden_size)
    model, notes = load_model(tensors, family, config, settings)
    source = checkpoint.source.model_copy(
        update={
            "settings_sha256": None,
            "encoder_sha256": encoder_sha256(model),
            "parts_sha256": {},
        }
    )
    return replace(
        checkpoint,
        model=model.eval(),
        tokenizer=tokenizer,
        recipe=recipe,
        heads=(embedding.HEAD,),
        default_heads=(embedding.HEAD,),
        options={},
        source=source,
        notes=(*notes, *defaults, *tokenizer.notes),
    )


def _part_readers(
    folder: SentenceTransformersFolder,
    settings: Mapping[str, Any],
    gliner: GlinerFolder | None,
) -> dict[str, Callable[[parts.HeadFiles], Any]]:
    """Return readers of the heads whose weights lie outside the family's tensors, by name."""
    readers: dict[str, Callable[[parts.HeadFiles], Any]] = {}
    is_stanford = parts.STANFORD_CLASS in named_classes(settings)
    if folder.projections_of_tokens:
        readers[multi_vector.HEAD.name] = parts.read_pylate
    elif is_stanford or (folder.path / parts.STANFORD_FILE).is_file():
        readers[multi_vector.HEAD.name] = parts.read_stanford
    elif (folder.path / parts.BGE_FILE).is_file():
        readers[multi_vector.HEAD.name] = parts.read_bge
    if (folder.path / parts.LEXICAL_FILE).is_file():
        readers[lexical.HEAD.name] = parts.read_lexical
    if gliner is not None:
        readers[entities.HEAD.name] = gliner.read_head
    return readers


def _load_tokenizer(
    folder: SentenceTransformersFolder, config: EncoderConfig, gliner: GlinerFolder | None
) -> CheckpointTokenizer:
    """Load the tokenizer of a checkpoint with the length and the case of its tuning."""
    own = folder.of_encoder
    if gliner is None:
        tokenizer = load_tokenizer(folder.encoder, own.of_tokenizer)
    else:
        tokenizer = gliner.with_markers(load_tokenizer(gliner.tokenizer))
    _check_vocabulary(tokenizer, config)
    tokenizer = replace(tokenizer, notes=(*tokenizer.notes, *own.notes))
    if folder.projections_of_tokens:  # late interaction has lengths of its own
        return tokenizer
    if folder.recipe is None:
        tokenizer = replace(tokenizer, max_tokens=own.max_tokens or tokenizer.max_tokens)
    return lower_cased(tokenizer) if own.lowercase else tokenizer


def _heads_of(model: Model) -> tuple[ExportHead, ...]:
    """Return the heads that a model has, with those that have no module of their own."""
    recipe = EmbeddingRecipe()
    return tuple(
        head for name, head in EXPORT_HEADS.items() if head_module(model, recipe, name) is not None
    )


def _broken_promise(
    heads: Collection[ExportHead], family: Family, settings: Mapping[str, Any]
) -> str:
    """Return the class of ``config.json`` and the head that it promises but the checkpoint lacks.

    A sentence-transformer's class promises nothing: its users want its embeddings.
    """
    for architecture in named_classes(settings):
        for head in EXPORT_HEADS.values():
            promised = head.head.name in family.heads and architecture.endswith(head.classes)
            if promised and head not in heads:
                return (
                    f"config.json names {architecture}, but the checkpoint has no {head.head.task}"
                )
    return ""


def _read_config(
    folder: Path, settings: dict[str, Any]
) -> tuple[Family, EncoderConfig, dict[str, Any], list[str]]:
    """Return the family, the sizes and the settings of an encoder, and notes on its defaults."""
    if not settings:
        raise ExportError(f"{folder} holds no config.json")
    kind = settings.get("model_type")
    family = FAMILIES.by_model_type.get(kind) if isinstance(kind, str) else None
    if family is None:
        why = reason(str(kind)) or f"config.json's model_type is none of {', '.join(FAMILIES)}"
        problems = [problem for problem in FAMILIES.problems if str(kind) in problem]
        raise ExportError("; ".join([f"architecture {kind!r} is not supported: {why}", *problems]))
    if settings.get("quantization_config"):
        raise ExportError(
            "the checkpoint is quantised (config.json's quantization_config); "
            "export the original weights"
        )
    named_classes(settings)
    config, absent = _parse_config(family, settings)
    of_convolution = config.convolution.activation if config.convolution else None
    for activation in (config.activation, config.head_activation, of_convolution):
        if activation is not None and activation not in ACTIVATIONS:
            name = next((name for name in settings if settings[name] == activation), "activation")
            raise ExportError(
                f"config.json: {name} {activation!r} is not supported ({', '.join(ACTIVATIONS)})"
            )
    notes = [
        f"config.json does not give {name}: {value} is taken, the default of transformers"
        for name, value in absent.items()
    ]
    return family, config, settings, notes


def _parse_config(
    family: Family, settings: Mapping[str, Any]
) -> tuple[EncoderConfig, dict[str, Any]]:
    """Return the sizes of an encoder, and the settings of which the defaults were taken."""
    try:
        return family.read_config(settings), {}
    except KeyError as error:
        missing = str(error.args[0])
        if missing in family.defaults and missing not in settings:
            default = {missing: family.defaults[missing]}
            config, absent = _parse_config(family, {**settings, **default})
            return config, default | absent
        why = ""
        if missing in family.wrong_defaults:
            why = f", whose default in transformers is wrong for published weights of {family.name}"
        raise ExportError(f"config.json does not give {error}{why}") from error
    except ValidationError as error:
        raise ExportError(f"config.json: {describe_invalid(error, family, settings)}") from error
    except ValueError as error:
        raise ExportError(f"config.json: {error}") from error
    except WRONG_TYPE as error:
        name = wrong_setting(family, settings)
        problem = f"{name} cannot be {settings[name]!r:.80}" if name else str(error)
        raise ExportError(f"config.json: {problem}") from error


def _check_vocabulary(tokenizer: CheckpointTokenizer, config: EncoderConfig) -> None:
    rows, size = config.vocab_size, tokenizer.size
    if size > rows or rows >= size * _MOST_ROWS_PER_TOKEN:
        raise ExportError(
            f"the tokenizer has {size} tokens, but the embedding has {rows} rows (config.json's "
            "vocab_size): they do not belong together"
        )
    padding = tokenizer.special_tokens.get("pad_token")
    named = None if padding is None else tokenizer.tokenizer.token_to_id(padding)
    if config.padding_id not in (USUAL_PADDING_ID, named):
        raise ExportError(
            f"config.json's pad_token_id is {config.padding_id}, but the tokenizer's padding token "
            f"has the id {named}: other tokens would have no position"
        )


def _spare_rows(tokenizer: CheckpointTokenizer, config: EncoderConfig) -> list[str]:
    """Return a note on rows of the embeddings that no token has, if there are many."""
    if (spare := config.vocab_size - tokenizer.size) < _PADDING_MULTIPLE:
        return []
    return [
        f"{spare} of the {config.vocab_size} rows of the embeddings belong to no token of the "
        "tokenizer, and are never read"
    ]


def _with_types_of(
    config: EncoderConfig, settings: Mapping[str, Any], tokenizer: CheckpointTokenizer
) -> CheckpointTokenizer:
    """Return the tokenizer with a type of second texts that the encoder has."""
    given, notes = tokenizer.special.second_type, tokenizer.notes
    second_type = min(given, max(0, config.type_vocab_size - 1))
    if second_type != given and settings.get("type_vocab_size", 0) > 1:
        notes += (
            f"the tokenizer gives the second text of a pair type {given}, but a {config.family} "
            "takes type 0 for all tokens",
        )
    special = replace(tokenizer.special, second_type=second_type)
    return replace(tokenizer, special=special, notes=notes)


def _mask_padding_rows(model: Model, tokenizer: CheckpointTokenizer) -> None:
    """Give the rows beyond the vocabulary the lowest logits, so they are never predicted."""
    if model.masked_lm is None:
        return
    if tokenizer.mask_id is None:
        raise ExportError(
            "the checkpoint has a masked-language-model head, but its tokenizer has no mask token"
        )
    decoder = model.masked_lm.decoder
    if decoder.bias is None:  # some families have none
        decoder.bias = torch.nn.Parameter(torch.zeros(decoder.out_features))
    decoder.bias.data[tokenizer.size :] = torch.finfo(torch.float32).min / 2


def _default_heads(heads: tuple[ExportHead, ...], *, declares_pooling: bool) -> tuple[Head, ...]:
    """Return the heads to export unless the user names others.

    An encoder that was fine-tuned for answers or labels gives poor embeddings. The heads without
    weights, which embed texts and tokens, are then default heads only if the checkpoint declares
    its pooling.
    """
    tuned = [head for head in heads if head.fine_tuned]
    others = [head for head in heads if not head.fine_tuned and head.module is not None]
    chosen = tuned if tuned and not others and not declares_pooling else heads
    return tuple(head.head for head in chosen if head.by_default)


def _source(
    files: CheckpointFiles, folder: SentenceTransformersFolder, weights: list[Path], model: Model
) -> Source:
    # A set is written in order, since its own order differs between processes.
    settings = [_settings(model.config), folder.describe_steps()]
    written = json.dumps(settings, sort_keys=True, default=_plain)
    outside = {n: getattr(model, n, None) for n, head in EXPORT_HEADS.items() if not head.of_family}
    return Source(
        kind=files.kind,
        location=files.location,
        revision=files.revision,
        weights_sha256=sha256_of(*weights),
        settings_sha256=hashlib.sha256(written.encode()).hexdigest(),
        encoder_sha256=encoder_sha256(model),
        parts_sha256={name: _tensors_sha256(part) for name, part in outside.items() if part},
    )


def _tensors_sha256(part: torch.nn.Module) -> str:
    """Return the digest of a head's tensors: their shapes and their values in fp32, in order."""
    digest = hashlib.sha256()
    for tensor in part.state_dict().values():
        digest.update(str(list(tensor.shape)).encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def _settings(config: EncoderConfig) -> dict[str, Any]:
    """Return the settings that move the states of an encoder, by name.

    A setting with its default value is left out, so that a release with a new setting returns the
    digests of earlier releases.
    """
    return {
        setting.name: value
        for setting in fields(config)
        if (value := getattr(config, setting.name)) != setting.default
    }


_OF_HEADS = {"pooler", "head_activation", "classifier_pooling", "legacy_lm_head"}
"""Settings of an encoder's config that only heads read."""


def encoder_sha256(model: Model) -> str:
    """Return the digest of an encoder's settings and weights, whatever its heads.

    The weights are float32, so the digest of a checkpoint in fp16 is that of its copy in fp32.
    """
    settings = {n: value for n, value in _settings(model.config).items() if n not in _OF_HEADS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=_plain).encode())
    for name, weight in sorted(model.encoder.named_parameters()):
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Return a setting that JSON has no type for as one that it has."""
    return sorted(value) if isinstance(value, Set) else asdict(value)


def _read_card(folder: Path) -> str | None:
    """Return the model card; None if the folder has none."""
    file = folder / "README.md"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None


def _license(card: str | None) -> str | None:
    """Return the value of ``license:`` in the front matter of a model card."""
    front = re.match(r"---\n(.*?)\n---", card or "", re.DOTALL)
    if front is None:
        return None
    field = re.search(r"^license:[ \t]+([\w.+-]*\w)[ \t]*$", front[1], re.MULTILINE)
    return field[1] if field else None
