"""Reads CSV text with a header: files of bulk runs, and files that models learn from."""

import csv
from collections.abc import Iterable, Iterator


def records(
    lines: Iterable[str], *, most_characters: int, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield each record that is not empty, with the number of its last line.

    Args:
        most_characters: longest field.

    Raises:
        csv.Error: the text has quotes that do not match, or a longer field.
    """
    csv.field_size_limit(most_characters)
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    for record in filter(None, reader):
        yield reader.line_num, record


def header_of(rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Return the first record: the names of the columns.

    Raises:
        ValueError: there is none, or two columns have one name.
    """
    _, header = next(rows, (0, []))
    if not header:
        raise ValueError("has no line with the names of the columns")
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"has two columns named {name!a}")
    return header


def named(header: list[str], record: list[str]) -> tuple[dict[str, str], str | None]:
    """Return the fields of a record by column, and what is wrong; None: nothing."""
    error = None
    if len(record) != len(header):
        error = f"the row has {len(record)} fields, and the header has {len(header)}"
    return dict(zip(header, record, strict=False)), error
