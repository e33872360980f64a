"""Averages the weights of folders that were fine-tuned from one model.

Source: Wortsman et al. 2022, "Model soups". The average of runs with different settings is often
better than each of them, and costs as much as one of them to serve.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from cloze.export.errors import TrainError
from cloze.export.train.card import front_matter
from cloze.export.train.folder import CARD, Folder, one_line_errors, open_folder

_COPIED: Final = (".json", ".txt", ".model", ".metadata")


def average(sources: Sequence[str], folder: Path, license_name: str | None = None) -> Path:
    """Write the mean of the weights of two or more folders as a new folder, and return its path.

    The new folder has all files of the first one. Each weight is the mean over the folders that
    have it, so the mean of a fine-tuned model and the one that it started from (Wortsman et al.
    2022, "Robust fine-tuning of zero-shot models") keeps the heads that only the first one has.

    Args:
        license_name: its licence; None: the one that all folders name, if they do.

    Raises:
        TrainError: there is only one folder; or one cannot be loaded, or has a weight that the
            first one lacks; or they differ in their sizes, labels or tokens.
    """
    if len(sources) < 2:
        raise TrainError("an average needs at least two checkpoints")
    first, *others = folders = [open_folder(source) for source in sources]
    tensors = _read(first)
    sums = {key: tensor.double() for key, (_, _, tensor) in tensors.items()}
    counts = dict.fromkeys(sums, 1)
    for other in others:
        _check_alike(first, other)
        for key, (_, _, tensor) in _read(other).items():
            if key not in sums or tensor.shape != sums[key].shape:
                raise TrainError(
                    f"{other.location} has other sizes or other heads than {first.location}: "
                    f"{key[1]}"
                )
            sums[key] += tensor
            counts[key] += 1
    for file in first.card.rglob("*"):
        if file.suffix in _COPIED:
            copy = folder / file.relative_to(first.card)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    means: dict[Path, dict[str, Tensor]] = {}
    for key, (file, name, tensor) in tensors.items():
        means.setdefault(file, {})[name] = (sums[key] / counts[key]).to(tensor.dtype)
    for file, weights in means.items():
        if file.suffix == ".pt":
            torch.save(weights, folder / file)
        else:
            save_file(weights, folder / file, metadata={"format": "pt"})
    licenses = {each.license for each in folders}
    matter = front_matter(license_name or (licenses.pop() if len(licenses) == 1 else None))
    names = "\n".join(f"- {source}" for source in sources)
    card = f"{matter}# The average of {len(sources)} checkpoints\n\n{names}\n"
    (folder / CARD).write_text(card, encoding="utf-8")
    return folder


def _read(source: Folder) -> dict[tuple[Path, str], tuple[Path, str, Tensor]]:
    """Return all tensors of a folder with their file and name, without running pickled code.

    They are those of the encoder, of its heads, and of modules after the pooling. The keys are
    equal in folders that keep the tensors in other shards, or the encoder without its heads.
    """
    files = source.weights  # of the encoder: raises if a shard is missing
    for file in sorted(source.card.rglob("*")):
        is_beside = file.suffix == ".safetensors" and file.parent != source.path
        files += [file] if is_beside or file.suffix == ".pt" else []
    with torch.device("meta"):
        model: Any = AutoModel.from_config(source.config)  # type: ignore[no-untyped-call]
    tensors = {}
    for path in files:
        file, is_pt = path.relative_to(source.card), path.suffix == ".pt"
        with one_line_errors(path):
            loaded = torch.load(path, weights_only=True) if is_pt else load_file(path)
        for name, tensor in loaded.items():
            key = file if is_pt else file.parent, name.removeprefix(f"{model.base_model_prefix}.")
            tensors[key] = file, name, tensor
    return tensors


def _check_alike(first: Folder, other: Folder) -> None:
    one, two = first.config, other.config
    if one.architectures == two.architectures and one.id2label != two.id2label:
        raise TrainError(f"{other.location} has other labels than {first.location}")
    if first.text.get_vocab() != other.text.get_vocab():
        raise TrainError(f"{other.location} has another vocabulary than {first.location}")
