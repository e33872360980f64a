"""Reads the small JSON files that lie beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

from export.errors import ExportError


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        ExportError: the file is not a JSON object.
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
