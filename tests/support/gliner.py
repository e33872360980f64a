"""The GLiNER checkpoints of tests/gliner.tar.xz, and what the library computes with them."""

import atexit
import base64
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store


def _unpacked() -> Path:
    """Return a folder with the checkpoints, until the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="gliner-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(Path(__file__).parents[1] / "gliner.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


FOLDER = _unpacked()
KINDS = ("span", "marker", "token", "projected", "layout-a", "bi")

Decoding = tuple[float, bool, bool, list[list[int]]]


@dataclass(frozen=True)
class Case:
    text: str
    labels: list[str]
    ids: list[int]
    logits: NDArray[np.float32]  # [w, k, l]
    scores: list[float]  # of the entities with the default parameters
    decodings: list[Decoding]


def cases(kind: str, folder: Path = FOLDER, seed: int = 0) -> Iterator[Case]:
    """Yield what the library computed with a checkpoint."""
    for one in json.loads((folder / f"{kind}-{seed}" / "expected.json").read_text()):
        values = np.frombuffer(base64.b64decode(one.pop("logits")), "<f4")
        logits = values.reshape(one.pop("shape"))
        if kind == "token":
            logits = logits.swapaxes(1, 2)
        yield Case(logits=logits, **one)


def export_kind(
    kind: str, store: Store, folder: Path = FOLDER, seed: int = 0, **options: Any
) -> Bundle:
    """Export a checkpoint under the name of its kind."""
    source, backbone = folder / f"{kind}-{seed}", None
    if kind == "layout-a":
        backbone = str(folder / "base")
    elif kind == "marker":
        backbone = str(store.root / "backbone")
        Path(backbone).mkdir(exist_ok=True)
        shutil.copy(source / "backbone.json", Path(backbone) / "config.json")
    return export(str(source), kind, store, ExportOptions(backbone=backbone, **options))


def copy_of(kind: str, folder: Path, without: Sequence[str] = (), **config: Any) -> Path:
    """Copy a checkpoint, without some files and with other settings."""
    copied = folder / kind
    shutil.copytree(FOLDER / f"{kind}-0", copied, ignore=lambda *_: ["expected.json", *without])
    file = copied / "gliner_config.json"
    settings = json.loads(file.read_text()) | config
    file.write_text(json.dumps(settings))
    return copied
