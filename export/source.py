"""Where a checkpoint's files are: a directory here, or a hub repository at one commit, downloaded first."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from export.errors import ExportError, first_line

_WANTED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "modules.json",
    *(
        f"sentence_{kind}_config.json"
        for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
    "config_sentence_transformers.json",
    "README.md",
)

_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?")
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin"))
)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A folder with a checkpoint's files, and where it came from."""

    folder: Path
    kind: Literal["directory", "hub"]
    location: str
    revision: str | None


def locate(source: str, revision: str | None = None) -> CheckpointFiles:
    """Find a checkpoint; download it if it is a hub id.

    Args:
        source: an existing directory, else a hub id such as ``google-bert/bert-base-uncased``.
        revision: a hub branch, tag or commit; whatever is given, the commit it names is pinned and recorded.

    Raises:
        ExportError: no such directory, no such repository or revision, or the hub does not answer.
    """
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

    # The hub client raises errors of several libraries (its own, the HTTP client's, the system's): all end the export.
    try:
        if (
            constants.is_offline_mode()
        ):  # what was downloaded before; its folder is named by its commit
            patterns = [*_WANTED, "model*.safetensors*"]
            folder = Path(
                snapshot_download(
                    repository, revision=revision, local_files_only=True, allow_patterns=patterns
                )
            )
            return CheckpointFiles(folder, "hub", repository, folder.name)
        info = HfApi().model_info(repository, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or []]
        folder = Path(
            snapshot_download(repository, revision=info.sha, allow_patterns=_choose(names))
        )
    except Exception as error:
        reason = first_line(error)
        at = "" if revision is None else f" at revision {revision}"
        raise ExportError(
            f"cannot load {repository}{at} from the hub (and no directory has that name): {reason}"
        ) from error
    return CheckpointFiles(folder, "hub", repository, info.sha)


def _choose(names: list[str]) -> list[str]:
    """The files worth downloading: in each folder safetensors where it has them, else PyTorch's; no other weights."""
    chosen = []
    for folder in {str(Path(name).parent) for name in names if name.count("/") <= 1}:
        files = [name for name in names if str(Path(name).parent) == folder]
        chosen += [name for name in files if Path(name).name in _WANTED]
        for weights in _WEIGHTS:
            if found := [name for name in files if weights.fullmatch(Path(name).name)]:
                chosen += found
                break
    return [name for name in chosen if not name.startswith(("onnx/", "openvino/"))]
