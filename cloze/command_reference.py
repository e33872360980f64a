"""Writes `docs/settings.md` and `docs/commands.md` from the settings and the command line.

python -m cloze.command_reference docs
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from cloze.cli import cli
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.settings import ENV_PREFIX, Settings, description

_GENERATED = "<!-- Generated: python -m cloze.command_reference docs -->"

_SETTINGS = f"""\
# Settings

{_GENERATED}

Each setting is an environment variable and a flag of `cloze serve`, for example
`CLOZE_MAX_BATCH_TOKENS` and `--max-batch-tokens`. The flag takes precedence. A value that is no
setting's stops the start with one line; a variable `CLOZE_...` that is no setting is reported.
[Tuning](operate.md#tuning) says which settings to change first.

| variable | default | meaning |
|---|---|---|
"""

_STORE = "`model_store/bundles` in a checkout, else `~/.local/share/cloze/bundles`"

_COMMANDS = f"""\
# Commands

{_GENERATED}

`cloze COMMAND --help` prints the same text. Commands that print results have `--json`: one object
per line. Without it, a terminal gets a table, and a pipe gets plain columns. Progress and errors go
to standard error.

| exit code | meaning |
|---|---|
| 0 | success; for `cloze serve`, every accepted request was answered after SIGTERM |
| 1 | an error, with one line; for `cloze serve`, an engine died |
| 2 | wrong arguments, or a server that does not start |
| 3 | for `cloze bulk`: all rows are written, and some have an error |

Completion of commands and options, for bash; zsh and fish have `zsh_source` and `fish_source`:

<!-- not run: it changes the shell -->

    eval "$(_CLOZE_COMPLETE=bash_source cloze)"
"""

_SERVE_OPTIONS: Final = "Its options are the [settings](settings.md).\n"


def settings_reference() -> str:
    """Return the text of `docs/settings.md`."""
    return _SETTINGS + "".join(
        f"| `{ENV_PREFIX}{name.upper()}` | {_default(name)} | {description(name)} |\n"
        for name in Settings.model_fields
    )


def _default(name: str) -> str:
    if name == "model_store":
        return _STORE
    default = Settings.model_fields[name].default
    return "" if default in ((), None) else f"`{getattr(default, 'value', default)}`"


def command_reference() -> str:
    """Return the text of `docs/commands.md`."""
    return "\n".join(filter(None, [_COMMANDS, *_sections(cli, None)]))


def _sections(command: click.Command, parent: click.Context | None) -> Iterator[str]:
    """Yield the sections of a command and of its commands."""
    name = None if parent else "cloze"
    context = click.Context(
        command, parent, info_name=name or command.name, **command.context_settings
    )
    if parent is not None:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"## {context.command_path}\n\n`{usage}`\n"
        yield _help(command)
        is_serve = context.command_path == "cloze serve"
        yield _SERVE_OPTIONS if is_serve else _options(command, context)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from _sections(child, context)


def _help(command: click.Command) -> str:
    """Return the help text as Markdown; a block after \\b becomes an indented block."""
    paragraphs = re.split(r"\n\n", inspect.cleandoc(command.help or ""))
    return "\n".join(f"{_paragraph(text)}\n" for text in paragraphs)


def _paragraph(text: str) -> str:
    if not text.startswith("\b\n"):
        return text
    lines = inspect.cleandoc(text.removeprefix("\b\n")).splitlines()
    title = [] if lines[0].startswith("cloze") else [lines.pop(0), ""]
    mark = ["<!-- not run: examples of the help text -->", ""]
    return "\n".join([*title, *mark, *(f"    {line.strip()}" for line in lines)])


def _options(command: click.Command, context: click.Context) -> str:
    rows = [
        f"| `{record[0]}` | {' '.join(record[1].split())} |\n".replace(
            str(DEFAULT_ROOT), "model_store/bundles"
        )
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts
        if (record := parameter.get_help_record(context)) is not None
    ]
    if not rows:
        return ""
    rows = [row.replace("] [", "; ") for row in rows]  # two brackets are a link of Markdown
    escaped = [re.sub(r"(?<=\w)\|(?=\w)", r"\\|", row) for row in rows]
    return "| option | meaning |\n|---|---|\n" + "".join(escaped)


def write_documents(docs: Path) -> None:
    """Write both pages into the folder `docs`."""
    (docs / "settings.md").write_text(settings_reference())
    (docs / "commands.md").write_text(command_reference())


if __name__ == "__main__":
    write_documents(Path(sys.argv[1]))
