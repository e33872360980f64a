"""``cloze keys``: makes, replaces, lists and removes the API keys of a file."""

import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
from datetime import UTC, date, datetime
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


def _moment(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter("a date or a time, such as 2027-01-31T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_expires_option = click.option(
    "--expires",
    callback=_moment,
    help="Date or time (ISO 8601, UTC without a zone) from which on the key is refused.",
)


@click.group()
def keys() -> None:
    """Make, replace, list and remove API keys.

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
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Limit of the key.")
@_expires_option
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
    tokens_per_minute: int | None,
    expires: datetime | None,
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
        fail(f"{path} has a key called {name}; replace it by `cloze keys rotate`, or remove it")
    key, sha256 = _new_key()
    entry = {
        "sha256": sha256,
        "scopes": list(dict.fromkeys(scopes)),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "expires": expires,
        "models": list(dict.fromkeys(models)) or None,
    }
    is_new = not path.exists()
    _write(path, entries | {name: entry})
    if is_new:
        report(
            f"only you can read {path}; for a server of another user, as in the image, "
            f"run: chmod 644 {path} (it has hashes, no keys)"
        )
    click.echo(key)


@keys.command()
@click.argument("name")
@_expires_option
@_file_option
def rotate(name: str, expires: datetime | None, path: Path) -> None:
    """Make a further key called NAME, and print the key once.

    The earlier keys of the name stay valid until `cloze keys remove NAME --old`. All keys of a name
    have the same scopes, limits and end.
    """
    entries = _read(path)
    entry = _entry(entries, name, path)
    key, sha256 = _new_key()
    entry["sha256"] = [*_hashes(entry), sha256]
    entry["expires"] = expires or entry.get("expires")
    _write(path, entries)
    click.echo(key)


@keys.command("list")
@json_option
@_file_option
def list_keys(as_json: bool, path: Path) -> None:
    """Print the names, scopes and limits of the keys."""
    rows = [
        {
            "name": name,
            "keys": len(_hashes(entry)),
            "scopes": entry.get("scopes", []),
            "requests per minute": entry.get("requests_per_minute", "any"),
            "tokens per minute": entry.get("tokens_per_minute", "any"),
            "expires": str(entry.get("expires", "never")),
            "models": entry.get("models", "all"),
        }
        for name, entry in _read(path).items()
    ]
    print_rows(rows, as_json=as_json, headings=True)


@keys.command()
@click.argument("name")
@click.option("--old", is_flag=True, help="Remove only the keys that `cloze keys rotate` replaced.")
@_file_option
def remove(name: str, old: bool, path: Path) -> None:
    """Remove the keys called NAME. A file without keys then says that nobody shall have one."""
    entries = _read(path)
    entry = _entry(entries, name, path)
    if old:
        *replaced, entry["sha256"] = _hashes(entry)
        _write(path, entries)
        click.echo(f"removed {len(replaced)} of the keys called {name}")
        return
    del entries[name]
    _write(path, entries)
    click.echo(f"removed {name}")
    if not entries:
        click.echo("no key is left: a server with this file refuses everybody", err=True)


def _new_key() -> tuple[str, str]:
    """Return a key and its hash."""
    key = f"cloze_{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def _entry(entries: dict[str, dict[str, Any]], name: str, path: Path) -> dict[str, Any]:
    """Return the table of a name; end the command if there is none."""
    if name not in entries:
        fail(f"{path} has no key called {name}")
    return entries[name]


def _hashes(entry: dict[str, Any]) -> list[str]:
    """Return the hashes of a name's keys, the newest one last."""
    sha256 = entry.get("sha256", [])
    return sha256 if isinstance(sha256, list) else [sha256]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of the file, by the name of the key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: value for name, value in values.items() if isinstance(value, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fail(f"the keys file {path} cannot be read: {error}")


def _write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Replace the file by one rename; a new file is readable by its owner only."""
    lines = [] if entries else ["no_keys = true", ""]
    for name, entry in entries.items():
        lines.append(f"[{name}]")
        lines += [
            f"{field} = {value.isoformat() if isinstance(value, date) else json.dumps(value)}"
            for field, value in entry.items()
            if value is not None
        ]
        lines.append("")
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            if path.exists():  # a server under another user must still read it
                old = path.stat()
                if hasattr(os, "fchown"):  # not on Windows
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                new.chmod(stat.S_IMODE(old.st_mode))
            file.write("\n".join(lines))
        new.replace(path)
    except OSError as error:
        fail(f"the keys file {path} cannot be written: {error.strerror}")
