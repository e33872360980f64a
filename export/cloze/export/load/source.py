"""Finds and reads a checkpoint's files: a directory, or a hub repository that is downloaded.

Tensors are read without executing pickled code.
"""

import json
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cloze.export.errors import ExportError
from cloze.model_store.error_lines import first_line

SENTENCE_SETTINGS: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""The names that sentence-transformers gives to a transformer's settings, in its order."""

SENTENCEPIECE_MODELS: Final = ("sentencepiece.bpe.model", "spm.model", "spiece.model")
"""The names of SentencePiece models, in the order in which they are looked for."""


def read_settings(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty object if the file is missing.

    Raises:
        ExportError: the file does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{file.name} is not a JSON object")
    return data


_HUB = "hub:"

_SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    *SENTENCEPIECE_MODELS,
    "added_tokens.json",
    "special_tokens_map.json",
    "modules.json",
    *SENTENCE_SETTINGS,
    "config_sentence_transformers.json",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
    "README.md",
    "adapter_config.json",
    "gliner_config.json",
)

_SNAPSHOTS = "snapshots"
"""The folder of a repository in the hub's cache that has a folder per commit."""

_TOP_FILES = ("config.json", "modules.json", "adapter_config.json", "gliner_config.json")
"""Files of which each checkpoint has one at the top."""

_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?")
    for stem, ending in (
        ("model", "safetensors"),
        ("pytorch_model", "bin"),
        ("adapter_model", "safetensors"),
    )
)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A folder with a checkpoint's files, and the folder's origin.

    Attributes:
        revision: the hub's commit; None for a directory.
    """

    folder: Path
    kind: Literal["directory", "hub"]
    location: str
    revision: str | None


def locate(
    source: str, revision: str | None = None, *, with_weights: bool = True
) -> CheckpointFiles:
    """Locate a checkpoint; download a hub repository first.

    Args:
        source: an existing directory, or a hub id such as ``google-bert/bert-base-uncased``;
            ``hub:`` before the id says that it is no directory.
        revision: a branch, tag or commit of the hub; the result always has the commit.
        with_weights: whether the weights are downloaded too.

    Raises:
        ExportError: the directory, the repository or the revision does not exist, or the hub
            does not answer.
    """
    if source.startswith(_HUB):
        return _download(source.removeprefix(_HUB), revision, with_weights=with_weights)
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ExportError(
                f"--revision {revision} names a hub revision, but {source} is a directory"
            )
        folder = _snapshot(folder)
        check_links(folder)
        return CheckpointFiles(folder, "directory", Path(source).resolve().name, None)
    if folder.exists():
        raise ExportError(
            f"{source} is a file; give the directory that holds config.json and the weights"
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ExportError(f"no directory {source}")
    return _download(source, revision, with_weights=with_weights)


def _snapshot(folder: Path) -> Path:
    """Return the one snapshot of a folder of the hub's cache, or another folder as it is."""
    snapshots = folder / _SNAPSHOTS
    if not snapshots.is_dir() or any((folder / name).exists() for name in _TOP_FILES):
        return folder
    found = sorted(one for one in snapshots.iterdir() if one.is_dir())
    if len(found) != 1:
        shown = ", ".join(map(str, found)) or "it has none"
        raise ExportError(
            f"{folder} is a folder of the hub's cache; give one of its snapshots: {shown}"
        )
    return found[0]


def check_links(folder: Path, checkpoint: Path | None = None) -> None:
    """Check that links of a folder lead to files of the checkpoint, or of its cache of the hub.

    A snapshot of the cache has links to its files, which the folder ``blobs`` holds.

    Args:
        folder: the folder whose entries are checked, the checkpoint's or one within it.
        checkpoint: the checkpoint's folder; None: it is the same one.

    Raises:
        ExportError: a link leads elsewhere.
    """
    top = Path(os.path.realpath(checkpoint or folder))
    root = top.parent.parent if top.parent.name == _SNAPSHOTS else top
    for entry in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        target = Path(os.path.realpath(entry))
        if (entry.is_symlink() or entry == folder) and not target.is_relative_to(root):
            raise ExportError(
                f"{entry} leads to {target}, outside the checkpoint's folder {root}; "
                "copy the file into the folder"
            )


def _download(repository: str, revision: str | None, *, with_weights: bool) -> CheckpointFiles:
    """Return the files of a repository; offline, those of an earlier download."""
    from huggingface_hub import HfApi, constants, snapshot_download

    wanted, patterns = revision, [*_SMALL_FILES, "model*.safetensors*"]
    # The hub client raises errors of its own, of its HTTP library and of the system.
    try:
        if not (offline := constants.is_offline_mode()):
            info = HfApi().model_info(repository, revision=revision)
            wanted = info.sha
            patterns = _choose_files([sibling.rfilename for sibling in info.siblings or []])
            if not with_weights:
                patterns = [name for name in patterns if Path(name).name in _SMALL_FILES]
        folder = snapshot_download(
            repository, revision=wanted, local_files_only=offline, allow_patterns=patterns
        )
    except Exception as error:
        reason = first_line(error)
        at = "" if revision is None else f" at revision {revision}"
        raise ExportError(
            f"cannot load {repository}{at} from the hub (and no directory has that name): {reason}"
        ) from error
    commit = Path(folder).name  # the cache names the folder by the commit
    return CheckpointFiles(Path(folder), "hub", repository, commit)


def _choose_files(names: list[str]) -> list[str]:
    """Return the files to download; of the weights in each folder, those of the first format."""
    chosen = []
    for folder in {str(Path(name).parent) for name in names if name.count("/") <= 1}:
        files = [name for name in names if str(Path(name).parent) == folder]
        chosen += [name for name in files if Path(name).name in _SMALL_FILES]
        for weights in _WEIGHTS:
            if matching := [name for name in files if weights.fullmatch(Path(name).name)]:
                chosen += matching
                break
    return [name for name in chosen if not name.startswith(("onnx/", "openvino/"))]


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the tensors in a fixed order: one file, or the shards of an index.

    Raises:
        ExportError: the folder has no weights, or an index names a missing file.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return _shards(index)
    raise ExportError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, "
        "whole or sharded"
    )


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Return all tensors of the files by name, in their saved dtypes.

    Raises:
        ExportError: a file is damaged, or contains pickled code.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_pytorch(file)
    return tensors


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ExportError(f"{index.name} is not an index of shards: {error}") from error
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ExportError(
                f"{index.name} names the shard {name!r}, which is not a file beside it"
            )
        if not (index.parent / name).is_file():
            raise ExportError(f"{index.name} names the shard {name}, which is missing")
        files.append(index.parent / name)
    if not files:
        raise ExportError(f"{index.name} names no shard")
    return files


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{file.name} is damaged or not a safetensors file: {error}") from error


def _read_pytorch(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ExportError(
            f"{file.name} holds more than tensors or is damaged; it is not loaded (weights_only)"
        ) from error
    except Exception as error:  # damaged bytes make the unpickler raise any error
        reason = first_line(error)
        raise ExportError(f"{file.name} is damaged: {reason}") from error
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ExportError(f"{file.name} is not a table of tensors")
    return state
