"""What a server process has in memory, asked of a fresh interpreter."""

import json
import subprocess
import sys

HEAVY = ["torch", "transformers", "onnx", "safetensors", "huggingface_hub", "sentence_transformers"]
HEAVY += ["cloze.export"]


def modules_after(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_service_never_imports_what_export_needs() -> None:
    loaded = modules_after(
        "import cloze.service.server.process, cloze.service.engine.onnx_engine, "
        "cloze.service.processes.supervisor, cloze.service.processes.engine_process"
    )
    assert "onnxruntime" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_a_front_end_holds_no_runtime() -> None:
    loaded = modules_after("import cloze.service.processes.frontend")
    assert "msgspec" in loaded
    assert not [name for name in [*HEAVY, "onnxruntime"] if name in loaded]


def test_engines_open_before_http_is_imported() -> None:
    """`cloze serve` imports HTTP while they open; an engine process and a supervisor never do."""
    loaded = modules_after(
        "import cloze.cli, cloze.service.server.startup, cloze.service.processes.supervisor, "
        "cloze.service.processes.engine_process"
    )
    assert "cloze.service.models.served_models" in loaded
    assert not [name for name in ("fastapi", "starlette.requests", "uvicorn") if name in loaded]


def test_the_command_line_imports_a_room_only_when_asked() -> None:
    loaded = modules_after("import cloze.cli")
    assert not [
        name for name in [*HEAVY, "cloze.service", "fastapi", "onnxruntime"] if name in loaded
    ]
