"""The entrypoint of the serving images, ``python -m cloze.image``: serves as clouds ask for it.

Without an argument, the image serves. SageMaker starts it with the one argument ``serve``, and
expects it on a port of SageMaker's, with the models of a folder of SageMaker's. Vertex AI names
port and routes in the environment. All other arguments are those of `cloze`.

Source: "Use your own inference code with hosting services", Amazon SageMaker's developer guide;
Vertex AI's requirements of custom containers.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from cloze.cli import main
from cloze.failing import fail
from cloze.model_store.manifest import NAME_PATTERN

SAGEMAKER_MODELS = Path("/opt/ml/model")
"""Folder into which SageMaker unpacks the model."""

SAGEMAKER_PORT = "8080"
"""Port that SageMaker asks, unless its environment names another."""

VERTEX = {
    "AIP_HTTP_PORT": "CLOZE_PORT",
    "AIP_HEALTH_ROUTE": "CLOZE_HEALTH_ROUTE",
    "AIP_PREDICT_ROUTE": "CLOZE_PREDICT_ROUTE",
}
"""Variables that Vertex AI sets -> the settings that they stand for, which precede them."""


def arguments(
    given: Sequence[str],
    environment: MutableMapping[str, str],
    models: Path = SAGEMAKER_MODELS,
) -> list[str]:
    """Return the arguments of `cloze` for those of the container.

    Args:
        given: the arguments after the image's name.
        environment: gets the settings that a cloud asks for.
        models: the folder that SageMaker fills: a store, or one bundle.
    """
    for variable, setting in VERTEX.items():
        if variable in environment:
            environment.setdefault(setting, environment[variable])
    if list(given) == ["serve"]:
        if (port := environment.get("SAGEMAKER_BIND_TO_PORT")) is not None:
            environment["CLOZE_PORT"] = port
        environment.setdefault("CLOZE_PORT", SAGEMAKER_PORT)
        if models.is_dir() and any(models.iterdir()):
            environment["CLOZE_MODEL_STORE"] = str(_store(models))
    return [*given] or ["serve"]


def _store(folder: Path) -> Path:
    """Return a folder as a model store: itself, or a new store with a link to its one bundle."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return folder
    try:
        described = json.loads(manifest.read_bytes())
        name, version = str(described["name"]), str(int(described["version"]))
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"{name[:80]!a} is no name of a bundle")
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(f"{manifest} cannot be read: {error}", code=2)
    store = Path(tempfile.mkdtemp(prefix="cloze-store-"))
    (store / name).mkdir()
    (store / name / version).symlink_to(folder, target_is_directory=True)
    return store


if __name__ == "__main__":
    main(arguments(sys.argv[1:], os.environ))
