"""A wrong choice of any option of any command is named in the error."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from cloze.cli import cli

WRONG = "Neither"


def options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command with one option that takes a choice."""
    if isinstance(command, click.Group):
        command.list_commands(click.Context(command))  # `bench` imports its commands
        for name, inner in command.commands.items():
            yield from options(inner, (*path, name))
    for parameter in command.params:
        if isinstance(parameter, click.Option) and isinstance(parameter.type, click.Choice):
            yield (*path, parameter.opts[0])


CASES = list(options(cli))


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_a_wrong_choice_is_named(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*words, WRONG])
    assert done.exit_code == 2
    assert f"'{WRONG}' is not one of" in done.output


def test_commands_have_choices() -> None:
    assert len(CASES) > 20
