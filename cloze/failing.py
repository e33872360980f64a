"""How a command fails: with one line on standard error, and an exit code."""

from typing import NoReturn

import click


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error to standard error and exit with `code`."""
    click.echo(f"cloze: {message}", err=True)
    raise SystemExit(code)
