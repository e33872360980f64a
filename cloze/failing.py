"""How a command fails: with one line on standard error, and an exit code."""

from typing import NoReturn

import click


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error to standard error, or to standard output if that fails; exit with `code`."""
    try:
        click.echo(f"cloze: {message}", err=True)
    except OSError:
        click.echo(f"cloze: {message}")
    raise SystemExit(code)
