"""Fills a torch `Model` from the tensors of a checkpoint.

Each of our tensors is filled from the tensors of the checkpoint that the family's rules name, with
the shape of its config and with finite values. Otherwise nothing is loaded.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.families import Family, HeadSpec
from cloze.export.families.family import Fold, Target
from cloze.export.heads import EXPORT_HEADS, ExportHead
from cloze.export.model import Model
from cloze.model_store.error_lines import first_line, first_problem
from cloze.model_store.heads.head import Frozen
from cloze.model_store.heads.label_sets import HEAD_SECTIONS

_ENCODER_PREFIXES = ("embeddings.", "encoder.", "layers.", "transformer.")
"""The first parts of the names of an encoder's tensors, after the family's prefix."""

_COMPUTED = ("position_ids", "inv_freq")
"""The ends of the names of tensors that are computed, and that older files hold."""

_LISTED_NAMES = 3
"""The most unknown tensor names that an error lists."""

_LABELLED = ("classifier.weight", "classifier.bias")
"""The ends of the names of tensors with a row per label."""

_WHY_MISSING = "a tensor is missing or renamed, or config.json asks for one too many"

RenamedTensors = dict[str, tuple[str, Tensor]]
"""Our tensor name -> the name in the checkpoint, and the tensor."""


NO_TENSORS = "the checkpoint has no tensors for it"
"""Why a checkpoint of another kind lacks a head."""


def load_model(
    tensors: Mapping[str, Tensor],
    family: Family,
    config: EncoderConfig,
    settings: Mapping[str, Any],
    tasks: Collection[str] = (),
) -> tuple[Model, list[str]]:
    """Return the model with the heads whose tensors the checkpoint has, and notes for the user.

    Raises:
        ExportError: a tensor is missing, superfluous or invalid.
    """
    renamed, unknown = _rename(tensors, family, config)
    possible = _possible_heads(family, settings, tasks)
    begun = {name.partition(".")[0] for name in renamed}
    candidates = [head for head in possible if head.head.name in begun]
    options = read_head_options(candidates, settings)
    with torch.device("meta"):
        model = Model(config, [head.head.name for head in candidates], options)
    notes = []
    for head in possible:
        reason = _why_absent(head, model, renamed, unknown, family)
        if reason is None and head.head.name == "masked_lm":
            reason = _why_untied(renamed, tensors, settings)
        if reason is not None:
            notes.append(f"{head.head.task} is not offered: {reason}")
            setattr(model, head.head.name, None)
            model.options.pop(head.head.name, None)
    heads = [h.head.name for h in candidates if getattr(model, h.head.name) is not None]
    parameters = dict(model.named_parameters())  # a tied weight appears once, as the encoder's
    for name in heads:
        for ours in family.heads[name].zeros:
            zeros = torch.zeros(parameters[f"{name}.{ours}"].shape)
            renamed.setdefault(f"{name}.{ours}", (ours, zeros))
    missing = [name for name in parameters if name not in renamed]
    if missing:
        raise ExportError(_describe_missing(missing, unknown, family))
    state = {
        name: _checked(name, *renamed[name], parameter.shape)
        for name, parameter in parameters.items()
    }
    _check_whole_encoder(renamed, unknown, model, family)
    model.load_state_dict(state, strict=False, assign=True)
    if model.masked_lm is not None:
        _check_tied(renamed)
        model.masked_lm.decoder.weight = model.encoder.embeddings.word.weight
    if unknown:
        prefixes = sorted({name.partition(".")[0] for name in unknown})
        notes.append(f"ignored tensors of no known head: {', '.join(prefixes)}")
    return model, [*notes, *_undeclared(renamed, heads, family, settings)]


def read_head_options(
    heads: Iterable[ExportHead], settings: Mapping[str, Any]
) -> dict[str, Frozen]:
    """Return the options of heads from a ``config.json``, by head name.

    Raises:
        ExportError: a head's settings are malformed.
    """
    options: dict[str, Frozen] = {}
    for head in heads:
        if head.read_options is None:
            continue
        name, kind = head.head.name, head.head.options
        section = head_sections(settings).get(name)
        try:
            if section is None or kind is None:
                options[name] = head.read_options(settings)
            else:
                options[name] = kind.model_validate(section)
        except ValueError as error:
            problem = first_line(error)
            if section is not None and isinstance(error, ValidationError):
                problem = f"{HEAD_SECTIONS}.{name}: {first_problem(error)}"
            raise ExportError(f"config.json: {problem}") from None
    return options


def named_classes(settings: Mapping[str, Any]) -> list[str]:
    """Return the classes that a ``config.json`` names; raise if they are no list of names."""
    names = settings.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ExportError(
            f"config.json: architectures must be a list of names of classes, got {names!r:.80}"
        )
    return names


def head_sections(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of heads under `HEAD_SECTIONS`; raise if they are no object."""
    sections = settings.get(HEAD_SECTIONS, {})
    if not isinstance(sections, dict):
        raise ExportError(f"config.json: {HEAD_SECTIONS} must be an object, got {sections!r:.80}")
    return sections


