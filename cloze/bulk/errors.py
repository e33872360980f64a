"""The error of a bulk run."""


class BulkError(Exception):
    """A run cannot begin or go on; the message is one line."""
