"""Where a checkpoint's files are: a directory here, or a hub repository at one commit, downloaded first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from export.errors import ExportError

_WANTED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "README.md",
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
            raise ExportError(f"--revision {revision} names a hub revision, but {source} is a directory")
        return CheckpointFiles(folder, "directory", folder.resolve().name, None)
    if folder.exists():
        raise ExportError(f"{source} is a file; give the directory that holds config.json and the weights")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ExportError(f"no directory {source}")
    return _download(source, revision)


def _download(repository: str, revision: str | None) -> CheckpointFiles:
    from huggingface_hub import HfApi, snapshot_download

    # The hub client raises errors of several libraries (its own, the HTTP client's, the system's): all end the export.
    try:
        info = HfApi().model_info(repository, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or []]
        folder = snapshot_download(repository, revision=info.sha, allow_patterns=_choose(names))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = "" if revision is None else f" at revision {revision}"
        raise ExportError(f"cannot load {repository}{at} from the hub (and no directory has that name): {reason}") from error
    return CheckpointFiles(Path(folder), "hub", repository, info.sha)


def _choose(names: list[str]) -> list[str]:
    """The files worth downloading: safetensors where there are any, else PyTorch's; no other frameworks' weights."""
    weights = [n for n in names if n.endswith((".safetensors", ".safetensors.index.json"))]
    if not any("/" not in name or name.startswith("0_") for name in weights):
        weights += [n for n in names if Path(n).name.startswith("pytorch_model") and n.endswith((".bin", ".bin.index.json"))]
    settings = [n for n in names if Path(n).name in _WANTED and n.count("/") <= 1 and not n.startswith(("onnx/", "openvino/"))]
    return settings + [n for n in weights if n.count("/") <= 1]
