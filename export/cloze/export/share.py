"""Writes the head of a checkpoint alone, for an encoder that a bundle of a store has too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors.torch import save
from torch import Tensor

from cloze.export.errors import ExportError, Report
from cloze.export.families import FAMILIES
from cloze.export.heads import EXPORT_HEADS
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.sentence_transformers import SentenceTransformersFolder
from cloze.export.load.source import read_settings, read_tensors, weight_files
from cloze.model_store.heads.label_sets import HEAD_SECTIONS
from cloze.model_store.peft import (
    CONFIG_FILE,
    ENCODER_DIGEST,
    LABELS_FILE,
    NAME_PREFIX,
    TENSORS_FILE,
)
from cloze.model_store.store import Store

ANY_BUNDLE = "auto"
"""The name that stands for whichever bundle of a store has the encoder."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A written head.

    Attributes:
        bundle: the bundle that has its encoder.
        task: what the head answers.
        size: bytes of the folder.
        saved: bytes of the checkpoint's weights that were not written.
    """

    bundle: str
    task: str
    folder: Path
    size: int
    saved: int


def share(
    source: str, base: str, store: Store, folder: Path, *, task: str | None, report: Report
) -> Shared:
    """Write the head of a checkpoint as an adapter without low-rank matrices.

    Args:
        base: the bundle that should have the encoder, or `ANY_BUNDLE`.
        task: the task of the head; None: the checkpoint has one head only.

    Raises:
        ExportError: no bundle has the encoder, or no single head is chosen.
        StoreError: the bundle does not exist.
    """
    checkpoint = load_checkpoint(source)
    head = _choose_head(checkpoint, task)
    bundle = _find_bundle(checkpoint, base, store, report)
    _write(checkpoint, head, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    weights = weight_files(SentenceTransformersFolder.read(checkpoint.folder).encoder)
    saved = sum(file.stat().st_size for file in weights) - size
    return Shared(bundle, EXPORT_HEADS[head].head.task, folder, size, saved)


_NO_TARGETS: Final = "dummy-target-modules"
"""PEFT's name of no module, in an adapter that has only heads."""


def _write(checkpoint: Checkpoint, head: str, folder: Path) -> None:
    """Write the head's tensors as the checkpoint has them, with its labels and its card."""
    folder.mkdir(parents=True, exist_ok=True)
    source = SentenceTransformersFolder.read(checkpoint.folder).encoder
    prefix = FAMILIES[checkpoint.model.config.family].prefix
    tensors = _head_tensors(checkpoint, head, read_tensors(weight_files(source)))
    is_hub = checkpoint.source.kind == "hub"
    adapter = {
        "peft_type": "LORA",
        "task_type": EXPORT_HEADS[head].task_type,
        "base_model_name_or_path": checkpoint.source.location
        if is_hub
        else str(checkpoint.folder.resolve()),
        "revision": checkpoint.source.revision,
        "r": 1,
        "lora_alpha": 1,
        "target_modules": _NO_TARGETS,
        "modules_to_save": sorted(
            {name.removeprefix(prefix).partition(".")[0] for name in tensors}
        ),
        "inference_mode": True,
    }
    settings = read_settings(source / "config.json")
    if head in (sections := settings.get(HEAD_SECTIONS, {})):
        settings[HEAD_SECTIONS] = {head: sections[head]}
    for name, content in ((CONFIG_FILE, adapter), (LABELS_FILE, settings)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    digest = checkpoint.source.encoder_sha256
    metadata = {"format": "pt"} | ({} if digest is None else {ENCODER_DIGEST: digest})
    named = {f"{NAME_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    (folder / TENSORS_FILE).write_bytes(save(named, metadata))
    if checkpoint.card is not None:
        (folder / "README.md").write_text(checkpoint.card, encoding="utf-8")


def _head_tensors(
    checkpoint: Checkpoint, head: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a head by transformers' names.

    A second classifier of a checkpoint has the name of its head before its own.
    """
    config = checkpoint.model.config
    family = FAMILIES[config.family]
    return {
        name.removeprefix(f"{head}."): tensor.float().contiguous()
        for name, tensor in tensors.items()
        if name.startswith(f"{head}.")
        or (
            not any(other.startswith(f"{head}.") for other in tensors)
            and any(target.name.startswith(f"{head}.") for target in family.read(name, config))
        )
    }


def _choose_head(checkpoint: Checkpoint, task: str | None) -> str:
    heads = [head for head in checkpoint.heads if EXPORT_HEADS[head.name].task_type]
    tasks = {head.task: head.name for head in heads}
    if task is not None and task not in tasks:
        offered = ", ".join(tasks) or "none"
        raise ExportError(f"a head for {task} cannot be shared; the checkpoint has: {offered}")
    if task is None and len(tasks) != 1:
        offered = ", ".join(tasks) or "none for labels, tags or answers"
        raise ExportError(f"--share writes one head: choose it with --task (there are: {offered})")
    return tasks[task or next(iter(tasks))]


def _find_bundle(checkpoint: Checkpoint, base: str, store: Store, report: Report) -> str:
    """Return the newest bundle whose encoder is the checkpoint's."""
    digest = checkpoint.source.encoder_sha256
    names = store.references() if base == ANY_BUNDLE else [base]
    manifests = [store.manifest(name) for name in names]
    if same := [one for one in manifests if one.source.encoder_sha256 == digest]:
        bundle = max(same, key=lambda one: one.created).reference
        report(f"{bundle} has the same encoder (sha256 {digest})")
        return bundle
    undescribed = [one.reference for one in manifests if one.source.encoder_sha256 is None]
    others = (
        f"; of {', '.join(undescribed)} the encoder is not known: export them again"
        if undescribed
        else ""
    )
    compared = ", ".join(names) or "an empty store"
    raise ExportError(
        f"no bundle has the encoder of {checkpoint.source.location} (sha256 {digest}), compared "
        f"with {compared}{others}"
    )
