"""Reads the small JSON files in a checkpoint's folder."""

import json
from pathlib import Path
from typing import Any, Final

from cloze.export.errors import ExportError

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
