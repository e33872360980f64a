"""Writes the head of a checkpoint alone, for an encoder that a bundle of a store has too."""

from dataclasses import dataclass
from pathlib import Path

from cloze.export.errors import ExportError, Report
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.sentence_transformers import encoder_folder
from cloze.export.load.source import weight_files
from cloze.export.train.card import CARD
from cloze.export.train.save import TASK_TYPES, save_adapter
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
    save_adapter(checkpoint.model, checkpoint, folder, heads=[head])
    if checkpoint.card is not None:
        (folder / CARD).write_text(checkpoint.card, encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    weights = weight_files(encoder_folder(checkpoint.folder))
    saved = sum(file.stat().st_size for file in weights) - size
    by_name = {one.name: one.task for one in checkpoint.heads}
    return Shared(bundle, by_name[head], folder, size, saved)


def _choose_head(checkpoint: Checkpoint, task: str | None) -> str:
    tasks = {head.task: head.name for head in checkpoint.heads if head.name in TASK_TYPES}
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
