"""Reads a checkpoint's tensors: safetensors, or PyTorch's format without executing pickled code."""

import hashlib
import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cloze.export.errors import ExportError, first_line


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


def sha256_of(files: list[Path]) -> str:
    """Return one SHA-256 of the bytes of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
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
