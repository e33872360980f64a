"""``cloze keys``: makes, lists and removes the API keys of a file."""

import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Any

import click

from cloze.failing import fail
from cloze.model_store.manifest import parse_reference
from cloze.options import json_option
from cloze.tables import print_rows, report

_SCOPES = ("inference", "metrics", "admin")

_file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    envvar="CLOZE_KEYS_FILE",
    show_envvar=True,
    help="The keys file; `cloze serve --keys-file` reads it.",
)


@click.group()
def keys() -> None:
    """Make, list and remove API keys.

    A server reads the file again within a second of a change.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(_SCOPES),
    default=("inference",),
    help="What the key allows; may be repeated.",
)
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Limit of the key.")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A model or adapter that the key may use, NAME or NAME@VERSION; may be repeated; "
    "default: all.",
)
@_file_option
def add(
    name: str,
    scopes: tuple[str, ...],
    requests_per_minute: int | None,
    models: tuple[str, ...],
    path: Path,
) -> None:
    """Make a key called NAME, write its hash into the file, and print the key once."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        fail("a name has 1 to 64 letters, digits, '_' and '-', a letter or digit first", code=2)
    for model in models:
        try:
            parse_reference(model)
        except ValueError as error:
            fail(f"--model: {error}", code=2)
    entries = _read(path)
    if name in entries:
        fail(f"{path} has a key called {name}; remove it first")
    key = f"cloze_{secrets.token_urlsafe(32)}"
    entry: dict[str, Any] = {
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "scopes": list(dict.fromkeys(scopes)),
    }
    if requests_per_minute is not None:
        entry["requests_per_minute"] = requests_per_minute
    if models:
        entry["models"] = list(dict.fromkeys(models))
    is_new = not path.exists()
    _write(path, entries | {name: entry})
    if is_new:
        report(
            f"only you can read {path}; for a server of another user, as in the image, "
            f"run: chmod 644 {path} (it has hashes, no keys)"
        )
    click.echo(key)


@keys.command("list")
@json_option
@_file_option
def list_keys(as_json: bool, path: Path) -> None:
    """Print the names, scopes and limits of the keys."""
    rows = [
        {
            "name": name,
            "scopes": entry.get("scopes", []),
            "requests per minute": entry.get("requests_per_minute", "any"),
            "models": entry.get("models", "all"),
        }
        for name, entry in _read(path).items()
    ]
    print_rows(rows, as_json=as_json, headings=True)


@keys.command()
@click.argument("name")
@_file_option
def remove(name: str, path: Path) -> None:
    """Remove the key called NAME. A file without keys then says that nobody shall have one."""
    entries = _read(path)
    if name not in entries:
        fail(f"{path} has no key called {name}")
    _write(path, {other: entry for other, entry in entries.items() if other != name})
    click.echo(f"removed {name}")
    if len(entries) == 1:
        click.echo("no key is left: a server with this file refuses everybody", err=True)


def _read(path: Path) -> dict[str, Any]:
    """Return the tables of the file, by the name of the key."""
    try:
        values = tomllib.loads(path.read_text())
        return {name: value for name, value in values.items() if isinstance(value, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fail(f"the keys file {path} cannot be read: {error}")


def _write(path: Path, entries: dict[str, Any]) -> None:
    """Replace the file by one rename; a new file is readable by its owner only."""
    lines = [] if entries else ["no_keys = true", ""]
    for name, entry in entries.items():
        lines.append(f"[{name}]")
        lines += [f"{field} = {json.dumps(value)}" for field, value in entry.items()]
        lines.append("")
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            if path.exists():  # a server under another user must still read it
                old = path.stat()
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            file.write("\n".join(lines))
        new.replace(path)
    except OSError as error:
        fail(f"the keys file {path} cannot be written: {error.strerror}")
