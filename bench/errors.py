"""The one way a measurement refuses."""


class BenchError(Exception):
    """What is to be measured cannot be. The message says why."""
