"""The errors of export and training: each is one line, what is wrong and what to do next."""

from collections.abc import Callable

Report = Callable[[str], None]
"""Receives one line per event of an export or a run."""


class ExportError(Exception):
    """A source cannot be exported as a bundle."""


class DataError(Exception):
    """A file of text, pairs or questions cannot be used."""


class TrainError(DataError):
    """A run cannot start or continue. The last good checkpoint is kept."""
