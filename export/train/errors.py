"""How training refuses or stops: one line that says what is wrong and what would be right."""

from export.errors import DataError


class TrainError(DataError):
    """A run cannot start or continue. The last good checkpoint is kept."""
