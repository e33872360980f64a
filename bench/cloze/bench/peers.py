"""Other servers, measured beside ours on the same weights: a row of `PEERS` for each."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloze.bench.errors import BenchError
from cloze.bench.machine import installed_versions
from cloze.bench.processes import MeasuredServer

BACKENDS = ("torch", "onnx", "openvino")
"""Backends of sentence-transformers; a server whose environment lacks one does not start."""

_APP = Path(__file__).parent / "apps" / "sentence_transformers_app.py"
"""Runs in the environment of the peer, and does not import this package."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
"""Environment variables of peers: what they load is on the disk."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table of peers. Peers serve embeddings.

    Attributes:
        option: the option of ``cloze bench run`` that names an interpreter, in whose environment
            the peer is installed.
        packages: what the environment must contain; the first one is the title.
        servers: returns the servers from the interpreter, the checkpoint and the backends.
    """

    option: str
    packages: tuple[str, ...]
    servers: Callable[[str, Path, tuple[str, ...]], list[MeasuredServer]]

    @property
    def title(self) -> str:
        """The name in tables."""
        return self.packages[0]

    def versions(self, python: str) -> Mapping[str, str]:
        """Return the versions of the packages in the interpreter's environment.

        Raises:
            BenchError: the interpreter does not start, or lacks a package.
        """
        try:
            versions = installed_versions(python)
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(
                f"the interpreter {python} of {self.title} does not start: {error}"
            ) from error
        if missing := [name for name in self.packages if name not in versions]:
            names = ", ".join(missing)
            raise BenchError(f"{self.title} needs {names}, which {python} does not have")
        return versions


def _infinity(python: str, checkpoint: Path, _: tuple[str, ...]) -> list[MeasuredServer]:
    model = ("--model-id", str(checkpoint), "--served-model-name", "m")
    options = ("--engine", "torch", "--device", "cpu", "--no-bettertransformer")
    program = str(Path(python).parent / "infinity_emb")
    return [
        MeasuredServer(
            "infinity-emb",
            (program, "v2", *model, *options, "--port", "{port}"),
            "/embeddings",
            "/health",
            texts_field="input",
            extra={"model": "m"},
            environment=_OFFLINE,
        )
    ]


def _sentence_transformers(
    python: str, checkpoint: Path, backends: tuple[str, ...]
) -> list[MeasuredServer]:
    return [
        MeasuredServer(
            f"FastAPI + sentence-transformers {backend}",
            (python, str(_APP), str(checkpoint), backend, "{port}"),
            "/embed",
            "/healthz",
            environment=_OFFLINE,
        )
        for backend in backends
    ]


PEERS: tuple[Peer, ...] = (
    Peer("infinity", ("infinity-emb",), _infinity),
    Peer(
        "sentence-transformers",
        ("sentence-transformers", "fastapi", "uvicorn"),
        _sentence_transformers,
    ),
)
"""In the order of the tables."""
