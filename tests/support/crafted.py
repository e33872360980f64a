"""Bundles as a stranger would craft them: changed in one place, and sealed with valid digests."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

Body = dict[str, Any]
"""The fields of a manifest."""

Change = Callable[[Path, Body], None]
"""Changes the files in a bundle's folder, or the fields of its manifest."""


def unchanged(_: Path, __: Body) -> None:
    """Change nothing."""


def craft(source: Path, root: Path, change: Change) -> Path:
    """Copy a bundle to a new store, change it and seal it; return the bundle's folder."""
    folder = Path(shutil.copytree(source, root / source.parent.name / source.name))
    body = read_body(folder)
    change(folder, body)
    seal(folder, body)
    return folder


def read_body(folder: Path) -> Body:
    """Return the fields of a manifest without its digest."""
    body: Body = json.loads((folder / "manifest.json").read_bytes())
    del body["digest"]
    return body


def seal(folder: Path, body: Body, *, measure: bool = True) -> None:
    """Write the manifest with the hashes and sizes of the files, and with its own digest.

    A manifest that is no regular file stays as it is. Without `measure`, hashes and sizes stay too.
    """
    for name, entry in body["files"].items() if measure else ():
        file = folder / name
        if name and file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    manifest = folder / "manifest.json"
    if manifest.is_file() and not manifest.is_symlink():
        manifest.write_bytes(sealed(body))


def sealed(body: Body) -> bytes:
    """Return the content of a manifest with its digest."""
    canonical = json.dumps(body, sort_keys=True, ensure_ascii=False).encode()
    fields = body | {"digest": hashlib.sha256(canonical).hexdigest()}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def put(path: str, value: object) -> Change:
    """Return a change that sets a field of the manifest, for example ``limits.max_tokens``."""

    def change(_: Path, body: Body) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            body = body[parent]
        body[last] = value

    return change


def write(file: str, content: str | bytes) -> Change:
    """Return a change that replaces the content of a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder, _: (folder / file).write_bytes(data) and None


def edit_json(file: str, edit: Callable[[Any], object]) -> Change:
    """Return a change that edits the value of a JSON file in place."""

    def change(folder: Path, _: Body) -> None:
        value = json.loads((folder / file).read_bytes())
        edit(value)
        (folder / file).write_text(json.dumps(value))

    return change


def edit_graph(edit: Callable[[onnx.ModelProto], object]) -> Change:
    """Return a change that edits the fp32 graph."""

    def change(folder: Path, _: Body) -> None:
        model = onnx.load(folder / "dense.onnx", load_external_data=False)
        edit(model)
        (folder / "dense.onnx").write_bytes(model.SerializeToString())

    return change


def both(*changes: Change) -> Change:
    """Return a change that makes several changes."""

    def change(folder: Path, body: Body) -> None:
        for each in changes:
            each(folder, body)

    return change