def _rename(
    tensors: Mapping[str, Tensor], family: Family, config: EncoderConfig
) -> tuple[RenamedTensors, list[str]]:
    """Return the tensors by our names, and the names of tensors that our modules lack."""
    renamed: RenamedTensors = {}
    added: dict[str, Tensor] = {}
    unknown: list[str] = []
    for theirs, tensor in tensors.items():
        targets = family.read(theirs, config)
        if not targets and not theirs.endswith(_COMPUTED):
            unknown.append(theirs)
        for target in targets:
            if target.name in tensors and target.name != theirs:
                continue  # the head has a tensor of its own, see `Family.read`
            value, ours = _converted(target, theirs, tensor), target.name
            if target.is_added:
                added[ours] = value
            elif ours in renamed and not torch.equal(renamed[ours][1], value):
                raise ExportError(
                    f"{theirs} and {renamed[ours][0]} should be one tensor, but differ"
                )
            else:
                renamed.setdefault(ours, (theirs, value))
    for rule in family.rules(config):
        if isinstance(rule, Fold) and rule.ours in renamed and rule.ours not in added:
            raise ExportError(f"the checkpoint lacks {rule.theirs}: it is missing or renamed")
    for ours, value in added.items():
        if ours in renamed:
            theirs, tensor = renamed[ours]
            if value.shape[1:] != tensor.shape[1:]:
                raise ExportError(
                    f"{theirs} has rows of {list(tensor.shape[1:])} numbers, but the row that is "
                    f"added to them has {list(value.shape[1:])}"
                )
            renamed[ours] = (theirs, tensor.float() + value.float())
    return renamed, unknown


def _converted(target: Target, theirs: str, tensor: Tensor) -> Tensor:
    """Return a checkpoint's tensor as one of ours; raise if its shape is not that of the rule."""
    try:
        return target.convert(tensor)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        shape = list(tensor.shape)
        raise ExportError(f"{theirs} has shape {shape}: {first_line(error)}") from error


def _possible_heads(
    family: Family, settings: Mapping[str, Any], tasks: Collection[str]
) -> list[ExportHead]:
    """Return the heads with modules that the classes of a ``config.json`` allow.

    Without a class, the tasks say which heads are meant.
    """
    architectures = named_classes(settings)
    sections = head_sections(settings)
    return [
        head
        for head in EXPORT_HEADS.values()
        if head.module is not None
        and head.of_family
        and (
            not _needs_class(head, family)
            or head.head.name in sections
            or any(a.endswith(head.classes) for a in architectures)
            or (not architectures and head.head.task in tasks)
        )
    ]


def _needs_class(head: ExportHead, family: Family) -> bool:
    """Return whether only a class says that a checkpoint of a family has a head."""
    return head.needs_class or family.heads.get(head.head.name, HeadSpec({})).needs_class


def _why_absent(
    head: ExportHead, model: Model, renamed: RenamedTensors, unknown: list[str], family: Family
) -> str | None:
    """Return why a checkpoint lacks a head; None: it has the head.

    The model has the head if the checkpoint has any of its tensors.
    """
    name = head.head.name
    spec = family.heads.get(name, HeadSpec({}))
    firsts = f"{name}."
    names = [
        one.removeprefix(firsts) for one, _ in model.named_parameters() if one.startswith(firsts)
    ]
    required = [one for one in names if one not in spec.optional | spec.zeros]
    present = [one for one in required if f"{name}.{one}" in renamed]
    if not present:
        for first, why in spec.without.items():
            if any(one.startswith(first) for one in unknown):
                return why
        return NO_TENSORS
    if present == required:
        return None
    for first, reason in head.incomplete.items():
        if all(tensor.startswith(first) for tensor in present):
            return reason
    absent = [tensor for tensor in required if tensor not in present]
    raise ExportError(
        f"the {family.name} checkpoint's {head.head.task} head lacks {', '.join(absent)}: "
        f"{_WHY_MISSING}"
    )


