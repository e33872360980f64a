"""How a command ends when it cannot do what was asked: one line on standard error, and an exit code."""

from typing import NoReturn

import click


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong, and exit."""
    click.echo(f"cloze: {message}", err=True)
    raise SystemExit(code)
