"""What a server process has in memory, asked of a fresh interpreter."""

import json
import sys

import httpx
import pytest

from tests.support.command import call
from tests.support.serving import running_server

HEAVY = ["torch", "transformers", "onnx", "safetensors", "huggingface_hub", "sentence_transformers"]
HEAVY += ["cloze.export"]

LATER = ["fastapi", "opentelemetry", "psutil", "msgspec", "rich", "cloze.client", "cloze.bench"]
"""What some requests and commands need, and no start: 10 to 100 ms each."""


def modules_after(code: str) -> list[str]:
    done = call(
        sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    )
    return json.loads(done.stdout)


ENGINES = "cloze.service.processes.supervisor, cloze.service.processes.engine_process"
HTTP = ["fastapi", "starlette.requests", "uvicorn"]
"""`cloze serve` imports these while its engines open; the other processes of engines never do."""

IMPORTED: dict[str, tuple[str, list[str]]] = {
    f"cloze.service.server.process, cloze.service.engine.onnx_engine, {ENGINES}": (
        "onnxruntime",
        HEAVY,
    ),
    "cloze.service.processes.frontend": ("msgspec", [*HEAVY, "onnxruntime"]),
    f"cloze.cli, cloze.service.server.startup, {ENGINES}": (
        "cloze.service.models.served_models",
        HTTP,
    ),
    "cloze.cli": ("click", [*HEAVY, "cloze.service", "fastapi", "onnxruntime"]),
}
"""Modules -> what their import brings along, and what it does not."""


@pytest.mark.parametrize("modules", IMPORTED)
def test_an_import_brings_only_what_is_needed(modules: str) -> None:
    present, absent = IMPORTED[modules]
    loaded = modules_after(f"import {modules}")
    assert present in loaded
    assert not [name for name in absent if name in loaded]


def test_a_server_that_has_answered_imported_only_what_the_request_needed() -> None:
    command = (sys.executable, "-X", "importtime", "-m", "cloze", "serve")
    with running_server(None, "--model", "cloze-bert", command=command) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.post(f"{server.url}/embed", json={"inputs": "a"}).status_code == 200
        assert imported(server.log) & {"onnxruntime", "uvicorn"} == {"onnxruntime", "uvicorn"}
        assert not imported(server.log) & {*HEAVY, *LATER}
        assert httpx.get(f"{server.url}/nowhere").status_code == 404
    assert "fastapi" in imported(server.log)


def imported(log: list[str]) -> set[str]:
    """Return the modules of a log with Python's ``-X importtime``."""
    return {line.rpartition("|")[2].strip() for line in log if line.startswith("import time:")}


def test_no_import_builds_the_schema_of_a_body() -> None:
    """A schema takes 1 ms, and there are a hundred; see `WireModel`."""
    built = modules_after(
        "import cloze.service.server.process, sys\n"
        "from cloze.service.tasks.wire import WireModel\n"
        "def below(model): return {model}.union(*map(below, model.__subclasses__()))\n"
        "models = below(WireModel)\n"
        "assert len(models) > 50\n"
        "sys.modules = {one.__name__: one for one in models if one.__pydantic_complete__}"
    )
    assert built == ["InferParameters", "TensorParameters"]  # both are the default of a field
