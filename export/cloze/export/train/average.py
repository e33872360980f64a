"""Averages the weights of folders that were fine-tuned from one model.

Source: Wortsman et al. 2022, "Model soups". The average of runs with different settings is often
better than each of them, and costs as much as one of them to serve.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from cloze.export.errors import TrainError
from cloze.export.train.card import common_license, front_matter
from cloze.export.train.folder import CARD, Folder, one_line_errors, open_folder

_COPIED: Final = (".json", ".txt", ".model", ".metadata")
_WEIGHTS: Final = (".safetensors", ".pt")


@dataclass(frozen=True, slots=True)
class _Weights:
    """All tensors of a folder: of the encoder, of its heads, and of modules after the pooling.

    Attributes:
        files: path of a file within the folder -> its tensors by name.
        prefix: first part of the names of the encoder's tensors, which a folder of the encoder
            alone leaves out.
    """

    files: dict[Path, dict[str, Tensor]]
    prefix: str

    def key(self, file: Path, name: str) -> tuple[Path, str]:
        """Return where a tensor belongs: its file, or its folder with shards, and its name."""
        place = file.parent if file.suffix == ".safetensors" else file
        return place, name.removeprefix(self.prefix)

    def by_key(self) -> dict[tuple[Path, str], Tensor]:
        """Return all tensors by their `key`."""
        return {
            self.key(file, name): tensor
            for file, tensors in self.files.items()
            for name, tensor in tensors.items()
        }


def average(sources: Sequence[str], folder: Path, license_name: str | None = None) -> Path:
    """Write the mean of the weights of two or more folders as a new folder.

    The new folder has all files of the first one. Each weight is the mean over the folders that
    have it, so the mean of a fine-tuned model and the one that it started from (Wortsman et al.
    2022, "Robust fine-tuning of zero-shot models") keeps the heads that only the first one has.

    Args:
        license_name: its licence; None: the one that all folders name, if they do.

    Returns:
        The folder.

    Raises:
        TrainError: there is only one folder; or one cannot be loaded, or has a weight that the
            first one lacks; or they differ in their sizes, labels or tokens.
    """
    if len(sources) < 2:
        raise TrainError("an average needs at least two checkpoints")
    folders = [open_folder(source) for source in sources]
    first, *others = folders
    weights = _read(first)
    sums = {key: tensor.double() for key, tensor in weights.by_key().items()}
    counts = dict.fromkeys(sums, 1)
    for other in others:
        _check_alike(first, other)
        for key, tensor in _read(other).by_key().items():
            if key not in sums or tensor.shape != sums[key].shape:
                raise TrainError(
                    f"{other.location} has other sizes or other heads than {first.location}: "
                    f"{key[1]}"
                )
            sums[key] += tensor
            counts[key] += 1
    names = "\n".join(f"- {source}" for source in sources)
    matter = front_matter(license_name or common_license(folders))
    _copy(first.card, folder)
    card = f"{matter}# The average of {len(sources)} checkpoints\n\n{names}\n"
    (folder / CARD).write_text(card, encoding="utf-8")
    for file, tensors in weights.files.items():
        keys = {name: weights.key(file, name) for name in tensors}
        means = {
            name: (sums[key] / counts[key]).to(tensors[name].dtype) for name, key in keys.items()
        }
        if file.suffix == ".pt":
            torch.save(means, folder / file)
        else:
            save_file(means, folder / file, metadata={"format": "pt"})
    return folder


def _read(source: Folder) -> _Weights:
    """Read the tensors of a folder, without running pickled code."""
    assert source.weights
    with torch.device("meta"):
        model: Any = AutoModel.from_config(source.config)  # type: ignore[no-untyped-call]
    files: dict[Path, dict[str, Tensor]] = {}
    for file in sorted(source.card.rglob("*")):
        if file.suffix not in _WEIGHTS:
            continue
        with one_line_errors(file):
            loaded = (
                torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
            )
            files[file.relative_to(source.card)] = dict(loaded)
    return _Weights(files, f"{model.base_model_prefix}.")


def _check_alike(first: Folder, other: Folder) -> None:
    one, two = first.config, other.config
    if one.architectures == two.architectures and one.id2label != two.id2label:
        raise TrainError(f"{other.location} has other labels than {first.location}")
    if first.text.get_vocab() != other.text.get_vocab():
        raise TrainError(f"{other.location} has another vocabulary than {first.location}")


def _copy(source: Path, folder: Path) -> None:
    """Copy the settings and the tokenizer."""
    for file in source.rglob("*"):
        if file.suffix in _COPIED:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
