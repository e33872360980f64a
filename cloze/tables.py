"""Prints progress, and results: a table on a terminal, plain columns to a pipe, or JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

Row = Mapping[str, Any]
"""The values of a row by column; every row of a table has the same columns."""


def report(line: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(line, err=True)


def print_rows(
    rows: Sequence[Row],
    *,
    as_json: bool = False,
    right: Sequence[str] = (),
    headings: bool = False,
) -> None:
    """Print rows.

    Args:
        as_json: print one JSON object per row instead of a table.
        headings: begin plain columns with their names, too.
    """
    if as_json:
        for row in rows:
            click.echo(json.dumps(row, default=str))
    elif rows and sys.stdout.isatty():
        _print_rich(rows, right)
    else:
        _print_plain(rows, right, headings)


def _print_rich(rows: Sequence[Row], right: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # With NO_COLOR, rich leaves out colours, but not bold letters.
    heading = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style=heading)
    for column in rows[0]:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    Console(markup=False, emoji=False, highlight=False).print(table)


def _print_plain(rows: Sequence[Row], right: Sequence[str], headings: bool) -> None:
    cells = [{column: _shown(value) for column, value in row.items()} for row in rows]
    columns = list(cells[0]) if cells else []
    if headings:
        cells.insert(0, {column: column for column in columns})
    widths = {column: max(len(row[column]) for row in cells) for column in columns}
    for row in cells:
        aligned = [
            f"{row[column]:{'>' if column in right else '<'}{widths[column]}}" for column in columns
        ]
        click.echo("  ".join(aligned).rstrip())


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value).replace("\n", " ")
