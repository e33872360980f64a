"""Locates a checkpoint's files: a directory, or a hub repository that is downloaded."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cloze.export.errors import ExportError, first_line
from cloze.export.settings_files import SENTENCE_SETTINGS

_HUB = "hub:"

_SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "modules.json",
    *SENTENCE_SETTINGS,
    "config_sentence_transformers.json",
    "README.md",
)

_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?")
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin"))
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


def locate(source: str, revision: str | None = None) -> CheckpointFiles:
    """Locate a checkpoint; download a hub repository first.

    Args:
        source: an existing directory, or a hub id such as ``google-bert/bert-base-uncased``;
            ``hub:`` before the id says that it is no directory.
        revision: a branch, tag or commit of the hub; the result always has the commit.

    Raises:
        ExportError: the directory, the repository or the revision does not exist, or the hub
            does not answer.
    """
    if source.startswith(_HUB):
        return _download(source.removeprefix(_HUB), revision)
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ExportError(
                f"--revision {revision} names a hub revision, but {source} is a directory"
            )
        return CheckpointFiles(folder, "directory", folder.resolve().name, None)
    if folder.exists():
        raise ExportError(
            f"{source} is a file; give the directory that holds config.json and the weights"
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ExportError(f"no directory {source}")
    return _download(source, revision)


def _download(repository: str, revision: str | None) -> CheckpointFiles:
    from huggingface_hub import HfApi, constants, snapshot_download

    # The hub client raises errors of its own, of its HTTP library and of the system.
    try:
        if constants.is_offline_mode():
            return _cached(repository, revision)
        info = HfApi().model_info(repository, revision=revision)
        patterns = _choose_files([sibling.rfilename for sibling in info.siblings or []])
        folder = Path(snapshot_download(repository, revision=info.sha, allow_patterns=patterns))
    except Exception as error:
        reason = first_line(error)
        at = "" if revision is None else f" at revision {revision}"
        raise ExportError(
            f"cannot load {repository}{at} from the hub (and no directory has that name): {reason}"
        ) from error
    return CheckpointFiles(folder, "hub", repository, info.sha)


def _cached(repository: str, revision: str | None) -> CheckpointFiles:
    """Return the files of an earlier download; the cache names the folder by the commit."""
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, "model*.safetensors*"]
    folder = Path(
        snapshot_download(
            repository, revision=revision, local_files_only=True, allow_patterns=patterns
        )
    )
    return CheckpointFiles(folder, "hub", repository, folder.name)


def _choose_files(names: list[str]) -> list[str]:
    """Return the files to download.

    Of the weights in each folder, choose safetensors files, or else PyTorch's files.
    """
    chosen = []
    for folder in {str(Path(name).parent) for name in names if name.count("/") <= 1}:
        files = [name for name in names if str(Path(name).parent) == folder]
        chosen += [name for name in files if Path(name).name in _SMALL_FILES]
        for weights in _WEIGHTS:
            if matching := [name for name in files if weights.fullmatch(Path(name).name)]:
                chosen += matching
                break
    return [name for name in chosen if not name.startswith(("onnx/", "openvino/"))]
