"""Generates inputs of a target, checks them, and keeps the smallest input of each failure."""

import hashlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

MAX_SECONDS = 1.0
"""Longest time of one input, of this process, so that a busy machine fails no input."""


@dataclass(frozen=True, slots=True)
class Target:
    """Code that reads bytes from elsewhere.

    Attributes:
        name: name of the target, and of its folder in the corpus.
        valid: inputs that the code accepts.
        inputs: generates inputs, valid ones and damaged ones.
        check: (input, scratch folder) -> whether the code accepts the input; raises any exception
            if the code mishandles the input.
        examples: number of inputs that the fast test generates.
    """

    name: str
    valid: Sequence[bytes]
    inputs: SearchStrategy[bytes]
    check: Callable[[bytes, Path], bool]
    examples: int

    @property
    def corpus(self) -> Path:
        """Return the folder of the target's inputs."""
        return Path(__file__).parent / self.name

    def run(self, data: bytes, scratch: Path) -> bool:
        """Check one input; return whether the code accepts the input."""
        started = time.process_time()
        is_accepted = self.check(data, scratch)
        seconds = time.process_time() - started
        assert seconds <= MAX_SECONDS, f"the input took {seconds:.1f} s of processor time"
        return is_accepted


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that a target mishandles, and the exception."""

    data: bytes
    error: BaseException

    def save(self, folder: Path) -> Path:
        """Write the input to a corpus; return its file, which is named by the input's hash."""
        file = folder / hashlib.sha256(self.data).hexdigest()[:12]
        file.write_bytes(self.data)
        return file


def search(target: Target, scratch: Path, examples: int) -> list[Failure]:
    """Check generated inputs; return the smallest input of each line of code that raises."""
    failures: dict[tuple[str, int | None], Failure] = {}

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=False,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(target.inputs)
    def check(data: bytes) -> None:
        try:
            target.run(data, scratch)
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            key = line.filename, line.lineno
            if key not in failures or len(data) <= len(failures[key].data):
                failures[key] = Failure(data, error)
            raise

    try:
        check()
    except Exception:
        if not failures:  # the generator of inputs failed
            raise
    return list(failures.values())


def search_for(target: Target, scratch: Path, seconds: float) -> list[Failure]:
    """Search in rounds for so long; return the failures of the first round that has some."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if failures := search(target, scratch, examples=1000):
            return failures
    return []
