"""Programs of tests/clients, each in an environment of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from tests.support.command import call

CLIENTS = Path(__file__).parents[1] / "clients"


QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGCHAIN_TRACING_V2": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ANONYMIZED_TELEMETRY": "False",
}


def install(*command: str, cwd: Path | None = None) -> None:
    done = call(*command, check=False, cwd=cwd)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        pytest.skip(
            f"{Path(command[0]).name} {command[1]} failed: {lines[-1] if lines else done.returncode}"
        )


def environment(lock: str, folder: Path) -> Path:
    """Install the packages of a lock of tests/clients; return the folder of their programs."""
    uv, python = find_uv_bin(), folder / "bin" / "python"
    install(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
    install(uv, "pip", "sync", "--quiet", "--python", str(python), str(CLIENTS / lock))
    return python.parent


def run(program: str, lock: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a program of tests/clients with the packages of a lock; return what it printed."""
    python = environment(lock, folder) / "python"
    return printed([str(python), str(CLIENTS / program), *arguments])


def printed(command: list[str]) -> dict[str, Any]:
    done = call(*command, env=os.environ | QUIET)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
