"""The error of the benchmark."""


class BenchError(Exception):
    """A measurement that is not possible. The message gives the reason."""
