"""The error that stops a training run."""

from cloze.export.errors import DataError


class TrainError(DataError):
    """A run cannot start or continue. The last good checkpoint is kept.

    The message is one line: what is wrong and what to do next.
    """
