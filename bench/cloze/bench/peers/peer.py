"""A peer: a server in common use that ``cloze bench run`` measures, and its versions."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloze.bench.errors import BenchError
from cloze.bench.machine import installed_versions
from cloze.bench.servers import MeasuredServer

_VERSION_TIMEOUT_S = 60.0

APPS = Path(__file__).parent / "apps"
"""Programs that run in the environments of peers; they do not import this package."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
"""Environment variables of peers: what they load is on the disk."""


@dataclass(frozen=True, slots=True)
class PeerModel:
    """What a peer is to serve.

    Attributes:
        checkpoint: absolute path of a Hugging Face directory.
    """

    checkpoint: Path
    task: str
    pooling: str = "mean"
    backends: tuple[str, ...] = ("torch",)


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table of peers.

    Attributes:
        option: the option of ``cloze bench run`` that names the peer's program.
        program: the kind of program in the help text: ``PYTHON`` or ``BINARY``.
        tasks: names of our tasks that the peer serves.
        servers: returns the servers to measure, from the program and the model. It raises a
            `BenchError` if the checkpoint lacks what the peer needs.
        versions: returns the versions of the program's packages. It raises a `BenchError` if the
            program does not start, or lacks a package.
    """

    option: str
    program: str
    title: str
    tasks: frozenset[str]
    servers: Callable[[str, PeerModel], list[MeasuredServer]]
    versions: Callable[[str, PeerModel], Mapping[str, str]]


def package_versions(python: str, title: str, required: tuple[str, ...]) -> Mapping[str, str]:
    """Return the versions of the packages in an interpreter's environment.

    Raises:
        BenchError: the interpreter does not start, or lacks a package.
    """
    try:
        versions = installed_versions(python)
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"the interpreter {python} of {title} does not start: {error}") from error
    if missing := [name for name in required if name not in versions]:
        raise BenchError(f"{title} needs {', '.join(missing)}, which {python} does not have")
    return versions


def binary_version(binary: str, title: str) -> Mapping[str, str]:
    """Return the version that a program prints when it is asked for ``--version``.

    Raises:
        BenchError: the program does not start, or prints no version.
    """
    try:
        done = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_VERSION_TIMEOUT_S,
        )
        name, version = done.stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"the program {binary} of {title} does not start: {error}") from error
    except ValueError as error:
        raise BenchError(f"{binary} is not {title}: --version prints {done.stdout!r}") from error
    return {name: version}
