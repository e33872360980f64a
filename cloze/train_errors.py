"""Reports the errors of ``cloze train`` as one line each."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.model_store.store import StoreError


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each expected error of a command into one line and exit code 1."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            from cloze.export.errors import DataError, ExportError
        except ModuleNotFoundError as error:
            _fail_for_missing_module(error)
        try:
            with _sigterm_as_ctrl_c():
                command(**arguments)
        except (DataError, ExportError, StoreError) as error:
            fail(str(error))
        except ModuleNotFoundError as error:
            _fail_for_missing_module(error)
        except KeyboardInterrupt:
            fail(
                "interrupted; what is saved is kept, the same command goes on from there", code=130
            )
        except OSError as error:
            file = error.filename or arguments.get("out") or "a file"
            fail(f"{file}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            # torch has no type for a failed allocation on the CPU.
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            fail(
                "there is not enough memory; "
                "fewer sequences per batch, fewer tokens or a smaller model need less"
            )

    return run


def _fail_for_missing_module(error: ModuleNotFoundError) -> NoReturn:
    fail(
        f"training needs {error.name}, which the serving install leaves out; install it with: "
        f"{install_command('train')}"
    )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM outside the training loop, which has its own handler."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
