"""What a client raises, for the programs of this folder."""

from collections.abc import Callable


def name_of_error(call: Callable[[], object]) -> str | None:
    """Return the full name of the exception that a call raises."""
    return (error_of(call) or "").partition(": ")[0] or None


def error_of(call: Callable[[], object]) -> str | None:
    """Return the exception that a call raises, with its full name."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return None