def _undeclared(
    renamed: RenamedTensors, heads: list[str], family: Family, settings: Mapping[str, Any]
) -> list[str]:
    """Return notes on the heads that tensors may belong to, but whose class is not named."""
    undeclared = {
        head.head.name: head
        for head in EXPORT_HEADS.values()
        if head.head.name not in heads and _needs_class(head, family)
    }
    heads_by_tensor: dict[str, set[str]] = {}
    for ours, (theirs, _) in renamed.items():
        heads_by_tensor.setdefault(theirs, set()).add(ours.split(".")[0])
    named = ", ".join(named_classes(settings))
    notes = []
    for name, head in undeclared.items():
        tensors = [t for t, owners in heads_by_tensor.items() if name in owners <= {*undeclared}]
        if tensors:
            task, needed = head.head.task, f"{family.class_prefix}{head.classes[0]}"
            remedy = "" if named else f"; --task {task} takes them all the same"
            notes.append(
                f"{task} is not offered: the checkpoint has {min(tensors)}, but config.json's "
                f"architectures names {named or 'no class'}, not {needed}{remedy}"
            )
    return notes


def _check_whole_encoder(
    renamed: RenamedTensors, unknown: list[str], model: Model, family: Family
) -> None:
    """Raise if the checkpoint's encoder has tensors that the model lacks."""
    for name in unknown:
        if family.without_prefix(name).startswith(_ENCODER_PREFIXES):
            raise ExportError(
                f"{name} is part of the encoder, but no {family.name} has it: "
                "it would be left out silently"
            )
    parameters = dict(model.named_parameters())
    for ours, (theirs, _) in renamed.items():
        if re.match(r"encoder\.layers\.\d+\.", ours) and ours not in parameters:
            raise ExportError(
                f"the checkpoint has {theirs}, but config.json names only "
                f"{model.config.layers} layers"
            )
        if ours.endswith("token_type.weight") and ours not in parameters:
            raise ExportError(
                f"the checkpoint has {theirs}, but config.json's type_vocab_size is "
                f"{model.config.type_vocab_size}"
            )


def _why_untied(
    renamed: RenamedTensors, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> str | None:
    """Return why there is no decoder if one of its own lacks a tensor; None: there is one.

    transformers would fill the tensor anew. The bias of the head, under another name, is then no
    bias of the decoder.
    """
    decoder = renamed.get("masked_lm.decoder.weight")
    own_bias = None if decoder is None else decoder[0].removesuffix("weight") + "bias"
    lacks_bias = "masked_lm.decoder.bias" in renamed and own_bias not in tensors
    if settings.get("tie_word_embeddings", True) or (decoder is not None and not lacks_bias):
        return None
    return (
        "config.json says that the decoder is not tied to the words (tie_word_embeddings), and the "
        "checkpoint has no decoder, or none with its bias"
    )


def _check_tied(renamed: RenamedTensors) -> None:
    decoder = renamed.get("masked_lm.decoder.weight")
    words = renamed["encoder.embeddings.word.weight"][1]
    if decoder is not None and not torch.equal(decoder[1], words):
        raise ExportError(
            f"{decoder[0]} differs from the word embeddings; only tied decoders are supported"
        )


def _checked(ours: str, theirs: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a checkpoint's tensor as contiguous float32; raise if it is not valid."""
    if tensor.shape != shape:
        sizes = "sizes and labels" if ours.endswith(_LABELLED) else "sizes"
        raise ExportError(
            f"{theirs} has shape {list(tensor.shape)}, "
            f"but config.json's {sizes} ask for {list(shape)}"
        )
    if not tensor.is_floating_point():
        raise ExportError(f"{theirs} holds {tensor.dtype}, not floating-point weights")
    tensor = tensor.float().contiguous()
    if not torch.isfinite(tensor).all():
        raise ExportError(f"{theirs} (our {ours}) holds NaN or infinity")
    return tensor


def _describe_missing(missing: list[str], unknown: list[str], family: Family) -> str:
    """Return the error for missing tensors, with the unknown tensors, which may be renamed ones."""
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    message = f"the checkpoint lacks {missing[0]}{others}: {_WHY_MISSING}"
    names = ", ".join(sorted(unknown)[:_LISTED_NAMES])
    if len(unknown) > _LISTED_NAMES:
        more = len(unknown) - _LISTED_NAMES
        return f"{message}; it has {names} and {more} more that no {family.name} has"
    return f"{message}; it has {names}, which no {family.name} has" if unknown else message
