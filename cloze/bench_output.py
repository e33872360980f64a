"""The output of ``cloze bench``: tables, and the files of ``--out``."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cloze.bench.result import Result


def repeating_command() -> str:
    """Return the command line of this process."""
    return shlex.join(["cloze", *sys.argv[1:]])


def now() -> str:
    """Return the date and the time in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M}"


def create_out(out: Path | None) -> None:
    """Create the folder and the JSON file, so that a wrong path fails before the measurement."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").touch()


def present(result: "Result", out: Path | None, *, as_json: bool) -> None:
    """Print the table or the figures as JSON, and write the files."""
    from cloze.bench.report import table

    click.echo(result.to_json() if as_json else table(result))
    write(result, out)


def write(result: "Result", out: Path | None) -> None:
    """Write the figures, the tables, and plots of loads, if `out` is given."""
    from cloze.bench.plots import draw
    from cloze.bench.report import table

    if out is not None:
        Path(f"{out}.json").write_text(result.to_json(), encoding="utf-8")
        Path(f"{out}.md").write_text(table(result), encoding="utf-8")
        if not result.cells:  # the loads of a device's servers differ, so curves would mislead
            draw(result, Path(f"{out}.png"))
